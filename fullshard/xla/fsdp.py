"""`FSDPv2` on XLA: the same plan, names and methods as on the torch engine; the compiler executes the plan.

Parameters are global tensors of the logical device, annotated with the layouts of the plan. What the compiler decides
(when to gather, how long to keep, what to send) has no option here: such options are refused, or reported as without
effect.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.config.errors import FSDPError, UnsupportedError
from fullshard.fsdp import checks
from fullshard.fsdp import state_dict as state
from fullshard.fsdp.extended_class import WrappedModule
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.fsdp.torch_methods import SERVED, refuse_keywords, refuse_methods
from fullshard.spmd.mesh import Mesh
from fullshard.xla import build, values
from fullshard.xla.units import ShardedModel, Unit


class FSDPv2(WrappedModule):
    """The methods that a wrapped module gains. `FSDPv2(module, mesh, …)` wraps a module; see `docs/fsdp.md`."""

    _fullshard_unit: Unit
    _fullshard_model: ShardedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fullshard_model.run(self._fullshard_unit, super().__call__, args, kwargs)  # type: ignore[misc]

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan: units, parameters and layouts. `print(model.plan)` shows it."""
        return self._fullshard_model.plan

    # --- training ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing: gradients are global values that the compiler reduces, and nothing can be held back."""
        yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; returns the norm before.

        The norm stays on the devices. `error_if_nonfinite` reads it, which waits for the step.
        """
        if norm_type <= 0:
            raise FSDPError(f"clip_grad_norm_: norm_type={norm_type} is not a norm; expected a positive number or inf")
        parameters = [p for p in self.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, foreach=False)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise FSDPError(f"clip_grad_norm_: the norm of the gradients is {norm.item()}, which is not finite")
        return norm

    # --- values -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def summon_full_params(self, *, writeback: bool = True, offload_to_cpu: bool = False) -> Iterator[None]:
        """Inside, modules hold whole parameters: on every device, or in host memory. With `writeback`, changes are
        kept."""
        with values.summon_full_params(self._fullshard_model, writeback, offload_to_cpu):
            yield

    def full_state_dict(self, *, rank0_only: bool = False, cpu: bool = True) -> dict[str, torch.Tensor]:
        """Whole values under the plain module's names. With `rank0_only`, other processes get an empty dict. All
        processes must call it."""
        return values.full_state_dict(self, rank0_only, cpu)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole values; parameters keep their layouts."""
        values.give_memory(self._fullshard_model, self, state_dict)
        result = super().load_state_dict(state_dict, strict=strict, assign=False)  # type: ignore[misc]
        self._fullshard_model.settle()
        return result

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As `nn.Module.apply`, on whole parameters in host memory: random numbers are those of the host."""
        with self.summon_full_params(offload_to_cpu=True):
            return super().apply(fn)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """transformers' `save_pretrained` with whole values. All processes must call it; process 0 writes."""
        return state.save_pretrained(self, super(), save_directory, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`. Every new length is compiled once; a static cache avoids that."""
        with torch.no_grad():
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    # --- refusals ---------------------------------------------------------------------------------------------------

    def compile_units(self, say: Any = None, **options: Any) -> NoReturn:
        raise UnsupportedError(
            "compile_units() is torch.compile for each unit; on XLA the whole step is compiled already. Remove the call"
        )

    @property
    def meter(self) -> NoReturn:
        raise UnsupportedError(
            "model.meter counts the collectives that the torch engine issues; on XLA the compiler issues them. Its own "
            "dump lists them: XLA_FLAGS=--xla_dump_to=<folder>, before the first computation"
        )


refuse_methods(
    FSDPv2,
    dict.fromkeys(SERVED, "on XLA the compiler gathers, frees and reduces; full_state_dict() has the whole values"),
)
SpmdFullyShardedDataParallel = FSDPv2


def _wrap(
    module: nn.Module,
    mesh: Mesh | None = None,
    shard_output: Callable[[Any, Mesh], Any] | None = None,
    *,
    auto_wrap_policy: Any = None,
    auto_wrapper_callable: Callable[..., Any] | None = None,
    extra_data_axis: str | None = None,
    strategy: ShardingStrategy | str | int = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | str | torch.dtype | None = None,
    cpu_offload: bool = False,
    forward_prefetch: bool = True,
    backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.BACKWARD_PRE,
    gathers_in_flight: int = 1,
    ignored_modules: Iterable[nn.Module] | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    sync_module_states: bool | None = None,
    timeout: float | None = None,
    small_parameter_bytes: int | None = None,
    **of_torch: Any,
) -> Any:
    refuse_keywords(of_torch)
    options = build.Options(
        mesh=checks.check_mesh(mesh, extra_data_axis),
        shard_output=shard_output,
        extra_data_axis=extra_data_axis,
        strategy=ShardingStrategy.of(strategy),
        precision=MixedPrecision.of(mixed_precision),
        ignored=set(ignored_modules or ()),
        param_init_fn=param_init_fn,
    )
    checks.check_module(module, FSDPv2, auto_wrap_policy)
    build.refuse_options(options, module, cpu_offload=cpu_offload, sync_module_states=sync_module_states)
    build.report_without_effect(
        forward_prefetch=forward_prefetch is True,
        backward_prefetch=BackwardPrefetch.of(backward_prefetch) is BackwardPrefetch.BACKWARD_PRE,
        gathers_in_flight=gathers_in_flight == 1,
        timeout=timeout is None,
        small_parameter_bytes=small_parameter_bytes is None,
    )
    wrapper_options = {
        "extra_data_axis": extra_data_axis, "strategy": options.strategy, "mixed_precision": options.precision,
        "ignored_modules": ignored_modules, "param_init_fn": param_init_fn,
    }  # fmt: skip
    build.assemble(module, options, auto_wrap_policy, auto_wrapper_callable, wrapper_options, FSDPv2)
    _check_optimizers()
    return module


FSDPv2._fullshard_wrap = staticmethod(_wrap)


@functools.cache
def _check_optimizers() -> None:
    """Check every optimizer before its steps. Once per process."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: checks.refuse_replaced(optimizer))
