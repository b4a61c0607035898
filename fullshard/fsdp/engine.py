"""The engine: when the units of a model are gathered, freed and reduced.

It wraps every call of a unit's module. Forward: gather, run, free. Backward is followed with hooks on the tensors that
units take and return: when a gradient arrives at an output, the unit's backward begins; when one arrives at an input,
it is over. Autograd runs operations in the reverse of their forward order, so when the backward of one call begins, the
backward of every later call is over. Reductions are issued in that order on every rank, whatever branches its data
took.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fullshard.config.errors import FSDPError
from fullshard.device import accelerator
from fullshard.device.torch_private import at_end_of_backward, current_graph_task_id, sequence_nr
from fullshard.distributed.watchdog import watch
from fullshard.fsdp import backward_entry, gradients, uneven_batches
from fullshard.fsdp.backward_entry import CallGraph, UnitCall, in_backward
from fullshard.fsdp.compile import Compiler
from fullshard.fsdp.output import without_gathered_memory
from fullshard.fsdp.prefetch import Prefetcher, PrefetchSettings
from fullshard.fsdp.reduction import Reduction
from fullshard.fsdp.unit import EngineContext, Unit, UnitState
from fullshard.spmd.tensor import is_sharded
from fullshard.spmd.tensor_tree import cast_tensors, map_tensors, tensors_in

KEEP_AFTER = 2
"""Optimizer steps after which memory has been at its peak, so that what is left may be used."""


@dataclass
class _Backward:
    """One run of autograd's engine; re-entrant checkpointing nests them."""

    reached: dict[Unit, int] = field(default_factory=dict)
    """Units whose backward has begun and is not over, with the `order` of the earliest call reached."""


class Engine:
    """Runs the units of one model."""

    def __init__(
        self, units: list[Unit], context: EngineContext, settings: PrefetchSettings, before_pass: Callable[[], None]
    ) -> None:
        self.units, self.context, self.settings = units, context, settings
        self.sync = True
        """Whether gradients are reduced at the end of a backward pass."""
        self.step = 0
        self.decides_copies = True
        """Whether `keep_copies` is called here, and not by code that plans memory."""
        self._first_step = sys.maxsize
        self.summoned = False
        """Whether modules hold whole parameters because of `summon_full_params`."""
        self.state_dict_settings: Any = None
        """What `set_state_dict_type` of torch's FSDP was given last; None if it was not called."""
        self.unsharded: set[Unit] = set()
        """Units that the user has gathered with `unshard`; until the next pass."""
        self.compiler = Compiler()
        self._before_pass = before_pass
        parameters = [p for unit in units for p in unit.parameters]
        self._has_own_rows = any(p.splits_module for p in parameters)
        """Whether modules compute with slices along other axes than those of the data; inputs are then each rank's."""
        self._has_global_parameters = any(any(p.gathered_layout.dims) and not p.splits_module for p in parameters)
        if self._has_own_rows and self._has_global_parameters:
            raise FSDPError(
                "some parameters are annotated with mark_sharding, for a global program, and others are split for "
                "their modules (a tensor-parallel plan, or parallelize_module), where each rank has its own rows; use "
                "one of the two for all"
            )
        self._reads_host = any(p.plan.on_host for unit in units for p in unit.parameters)
        """Whether compute reads values in host memory, so that the host must wait for it before it writes them."""
        self._as_global = False
        """Whether the current pass computes with global tensors."""
        self._grad_pass = False
        self._stack: list[Unit] = []
        """The units whose forward is running, outermost first."""
        self._prefetcher = Prefetcher(units, settings, self._start_gather)
        self._order = itertools.count()
        """Numbers the calls of units in their order."""
        self._graphs: dict[Unit, list[weakref.ref[CallGraph]]] = {}
        self._backwards: dict[int, _Backward] = {}
        self._reduction: Reduction | None = None
        """The reduction in progress, if any."""
        self._unreduced: set[Unit] = set()
        """Units whose gradients `no_sync` holds back."""
        self._inner_grad_hook: weakref.WeakMethod[Callable[[UnitCall], None]] = weakref.WeakMethod(self._on_inner_grad)
        backward_entry.engines.add(self)
        for unit in units:
            for p in unit.parameters:
                p.on_gradient = partial(self.compiler.uncompiled, self._on_parameter_grad, unit)

    # --- forward ------------------------------------------------------------------------------------------------------

    def run(
        self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any, output_rule: Callable[..., Any]
    ) -> Any:
        """Call a unit's module."""
        recompute = in_backward()  # activation checkpointing runs forward again inside backward
        outermost = not self._stack and not recompute
        if outermost:
            self._begin_pass(args, kwargs)
        self._stack.append(unit)
        call = UnitCall(unit, next(self._order), self._as_global, self._batch_weight(outermost))
        # A recomputation may run in another thread, which numbers operations separately. Backward enters it through
        # its outputs only.
        recorded = torch.is_grad_enabled() and not recompute
        if recorded:
            backward_entry.begin(call, self._inner_grad_hook)
        try:
            self._make_ready(unit, "forward", None if recompute else self._prefetcher.forward_begins)
            args, kwargs, inputs = _prepare_inputs(call, args, kwargs, recorded)
            # Recorded before the call, which may put tensors of its own into its inputs, such as a cache.
            inputs_before = [(t, t.grad_fn) for t in inputs]
            output = without_gathered_memory(unit, output_rule(forward(*args, **kwargs), self._as_global))
            output = cast_tensors(output, unit.output_dtype)
            if outermost:
                output = uneven_batches.multiply_output_grads(output, call.weight)
        except BaseException:
            self._stack.pop()
            if recorded:
                backward_entry.end(call)  # a tensor from inside may still be used
            if outermost:
                self.reset()
            elif not recompute:
                unit.free()
            raise
        self._stack.pop()
        tracked = torch.is_grad_enabled() and self._hook(call, inputs_before, output)
        if recorded:
            backward_entry.end(call)
        if not recompute:
            # Re-entrant checkpointing first runs a unit without gradients, and recomputes it in backward.
            self._prefetcher.forward_ends(unit, has_backward=tracked or not torch.is_grad_enabled())
            self._end_forward(unit, outermost, tracked)
        return output

    def _batch_weight(self, outermost: bool) -> float:
        """The weight of this rank's rows; 1 for all but the outermost call of the outermost model."""
        weighted = outermost and not self._as_global and not backward_entry.inside_a_call()
        return uneven_batches.active_share().weight if weighted else 1.0

    def _begin_pass(self, args: Any, kwargs: Any) -> None:
        watch.raise_failure()
        if self._backwards or self._reduction is not None:
            self.reset()  # the last backward did not finish
        for unit in self.unsharded:
            unit.show_shards()
        self._before_pass()
        self._as_global = self._has_global_parameters or (
            not self._has_own_rows and any(is_sharded(t) for t in tensors_in((args, kwargs)))
        )
        self._grad_pass = torch.is_grad_enabled()
        self._prefetcher.begin_pass()
        if self._grad_pass:
            self.step = watch.begin_pass()
            self._first_step = min(self._first_step, self.step)
            if self.decides_copies and self.step == self._first_step + KEEP_AFTER:
                self.keep_copies(_unused_memory(self.context.gather_link.device))
        for unit in self.units:
            # Gathered values of an earlier pass whose graph was dropped, or whose shards have changed since.
            needed = unit in self.unsharded or self._live_calls(unit)
            if unit.state is not UnitState.SHARDED and not (needed and unit.is_fresh()):
                unit.free()
        self.unsharded.clear()

    def _make_ready(self, unit: Unit, operation: str, prefetch: Callable[[Unit], None] | None = None) -> None:
        """Gather a unit and let its modules hold the gathered values; `operation` comes next.

        `prefetch` starts the gathers of the units that follow. It is called before this unit is waited for: otherwise
        what it queues, such as copies from the host, would wait for this unit's communication.
        """
        if unit.state is not UnitState.SHARDED and not unit.shown and not unit.is_fresh():
            unit.free()  # gathered before a write to its shards
        if unit.state is UnitState.SHARDED:
            self._start_gather(unit)
        if prefetch is not None:
            prefetch(unit)
        if unit.state is UnitState.GATHERING:
            self.context.meter.at(self.step, unit.name, "gather")
            unit.finish_gather()
        self.context.meter.at(self.step, unit.name, operation)
        unit.show_gathered(self._as_global)

    def _start_gather(self, unit: Unit) -> None:
        self.context.meter.at(self.step, unit.name, "gather")
        unit.start_gather()

    def _end_forward(self, unit: Unit, outermost: bool, tracked: bool) -> None:
        if unit in self._stack:
            return  # called from inside its own forward, which is still running
        # The last unit is freed too, although its backward comes first: memory peaks while the loss is computed.
        keep = self._grad_pass and (outermost or unit.keeps_after_forward or unit.keeps_memory)
        if keep and not (outermost and not tracked):
            unit.show_shards()
        else:
            unit.free()
        if not outermost:
            return
        self._prefetcher.end_pass()
        for other in self.units:
            if other.state is UnitState.GATHERING or not tracked:
                other.free()  # prefetched but not used, or without a backward
        self.context.host.settle()  # from here on the host may write to its shards
        self.context.meter.at(self.step, unit.name, "after forward")

    # --- backward -----------------------------------------------------------------------------------------------------

    def _hook(self, call: UnitCall, inputs: list[tuple[torch.Tensor, Any]], output: Any) -> bool:
        """Put hooks on a call's tensors; returns whether a backward can reach it.

        `inputs` come with the operations that made them before the call. Only tensors that this call made get output
        hooks: a leaf belongs to others and outlives the call, and the gradient of an input that is returned unchanged
        is complete only when the call's backward is over.
        """
        call.end = next(self._order)
        unchanged = {id(t) for t, producer in inputs if t.grad_fn is producer}
        outputs = {id(t): t for t in tensors_in(output) if t.grad_fn is not None and id(t) not in unchanged}
        call.outputs = frozenset(sequence_nr(t.grad_fn) for t in outputs.values() if t.grad_fn is not None)
        graph = CallGraph(call)
        for t in outputs.values():
            t.register_hook(partial(self.compiler.uncompiled, self._on_output_grad, graph))
        if not outputs:
            return False
        for t in {id(t): t for t, _ in inputs}.values():
            if t.grad_fn is not None and id(t) not in outputs:
                t.register_hook(partial(self.compiler.uncompiled, self._on_input_grad, graph))
        live = [ref for ref in self._graphs.get(call.unit, []) if ref() is not None]
        self._graphs[call.unit] = [*live, weakref.ref(graph)]
        return True

    def _live_calls(self, unit: Unit) -> list[int]:
        """The `order` of each of the unit's calls whose graph still exists."""
        return [graph.call.order for ref in self._graphs.get(unit, []) if (graph := ref()) is not None]

    def _on_output_grad(self, graph: CallGraph, grad: torch.Tensor) -> None:
        self._begin_backward(graph.call)

    def _on_inner_grad(self, call: UnitCall) -> None:
        """Backward enters a call at a tensor that is not one of its outputs."""
        self.compiler.uncompiled(self._begin_backward, call)

    def _on_input_grad(self, graph: CallGraph, grad: torch.Tensor) -> None:
        call, backward = graph.call, self._backwards.get(current_graph_task_id())
        if backward is not None and call.unit in backward.reached:
            self._end_backward_above(backward, call.order - 1)

    def _on_parameter_grad(self, unit: Unit) -> None:
        """A parameter has got a gradient. If none has arrived at the unit's outputs, the loss was computed from a
        tensor that left the unit in another way: an attribute, a list, a hook."""
        for backward in self._backwards.values():
            if unit in backward.reached:
                return
        gathered = unit.state is UnitState.GATHERED or all(p.shares for p in unit.parameters)
        if not (gathered and unit.is_fresh()):
            raise FSDPError(
                f"backward entered unit {unit.name or '(root)'} through a tensor that its forward did not return "
                f"(taken by a hook, for example), while its parameters were not gathered. Return that tensor from the "
                f"unit's forward, or use strategy='SHARD_GRAD_OP', which keeps the parameters gathered until backward"
            )
        self._current_backward().reached[unit] = min(self._live_calls(unit), default=0)

    def _begin_backward(self, call: UnitCall) -> None:
        if torch.is_grad_enabled():
            self._refuse_create_graph(call.unit)
        backward = self._current_backward()
        if backward.reached.get(call.unit, call.order + 1) <= call.order and call.unit.shown:
            return  # another output of the same call
        backward.reached[call.unit] = min(call.order, backward.reached.get(call.unit, call.order))
        self._as_global = call.as_global
        self._end_backward_above(backward, call.end)  # the backward of calls inside this one is still to come
        if call.casts != call.unit.casts:
            raise FSDPError(
                f"the dtype of unit {call.unit.name or '(root)'} was changed between this forward and its backward, "
                f"and the model has run in the new dtype since; finish the backward before casting the model"
            )
        self._make_ready(call.unit, "backward", self._prefetcher.backward_begins)

    def _current_backward(self) -> _Backward:
        run = current_graph_task_id()
        if run not in self._backwards:
            self._backwards[run] = _Backward()
            at_end_of_backward(partial(self.compiler.uncompiled, self._end_backward, run))
        return self._backwards[run]

    def _refuse_create_graph(self, unit: Unit) -> None:
        raise FSDPError(
            f"backward with create_graph=True (a gradient penalty, a Hessian) through unit {unit.name or '(root)'}: "
            f"the second backward would need gathered values that are freed by then. Compute the inner gradient "
            f"inside the forward of one unit: a module whose forward calls torch.autograd.grad(…, create_graph=True) "
            f"and returns the penalty, wrapped without units inside it"
        )

    def _end_backward_above(self, backward: _Backward, order: int) -> None:
        """Reduce and free the units whose backward is over: those that no call up to `order` needs."""
        for unit, reached in sorted(backward.reached.items(), key=lambda item: -item[1]):
            if reached > order and all(live >= reached for live in self._live_calls(unit)):
                del backward.reached[unit]
                self._end_unit_backward(unit)

    def _end_unit_backward(self, unit: Unit) -> None:
        unit.free()
        self._prefetcher.backward_ends(unit)
        if not self.sync:
            gradients.hold_back(unit.parameters)
            self._unreduced.add(unit)
            return
        self._unreduced.discard(unit)
        # At most one unit's gradients are reduced while the next unit's are computed.
        self._finish_reduction()
        self.context.meter.at(self.step, unit.name, "reduce")
        self._reduction = Reduction(unit, average=not self._as_global)
        self.context.meter.at(self.step, unit.name, "backward")

    def _finish_reduction(self) -> None:
        pending, self._reduction = self._reduction, None
        if pending is not None:
            pending.finish()

    def _end_backward(self, run: int) -> None:
        backward = self._backwards.pop(run)
        for unit, _ in sorted(backward.reached.items(), key=lambda item: -item[1]):
            self._end_unit_backward(unit)
        if self._backwards:
            return  # a backward inside another one, which is still running
        if self.sync:
            for unit in [u for u in self.units if u in self._unreduced]:
                self._end_unit_backward(unit)  # held back earlier, and not part of this backward
        self._finish_reduction()
        self._prefetcher.end_backward()
        self.context.host.settle()
        for unit in self.units:
            unit.free()
        watch.raise_failure()
        self.context.meter.at(self.step, "", "after backward")

    # --- between passes -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Recover from an exception: nothing gathered, no communication in progress, no partial gradients."""
        pending, self._reduction = self._reduction, None
        self._backwards.clear()
        self._stack.clear()
        self._prefetcher.reset()
        if pending is not None:
            pending.wait()
        for unit in self.units:
            unit.free()
        self.context.host.abandon()
        for unit in self.units:
            for p in unit.parameters:
                gradients.drop(p)

    def keep_copies(self, spare: int) -> int:
        """Keep the copies that forward casts until backward, as autocast does, if they fit into `spare` bytes; returns
        their size. Only of units that this rank holds whole; others are gathered again."""
        chosen = [unit for unit in self.units if unit.only_casts]
        size = sum(p.nbytes for unit in chosen for p in unit.parameters if not p.shares)
        for unit in chosen:
            unit.keep_memory(0 < size <= spare)
        return size if size <= spare else 0

    def start_unshard(self, unit: Unit) -> None:
        """Start to gather a unit before its forward."""
        watch.raise_failure()
        if unit.state is not UnitState.SHARDED and not unit.is_fresh():
            unit.free()
        if unit.state is UnitState.SHARDED:
            self._start_gather(unit)
            self.unsharded.add(unit)

    def unshard(self, unit: Unit) -> None:
        """Finish to gather it, and let its modules hold whole parameters."""
        self.start_unshard(unit)
        unit.finish_gather()
        unit.show_gathered(self._has_global_parameters)
        self.context.host.settle()

    def reshard(self, units: Iterable[Unit]) -> None:
        """Free units that `unshard` has gathered, or that are kept after forward."""
        for unit in list(units):
            if unit in self._stack:
                raise FSDPError(f"reshard() of unit {unit.name or '(root)'} inside its own forward, which needs it")
            self.unsharded.discard(unit)
            unit.free()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are accumulated without reduction."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def showing_shards(self) -> Iterator[None]:
        """Let modules hold their shards inside, even if they are gathered: for reading and writing parameters."""
        self.context.host.settle()
        if self._reads_host:
            accelerator.synchronize(self.context.gather_link.device)
        shown = [unit for unit in self.units if unit.shown]
        for unit in shown:
            unit.show_shards()
        try:
            yield
        finally:
            for unit in shown:
                unit.show_gathered(self._as_global)


def _unused_memory(device: torch.device) -> int:
    """Half of the memory that steps have not used, if that is most of the device's: later batches may be longer."""
    spare = accelerator.spare_memory(device)
    return spare // 2 if spare and 2 * spare >= accelerator.total_memory(device) else 0


def _prepare_inputs(call: UnitCall, args: Any, kwargs: Any, recorded: bool) -> tuple[Any, Any, list[torch.Tensor]]:
    """Cast the inputs of a call, and scale the gradients that flow back through them. Lists them if a backward may
    follow."""
    precision = call.unit.precision
    args, kwargs = cast_tensors((args, kwargs), precision.param_dtype if precision.cast_forward_inputs else None)
    args, kwargs = uneven_batches.divide_input_grads((args, kwargs), call.weight)
    inputs = tensors_in((args, kwargs), objects=False) if torch.is_grad_enabled() else []
    if recorded and (factors := backward_entry.hook_inputs(inputs)):
        args, kwargs = map_tensors(lambda t: uneven_batches.scale_grad(t, factors.get(id(t), 1.0)), (args, kwargs))
        inputs = tensors_in((args, kwargs), objects=False)
    return args, kwargs, inputs
