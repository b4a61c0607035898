"""Initialization of what is not in the files: new parameters such as adapters, and computed buffers.

A new parameter depends only on the seed and its name. It is initialized whole, by its own module or model, while all
other parameters are on the meta device; each rank then keeps its slice. The values therefore depend neither on the
number of ranks nor on what else is initialized.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fullshard.config.errors import WeightsError
from fullshard.device.torch_private import buffers_of, parameters_of
from fullshard.distributed import runtime
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.weights.wrapped import set_whole


@contextlib.contextmanager
def without_values(parameters: Iterable[ShardedParameter]) -> Iterator[None]:
    """Replace parameters temporarily by plain ones on the meta device, where initializers have no effect."""
    replaced = list(parameters)
    for p in replaced:
        _show(p, torch.empty(p.plan.shape, dtype=dtype_of(p.plan.dtype), device="meta"))
    try:
        yield
    finally:
        for p in replaced:
            p.show_shard()


def initialize(root: nn.Module, parameters: list[ShardedParameter], new: list[ShardedParameter], seed: int) -> None:
    """Initialize new parameters."""
    ancestors = _ancestors(root)
    failed = []
    with without_values(parameters):
        for p in new:
            with seeded(seed, p.plan.name):
                value = _initial_value(p, ancestors)
            if value is None:
                failed.append(p.plan.name)
                continue
            set_whole(p, value)
    if failed:
        raise WeightsError(
            f"{len(failed)} new parameter(s) have no initializer: {', '.join(failed[:5])}. Neither reset_parameters() "
            f"of their module nor _init_weights() of their model sets them, or they depend on loaded weights. Set them "
            f"in such a method, or give them values before the model is wrapped"
        )


def initial_value(root: nn.Module, p: ShardedParameter, seed: int) -> torch.Tensor:
    """The whole value that `initialize` gives a parameter; to be called inside `without_values`."""
    with seeded(seed, p.plan.name):
        value = _initial_value(p, _ancestors(root))
    assert value is not None
    return value


def _initial_value(p: ShardedParameter, ancestors: dict[nn.Module, list[nn.Module]]) -> torch.Tensor | None:
    """The initial value of a parameter; None if no initializer sets it."""
    empty = torch.empty(p.plan.shape, dtype=dtype_of(p.plan.dtype))
    if not empty.is_floating_point():
        return None
    _show(p, empty.fill_(torch.nan))
    try:
        for module, name in p.sites:
            for initializer in _initializers(ancestors[module]):
                initializer()
            value = parameters_of(module)[name]
            assert value is not None
            if not value.isnan().any():
                return value.detach()
        return None
    finally:
        _show(p, empty.to("meta"))


def compute_buffers(root: nn.Module, parameters: list[ShardedParameter]) -> list[str]:
    """Compute the buffers that are still on the meta device. Returns the names of those that no module computes."""
    waiting = [
        (prefix, module, name)
        for prefix, module in root.named_modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and buffer.is_meta
    ]
    if not waiting:
        return []
    _init_vera_projections(root)
    waiting = [(prefix, module, name) for prefix, module, name in waiting if buffers_of(module)[name].is_meta]
    ancestors = _ancestors(root)
    passes = []
    for start in (0, 1):  # a buffer that keeps both fill values was never set
        for _, module, name in waiting:
            buffers_of(module)[name] = torch.full_like(buffers_of(module)[name], start, device="cpu")
        with without_values(parameters), seeded(0, "buffers"):
            for module in {id(module): module for _, module, _ in waiting}.values():
                for initializer in _initializers(ancestors[module]):
                    initializer()
        passes.append([buffers_of(module)[name] for _, module, name in waiting])
    not_computed = []
    for (prefix, module, name), first, second in zip(waiting, *passes, strict=True):
        if not torch.equal(first, second):
            not_computed.append(f"{prefix}.{name}" if prefix else name)
        buffers_of(module)[name] = second.to(runtime.device())
    return not_computed


def _init_vera_projections(root: nn.Module) -> None:
    """Initialize VeRA's shared projections from their seed, as PEFT does."""
    from peft.tuners.vera.model import VeraModel, _kaiming_init

    for tuner in root.modules():
        if isinstance(tuner, VeraModel):
            for adapter, config in tuner.peft_config.items():
                draw = torch.Generator(device="cpu").manual_seed(config.projection_prng_key)
                for projections in (tuner.vera_A, tuner.vera_B):
                    with torch.device("cpu"):
                        projections[adapter] = _kaiming_init(tuple(projections[adapter].shape), draw).to(
                            runtime.device()
                        )


def _show(p: ShardedParameter, value: torch.Tensor) -> None:
    """Make a plain parameter with this value visible in the modules."""
    parameter = nn.Parameter(value, requires_grad=p.shard.requires_grad and value.is_floating_point())
    for module, name in p.sites:
        parameters_of(module)[name] = parameter


def _ancestors(root: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The path to every module: `root`, …, its parent, the module itself."""
    modules = dict(root.named_modules())
    ancestors = {}
    for name, module in modules.items():
        parts = name.split(".") if name else []
        ancestors[module] = [root, *(modules[".".join(parts[: i + 1])] for i in range(len(parts)))]
    return ancestors


def _initializers(path: list[nn.Module]) -> Iterator[Callable[[], Any]]:
    """The functions that initialize the last module of a path: its adapter layer's, else its model's, else its own."""
    resets = ("reset_lora_parameters", "reset_vera_parameters")
    tuner: Any = next((m for m in reversed(path) if any(hasattr(m, name) for name in resets)), None)
    if tuner is not None and path[-1] is not tuner and tuner.base_layer not in path:
        configs: dict[str, Any] = next((m.peft_config for m in path if hasattr(m, "peft_config")), {})
        if hasattr(tuner, "reset_vera_parameters"):
            for adapter in tuner.vera_lambda_d:
                yield functools.partial(tuner.reset_vera_parameters, adapter, configs[adapter].d_initial)
            return
        for adapter in (*tuner.lora_A, *tuner.lora_embedding_A):
            choice = getattr(configs.get(adapter), "init_lora_weights", True)
            if choice is False:  # PEFT then keeps torch's own initialization of the layers
                yield getattr(path[-1], "reset_parameters", lambda: None)
            else:
                yield functools.partial(tuner.reset_lora_parameters, adapter, _checked(choice))
        return
    models = [m for m in path if isinstance(m, PreTrainedModel)]
    if models:
        # Children before parents, as in transformers: a parent may override its child's initialization.
        for module in reversed(path[path.index(models[-1]) :]):
            yield functools.partial(models[-1]._init_weights, module)
    elif callable(own := getattr(path[-1], "reset_parameters", None)):
        yield own


def _checked(choice: Any) -> Any:
    if choice is True or str(choice).lower() == "gaussian":
        return choice
    if choice == "loftq":
        return True  # a dense layer has no quantization error to correct
    raise WeightsError(
        f"init_lora_weights={choice!r} is not supported for this layer. Use True, 'gaussian', 'pissa' or 'olora', or "
        f"compute the adapter beforehand and load it"
    )


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the CPU generator by (seed, name) inside the context, without gradients; restore it afterwards."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield
