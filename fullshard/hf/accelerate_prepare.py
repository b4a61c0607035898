"""`Accelerator.prepare` and what a training loop calls on prepared models: `no_sync`, `clip_grad_norm_`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.device.torch_private import parameters_of
from fullshard.distributed import runtime
from fullshard.distributed.ranks import require_equal
from fullshard.fsdp import FSDPv2, grad_clip, wrap
from fullshard.parallel.model import join_ranks, shard_model, wrap_policy
from fullshard.parallel.prepare import rebind, step_facts
from fullshard.parallel.settings import EngineSettings


def is_served(accelerator: Any) -> bool:
    """Whether this engine runs the accelerator's models."""
    return hasattr(getattr(accelerator.state, "fsdp_plugin", None), "fullshard")


def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.prepare`: models first, so that optimizers find the shards."""

    def prepared(self: Any, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        if not is_served(self):
            return original(self, *objects, device_placement=device_placement)
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [getattr(one, "optimizer", one) for one in objects if isinstance(one, Optimizer)]
        if models or optimizers:
            require_equal(step_facts(*models, *optimizers), "settings and versions")
        with _let_go(optimizers, models):
            for model in models:
                self.prepare_model(model)
        for optimizer in optimizers:
            rebind(optimizer)
        places = device_placement or [None] * len(objects)  # type: ignore[list-item]
        ready = [self._prepare_one(one, first_pass=True, device_placement=at) for one, at in zip(objects, places)]  # noqa: B905
        ready = [self._prepare_one(one) if not isinstance(one, nn.Module) else one for one in ready]
        containers = (self._models, self._optimizers, self._schedulers, self._dataloaders)
        for one in ready:
            if any(one is known for container in containers for known in container):
                one._is_accelerate_prepared = True
        return ready[0] if len(ready) == 1 else tuple(ready)

    return prepared


@contextlib.contextmanager
def _let_go(optimizers: list[Optimizer], models: list[nn.Module]) -> Iterator[None]:
    """Optimizers hold no parameters of the models inside, so that each is freed once it is sharded; shards after."""
    sites: dict[int, tuple[nn.Module, str]] = {}
    for module in (module for model in models for module in model.modules()):
        sites |= {id(p): (module, name) for name, p in parameters_of(module).items() if p is not None}
    groups = []
    for group in (group for optimizer in optimizers if not optimizer.state for group in optimizer.param_groups):
        groups.append((group, [sites.get(id(p), p) for p in group["params"]]))
        group["params"] = []
    try:
        yield
    finally:
        for group, places in groups:
            group["params"] = [parameters_of(at[0])[at[1]] if isinstance(at, tuple) else at for at in places]


def prepare_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.prepare_model`; a model for evaluation only is sharded too."""

    def prepared(
        self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if not is_served(self):
            return original(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if not isinstance(model, FSDPv2):
            shard(self, model)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    return prepared


def shard(accelerator: Any, model: nn.Module) -> Any:
    """The model, sharded in place as the plugin of this accelerator says."""
    plugin = accelerator.state.fsdp_plugin
    settings = _settings(accelerator, plugin.fullshard.settings)
    join_ranks(settings)
    options = {
        "auto_wrap_policy": wrap_policy(model, settings),
        **plugin.fullshard.options,
        **plugin.fullshard.wrap_policy(plugin.auto_wrap_policy),
    }
    options["auto_wrap_policy"] = _with_inner_model(options["auto_wrap_policy"], model)
    if "transformers" in sys.modules:
        from fullshard.hf import four_bit

        wrapped = four_bit.wrap(settings, model, options)
    else:
        wrapped = shard_model(model, settings, split_tables=False, **options)
    runtime.get_logger().info("%s: %s", type(model).__name__, str(wrapped.plan).splitlines()[0])
    return wrapped


def _with_inner_model(policy_option: Any, model: nn.Module) -> Any:
    """A policy that also makes a unit of the transformers model inside an adapter or another module.

    Libraries call that model on its own (`PeftModel.generate`, `get_base_model()`), past the module around it.
    """
    if "transformers" not in sys.modules:
        return policy_option
    from fullshard.weights.key_mapping import plain_model

    _, inner = plain_model(model)
    if inner is None or inner is model:
        return policy_option
    chosen = wrap.resolve(policy_option, model)

    def inner_model_too(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        below = chosen is not None and chosen(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        return below or (module is inner if not recurse else any(part is inner for part in module.modules()))

    return inner_model_too


def _settings(accelerator: Any, settings: EngineSettings) -> EngineSettings:
    """The settings with what the script gave to `Accelerator` itself."""
    precision = accelerator.mixed_precision
    if precision == "fp16" and accelerator.scaler is None:
        runtime.warn_once("fp16", "fp16 needs a loss scaler, which Accelerate has on GPUs only: computing in fp32")
        precision = "no"
    changes: dict[str, Any] = {"mixed_precision": precision}
    compiled = accelerator.state.dynamo_plugin
    if compiled is not None and compiled.backend.value.lower() != "no":
        changes |= {
            "backend": compiled.backend.value, "mode": compiled.mode or "default",
            "use_fullgraph": bool(compiled.fullgraph), "use_dynamic": bool(compiled.dynamic),
        }  # fmt: skip
    if (sizes := getattr(accelerator, "parallelism_config", None)) is not None:
        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        changes |= {name: size for name in names if (size := getattr(sizes, name, 1)) > 1}
    return dataclasses.replace(settings, **changes)


def no_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.no_sync`."""

    @contextlib.contextmanager
    def held_back(self: Any, model: nn.Module) -> Iterator[None]:
        with model.no_sync() if isinstance(model, FSDPv2) else original(self, model):
            yield

    return held_back


def clip_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.clip_grad_norm_`."""

    def clipped(
        self: Any, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        mesh = next((model.mesh for model in self._models if isinstance(model, FSDPv2)), None)
        if mesh is None:
            return original(self, parameters, max_norm, norm_type=norm_type)
        self.unscale_gradients()
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        with_gradients: Any = [p for p in tensors if p.grad is not None]
        return grad_clip.clip_grad_norm_(with_gradients, mesh, max_norm, norm_type, False)

    return clipped


def get_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.get_state_dict`: whole values on the first rank, tied ones as one tensor."""

    def whole(self: Any, model: nn.Module, unwrap: bool = True) -> Any:
        if not isinstance(model, FSDPv2):
            return original(self, model, unwrap=unwrap)
        return model.full_state_dict(rank0_only=True)

    return whole


def clip_grad_value(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.clip_grad_value_`."""

    def clipped(self: Any, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        if not is_served(self):
            return original(self, parameters, clip_value)
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_value_(parameters, clip_value)

    return clipped


def join_uneven_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.join_uneven_inputs`."""

    @contextlib.contextmanager
    def joined(self: Any, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        if not any(isinstance(one, FSDPv2) for one in joinables):
            with original(self, joinables, even_batches):
                yield
            return
        loaders = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        uneven: list[Any] = [sampler for sampler in loaders if getattr(sampler, "even_batches", None) is False]
        if uneven or even_batches is False:
            runtime.warn_once(
                "join_uneven_inputs",
                "join_uneven_inputs: every rank takes part in each step of a sharded model, so ranks that run out of "
                "rows repeat some (even_batches=True). fullshard.prepare weights uneven batches instead",
            )
        for sampler in uneven:
            sampler.even_batches = True
        try:
            yield
        finally:
            for sampler in uneven:
                sampler.even_batches = False

    return joined
