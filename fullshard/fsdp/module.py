"""`FSDPv2`: shards a module, which stays the same object.

`FSDPv2(module, mesh)` plans the module, shards its parameters and extends its class; names, `isinstance`, hooks and
attributes stay. This file has the public methods; they are implemented in `build.py`, `engine.py` and `state_dict.py`.
Methods of torch's own FSDP are in `torch_methods.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.fsdp import build, compile, grad_clip
from fullshard.fsdp import state_dict as state
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.engine import Engine
from fullshard.fsdp.output import OutputRule
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.torch_methods import TorchMethods, wrapped_roots
from fullshard.fsdp.unit import Unit
from fullshard.fsdp.wrapped_module import Options


class FSDPv2(TorchMethods):
    """The methods that a wrapped module gains. `FSDPv2(module, mesh, …)` wraps a module; see `docs/fsdp.md`."""

    _fsdp_use_orig_params = True  # torch.compile requires it of a module with `_is_fsdp_managed_module`
    _fullshard_unit: Unit
    _fullshard_engine: Engine
    _fullshard_output: OutputRule

    @staticmethod
    def _fullshard_assemble(module: nn.Module, options: Options) -> None:
        compile.never_compile(FSDPv2.__call__, compile.Compiler.uncompiled)
        build.assemble(module, options, FSDPv2)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().__call__  # type: ignore[misc]
        return self._fullshard_engine.compiler.uncompiled(self._fullshard_run, forward, args, kwargs)

    def _fullshard_run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        engine, unit = self._fullshard_engine, self._fullshard_unit
        if not unit.holds_units and not unit.plan.axes:  # experts wait for tokens of other ranks
            forward = engine.compiler.resumed(forward)
        return engine.run(unit, forward, args, kwargs, self._fullshard_output)

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """Tells transformers' `generate` to keep ranks in step.

        Only the outermost module has it, and the model inside an adapter if the adapter's own module is a unit without
        parameters: there `generate` is the inner model's.
        """
        for unit in self._fullshard_engine.units:
            if unit.module is self or unit.parameters:
                return unit.module is self
        return False

    # --- inspection -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan: units, parameters and layouts. `print(model.plan)` shows it."""
        return build.plan_of(self)

    @property
    def meter(self) -> Meter:
        """Counters of collectives, bytes and gathered memory."""
        return self._fullshard_engine.context.meter

    # --- training ---------------------------------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside do not reduce: each rank keeps whole gradients, and the next backward outside reduces
        them all."""
        return self._fullshard_engine.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm, over all shards of all parameters, is at most `max_norm`."""
        with self._fullshard_engine.showing_shards():
            parameters = [p for p in self.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        return grad_clip.clip_grad_norm_(parameters, self._fullshard_mesh, max_norm, norm_type, error_if_nonfinite)

    def compile_units(self, say: Callable[[str], None] | None = None, **options: Any) -> FSDPv2:
        """`torch.compile` each unit below the root and the norms between units, or the root if there are none; gathers
        stay outside the graphs.

        `say` gets the line that announces compilation, at the first call.
        """
        inside = set(self.modules()) - {self}  # type: ignore[attr-defined]
        below = [u.module for u in self._fullshard_engine.units if u.module in inside and not u.holds_units]
        compile.compile_modules([*below, *compile.norms_between(self, below)] if below else [self], say, **options)
        return self

    # --- values -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """Inside, modules hold whole parameters in their stored dtype. With `writeback`, changes are kept.

        The whole model is gathered, on all ranks: torch's `recurse` and `rank0_only` change nothing. Gradients stay
        sharded, so `with_grads` is refused.
        """
        if with_grads:
            raise FSDPError("summon_full_params(with_grads=True): gradients stay sharded; use p.grad.full_tensor()")
        with contextlib.ExitStack() as stack:
            for root in wrapped_roots(self):
                stack.enter_context(state.summon_full_params(root._fullshard_engine, writeback, offload_to_cpu))
            yield

    def full_state_dict(self, *, rank0_only: bool = False, cpu: bool = True) -> dict[str, torch.Tensor]:
        """Whole values under the plain module's names. With `rank0_only`, other ranks get an empty dict. All ranks must
        call it."""
        return state.full_state_dict(self, rank0_only, cpu)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded values (`DTensor`s) under the plain module's names; whole ones inside `state_dict_type(…)`."""
        settings = self._fullshard_engine.state_dict_settings
        if settings is not None and settings.state_dict_type.name == "FULL_STATE_DICT" and not kwargs.get("keep_vars"):
            config = settings.state_dict_config
            whole = self.full_state_dict(rank0_only=config.rank0_only, cpu=config.offload_to_cpu)
            return state.with_prefix(whole, *args, **kwargs)
        with self._fullshard_engine.showing_shards():
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole or sharded values; each rank keeps its shards."""
        values = state.as_shards(self, state_dict)
        with self._fullshard_engine.showing_shards():
            return super().load_state_dict(values, strict=strict, assign=False)  # type: ignore[misc]

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As `nn.Module.apply`, on whole parameters."""
        with self.summon_full_params():
            return super().apply(fn)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """transformers' `save_pretrained` with whole values. All ranks must call it; rank 0 writes."""
        return state.save_pretrained(self, super(), save_directory, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`. The module's own parameters stay gathered throughout, because parts of the model
        that are no units (an encoder) are called on their own."""
        engine, unit = self._fullshard_engine, self._fullshard_unit
        forward = super().generate  # type: ignore[misc]
        with torch.no_grad():
            return engine.compiler.uncompiled(engine.run, unit, forward, args, kwargs, lambda output, as_global: output)


SpmdFullyShardedDataParallel = FSDPv2
