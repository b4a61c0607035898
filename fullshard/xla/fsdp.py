"""`FSDPv2` on XLA: the same plan, names and methods as on the torch engine; the compiler executes the plan.

Parameters are global tensors of the logical device, annotated with the layouts of the plan. What the compiler decides
(when to gather, how long to keep, what to send) has no option here: such options are refused, or reported as without
effect.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.config.errors import UnsupportedError
from fullshard.distributed import runtime
from fullshard.fsdp import checks, grad_clip
from fullshard.fsdp import state_dict as state
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import dtype_of
from fullshard.fsdp.torch_methods import SERVED, refuse_methods
from fullshard.fsdp.wrapped_module import Options, WrappedModule
from fullshard.xla import build
from fullshard.xla.tensor import full_tensor, is_xla_tensor
from fullshard.xla.units import ShardedModel, Unit


class FSDPv2(WrappedModule):
    """The methods that a wrapped module gains. `FSDPv2(module, mesh, …)` wraps a module; see `docs/fsdp.md`."""

    _fullshard_unit: Unit
    _fullshard_model: ShardedModel

    @staticmethod
    def _fullshard_assemble(module: nn.Module, options: Options) -> None:
        build.assemble(module, options, FSDPv2)
        _check_optimizers()

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
        p = grad_clip.check_norm_type(norm_type)
        parameters = [q for q in self.parameters() if q.grad is not None]  # type: ignore[attr-defined]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, p, foreach=False)
        if error_if_nonfinite:
            grad_clip.refuse_nonfinite(norm)
        return norm

    # --- values -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def summon_full_params(self, *, writeback: bool = True, offload_to_cpu: bool = False) -> Iterator[None]:
        """Inside, modules hold whole parameters: on every device, or in host memory. With `writeback`, changes are
        kept."""
        with _summon_full_params(self._fullshard_model, writeback, offload_to_cpu):
            yield

    def full_state_dict(self, *, rank0_only: bool = False, cpu: bool = True) -> dict[str, torch.Tensor]:
        """Whole values under the plain module's names. With `rank0_only`, other processes get an empty dict. All
        processes must call it."""
        return _full_state_dict(self, rank0_only, cpu)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole values; parameters keep their layouts."""
        _give_memory(self._fullshard_model, self, state_dict)
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
        """Refused: whole steps are compiled."""
        raise UnsupportedError(
            "compile_units() is torch.compile for each unit; on XLA the whole step is compiled already. Remove the call"
        )

    @property
    def meter(self) -> NoReturn:
        """Refused: the compiler issues the collectives."""
        raise UnsupportedError(
            "model.meter counts the collectives that the torch engine issues; on XLA the compiler issues them. Its own "
            "dump lists them: XLA_FLAGS=--xla_dump_to=<folder>, before the first computation"
        )


refuse_methods(
    FSDPv2,
    dict.fromkeys(SERVED, "on XLA the compiler gathers, frees and reduces; full_state_dict() has the whole values"),
)


# --- reading and writing values ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _summon_full_params(model: ShardedModel, writeback: bool, offload_to_cpu: bool) -> Iterator[None]:
    """Let modules hold whole parameters inside."""
    if model.summoned:
        yield  # already inside another one
        return
    runtime.sync()
    stored_values = [(p, p.parameter) for p in model.parameters]
    for p, stored in stored_values:
        whole = full_tensor(stored)
        p.hold(nn.Parameter(whole if offload_to_cpu else whole.to(runtime.device()), stored.requires_grad))
    model.summoned = True
    try:
        yield
        if writeback:
            with torch.no_grad():
                for p, stored in stored_values:
                    current = full_tensor(p.parameter).to(stored.dtype)
                    if not torch.equal(current, full_tensor(stored)):  # a write invalidates what autograd saved
                        stored.copy_(current)
    finally:
        model.summoned = False
        for p, stored in stored_values:
            p.hold(stored)
        model.settle()


def _full_state_dict(model: Any, rank0_only: bool, cpu: bool) -> dict[str, torch.Tensor]:
    """Whole values, read one parameter at a time."""
    keeps = not rank0_only or runtime.is_main()
    runtime.sync()
    copies: dict[int, torch.Tensor] = {}  # tied values stay one tensor
    out: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                whole = full_tensor(value.detach())  # all processes take part
                whole = whole if is_xla_tensor(value) or value.is_meta else whole.clone()
                copies[id(value)] = whole if cpu else whole.to(runtime.device())
            value = copies[id(value)]
        if keeps:
            out[name] = value
    return out


def _give_memory(model: ShardedModel, part: Any, values: Mapping[str, Any]) -> None:
    """Allocate parameters on the meta device for which a state dict of `part` has values."""
    prefix = model.names[part]
    names = {f"{prefix}.{name}" if prefix else name for name in values}
    for p in model.parameters:
        if p.parameter.is_meta and names.intersection(p.plan.names):
            empty = torch.zeros(p.plan.shape, dtype=dtype_of(p.plan.dtype))
            p.place(nn.Parameter(empty, requires_grad=p.parameter.requires_grad))


@functools.cache
def _check_optimizers() -> None:
    """Check every optimizer before its steps. Once per process."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: checks.refuse_replaced(optimizer))
