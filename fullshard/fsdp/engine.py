"""When units are gathered, freed and reduced.

The engine stands around every call of a unit's module. Forward: gather, run, free. Backward is followed through hooks
on the tensors that units return and take: a gradient that arrives at an output means the unit's backward begins; one
that arrives at an input means it is over. Autograd runs a pass's operations in the reverse of their order, so when
the backward of one call begins, that of every later call is over; reductions are issued in that order on every rank,
whatever branches its data took.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fullshard.errors import FSDPError
from fullshard.fsdp import backward_entry, uneven_batches
from fullshard.fsdp.backward_entry import Call, Graph, in_backward
from fullshard.fsdp.compile import Compiler
from fullshard.fsdp.output import outliving
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.fsdp.tensor_tree import map_tensors, tensors_in
from fullshard.fsdp.unit import Means, Reduction, State, Unit
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import at_end_of_backward, current_graph_task_id, sequence_nr
from fullshard.watchdog import watch


@dataclass
class Settings:
    """How an engine runs its units."""

    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    in_flight: int = 1
    """How many units may be gathered ahead of the one that runs."""


@dataclass
class _Backward:
    """One run of autograd's engine; re-entrant checkpointing nests them."""

    reached: dict[Unit, int] = field(default_factory=dict)
    """Units whose backward has begun and is not over, with the lowest ticket reached."""


class Engine:
    """Runs the units of one model."""

    def __init__(self, units: list[Unit], means: Means, settings: Settings):
        self.units, self.means, self.settings = units, means, settings
        self.sync = True
        """Whether gradients are reduced at the end of a backward pass."""
        self.step = 0
        self.summoned = False
        """Whether modules hold whole parameters at the user's wish."""
        self.has_global_parameters = False
        self.compiler = Compiler()
        self.before_pass: Callable[[], None] = lambda: None
        """Called before each pass; the wrapper looks there for what was done to the module in the meantime."""
        self._as_global = False
        self._grad_pass = False
        self._stack: list[Unit] = []
        self._order: list[Unit] = []
        self._recorded: list[Unit] = []
        self._left: list[Unit] = []
        """The last pass's units in the order in which their calls ended."""
        self._returning: dict[Unit, bool] = {}
        """Whether a backward may reach the unit, by its last call."""
        self._tickets = itertools.count()
        self._calls: dict[Unit, list[weakref.ref[Graph]]] = {}
        self._backwards: dict[int, _Backward] = {}
        self._in_flight: deque[Reduction] = deque()
        self._held: set[Unit] = set()
        self._entered: weakref.WeakMethod[Callable[[Call], None]] = weakref.WeakMethod(self._at_another_way)
        backward_entry.engines.add(self)
        for unit in units:
            for p in unit.parameters:
                p.on_gradient = partial(self.compiler.aside, self._gradient_arrives, unit)

    # --- forward ------------------------------------------------------------------------------------------------------

    def run(
        self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any, output_of: Callable[..., Any]
    ) -> Any:
        """Call a unit's module."""
        recompute = in_backward()  # activation checkpointing runs forward again inside backward
        outermost = not self._stack and not recompute
        if outermost:
            self._begin_pass(args, kwargs)
        self._stack.append(unit)
        weighs = outermost and not self._as_global and not backward_entry.inside_a_call()  # of another model
        weight = uneven_batches.current().weight if weighs else 1.0
        call = Call(unit, next(self._tickets), self._as_global, weight)
        # What is computed again may run in another thread, with numbers of its own; it is entered by its outputs.
        noted = torch.is_grad_enabled() and not recompute
        if noted:
            backward_entry.begin(call, self._entered)
        try:
            self._make_ready(unit, "forward")
            if not recompute:
                self._record_and_prefetch(unit)
            args, kwargs = _cast_inputs(unit, (args, kwargs))
            args, kwargs = uneven_batches.entering((args, kwargs), weight)
            if noted and (factors := backward_entry.look_at_inputs(list(tensors_in((args, kwargs), objects=False)))):
                args, kwargs = map_tensors(lambda t: uneven_batches.scaled(t, factors.get(id(t), 1.0)), (args, kwargs))
            # Taken down before the call: it may put tensors of its own into what it was given, such as a cache.
            inputs = list(tensors_in((args, kwargs), objects=False)) if torch.is_grad_enabled() else []
            before = [(t, t.grad_fn) for t in inputs]
            output = outliving(unit, output_of(forward(*args, **kwargs), self._as_global))
            output = _cast(output, unit.output_dtype)
            if outermost:
                output = uneven_batches.leaving(output, weight)
        except BaseException:
            self._stack.pop()
            if noted:
                backward_entry.end(call)  # a tensor taken from inside may be used all the same
            if outermost:
                self.reset()
            elif not recompute:
                unit.free()
            raise
        self._stack.pop()
        tracked = torch.is_grad_enabled() and self._follow(call, before, output)
        if noted:
            backward_entry.end(call)
        if not recompute:
            self._left.append(unit)
            # Re-entrant checkpointing runs a unit without gradients at first, and comes back for it.
            self._returning[unit] = tracked or not torch.is_grad_enabled()
            self._leave(unit, outermost, tracked)
        return output

    def _begin_pass(self, args: Any, kwargs: Any) -> None:
        watch.check()
        if self._backwards or self._in_flight:
            self.reset()  # the last backward did not come to its end
        self.before_pass()
        self._as_global = self.has_global_parameters or any(is_sharded(t) for t in tensors_in((args, kwargs)))
        self._grad_pass = torch.is_grad_enabled()
        self._recorded, self._left = [], []
        if self._grad_pass:
            self.step = watch.begin_pass()
        for unit in self.units:
            # Gathered values that outlived their pass: their graph was dropped, or the shards have changed since.
            if unit.state is not State.SHARDED and not (self._live(unit) and unit.is_fresh()):
                unit.free()

    def _make_ready(self, unit: Unit, doing: str) -> None:
        if unit.state is not State.SHARDED and not unit.shown and not unit.is_fresh():
            unit.free()  # gathered before a write to its shards
        if unit.state is State.SHARDED:
            watch.at(self.step, unit.name, "gather")
            unit.start_gather()
        if unit.state is State.GATHERING:
            watch.at(self.step, unit.name, "gather")
            unit.finish_gather()
        watch.at(self.step, unit.name, doing)
        unit.show_gathered(self._as_global)

    def _record_and_prefetch(self, unit: Unit) -> None:
        place = len(self._recorded)
        self._recorded.append(unit)
        if self.settings.forward_prefetch and self._order[place : place + 1] == [unit]:
            self._prefetch(self._order[place + 1 :])

    def _prefetch(self, coming: list[Unit]) -> None:
        """Begin to gather the next units that will be needed, as many as may be in flight."""
        ahead = sum(u.state is State.GATHERING for u in self.units)
        for unit in coming[: self.settings.in_flight]:
            if unit.state is State.SHARDED and ahead < self.settings.in_flight:
                watch.at(self.step, unit.name, "gather")
                unit.start_gather()
                ahead += 1

    def _leave(self, unit: Unit, outermost: bool, tracked: bool) -> None:
        if unit in self._stack:
            return  # called from inside its own forward, which goes on
        # The last unit goes too, though its backward comes first: while the loss is computed memory is at its fullest.
        keep = self._grad_pass and (outermost or unit.keeps_after_forward)
        if keep and not (outermost and not tracked):
            unit.show_shards()
        else:
            unit.free()
        if not outermost:
            return
        self._order = self._recorded
        for other in self.units:
            if other.state is State.GATHERING or not tracked:
                other.free()  # prefetched in vain, or nothing will come back for it
        self.means.host.settle()  # from here on the host may write to its shards
        watch.at(self.step, unit.name, "after forward")

    # --- following autograd -----------------------------------------------------------------------------------------

    def _follow(self, call: Call, inputs: list[tuple[torch.Tensor, Any]], output: Any) -> bool:
        """Hook a call's tensors; whether a backward can come.

        Inputs come with the operation that made them. Hooks are put on what this call has made: a leaf belongs to
        others and lives on, and an input that is returned as it came has its gradient when the call's backward is over.
        """
        call.end = next(self._tickets)
        passed = {id(t) for t, made_by in inputs if t.grad_fn is made_by}
        outputs = {id(t): t for t in tensors_in(output) if t.grad_fn is not None and id(t) not in passed}
        call.outputs = frozenset(sequence_nr(t.grad_fn) for t in outputs.values() if t.grad_fn is not None)
        graph = Graph(call)
        for t in outputs.values():
            t.register_hook(partial(self.compiler.aside, self._at_output, graph))
        if not outputs:
            return False
        for t in {id(t): t for t, _ in inputs}.values():
            if t.grad_fn is not None and id(t) not in outputs:
                t.register_hook(partial(self.compiler.aside, self._at_input, graph))
        live = [ref for ref in self._calls.get(call.unit, []) if ref() is not None]
        self._calls[call.unit] = [*live, weakref.ref(graph)]
        return True

    def _live(self, unit: Unit) -> list[int]:
        """Tickets of the unit's calls whose graph still exists."""
        return [graph.call.ticket for ref in self._calls.get(unit, []) if (graph := ref()) is not None]

    def _at_output(self, graph: Graph, grad: torch.Tensor) -> None:
        self._backward_begins(graph.call)

    def _at_another_way(self, call: Call) -> None:
        self.compiler.aside(self._backward_begins, call)

    def _backward_begins(self, call: Call) -> None:
        if torch.is_grad_enabled():
            self._refuse_create_graph(call.unit)
        backward = self._this_backward()
        if backward.reached.get(call.unit, call.ticket + 1) <= call.ticket and call.unit.shown:
            return  # another output of the same call
        backward.reached[call.unit] = min(call.ticket, backward.reached.get(call.unit, call.ticket))
        self._as_global = call.as_global
        self._flush(backward, above=call.end)  # calls inside this one are still to come
        if call.casts != call.unit.casts:
            raise FSDPError(
                f"the dtype of unit {call.unit.name or '(root)'} was changed between this forward and its backward, "
                f"and the model has run in the new dtype since; finish the backward before casting the model"
            )
        self._make_ready(call.unit, "backward")
        if self.settings.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch(self._before(call.unit))

    def _this_backward(self) -> _Backward:
        run = current_graph_task_id()
        if run not in self._backwards:
            self._backwards[run] = _Backward()
            ends = partial(self.compiler.aside, self._end_backward, run)
            at_end_of_backward(ends)
        return self._backwards[run]

    def _gradient_arrives(self, unit: Unit) -> None:
        """A gradient at a parameter. Where none has arrived at the unit's outputs, the loss was computed from a tensor
        that left the unit by another way: an attribute, a list, a hook."""
        if any(unit in backward.reached for backward in self._backwards.values()):
            return
        there = unit.state is State.GATHERED or all(p.shares for p in unit.parameters)
        if not (there and unit.is_fresh()):
            raise FSDPError(
                f"backward came into unit {unit.name or '(root)'} by a tensor that its forward did not return (taken "
                f"by a hook, for example), while its parameters were not gathered. Return that tensor from the unit's "
                f"forward, or use strategy='SHARD_GRAD_OP', which keeps the parameters until backward"
            )
        self._this_backward().reached[unit] = min(self._live(unit), default=0)

    def _at_input(self, graph: Graph, grad: torch.Tensor) -> None:
        call, backward = graph.call, self._backwards.get(current_graph_task_id())
        if backward is not None and call.unit in backward.reached:
            self._flush(backward, above=call.ticket - 1)

    def _before(self, unit: Unit) -> list[Unit]:
        """The units whose backward follows, nearest first."""
        if unit not in self._left:
            return []
        # Backward of a call begins at its output, so it runs through the calls in the reverse of the order in which
        # they ended: a unit's own, then those of the units inside it.
        place = len(self._left) - 1 - self._left[::-1].index(unit)
        return [u for u in reversed(self._left[:place]) if u is not unit and self._returning.get(u)]

    def _refuse_create_graph(self, unit: Unit) -> None:
        raise FSDPError(
            f"backward with create_graph=True (a gradient penalty, a Hessian) through unit {unit.name or '(root)'}: "
            f"the second backward would run through gathered values that are gone by then. Compute the inner gradient "
            f"inside the forward of one unit: a module whose forward calls torch.autograd.grad(…, create_graph=True) "
            f"and returns the penalty, wrapped without units below it"
        )

    def _flush(self, backward: _Backward, above: int) -> None:
        """Reduce and free the units whose backward is over: those that no call up to ticket `above` needs."""
        for unit, ticket in sorted(backward.reached.items(), key=lambda item: -item[1]):
            if ticket > above and all(live >= ticket for live in self._live(unit)):
                del backward.reached[unit]
                self._over(unit)

    def _over(self, unit: Unit) -> None:
        unit.free()
        if self.settings.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch(self._before(unit))
        if not self.sync:
            unit.hold_gradients()
            self._held.add(unit)
            return
        self._held.discard(unit)
        # At most one unit's gradients are on their way while the next unit's are computed.
        while self._in_flight:
            self._in_flight.popleft().finish()
        watch.at(self.step, unit.name, "reduce")
        self._in_flight.append(Reduction(unit, average=not self._as_global))
        watch.at(self.step, unit.name, "backward")

    def _end_backward(self, run: int) -> None:
        backward = self._backwards.pop(run)
        for unit, _ in sorted(backward.reached.items(), key=lambda item: -item[1]):
            self._over(unit)
        if self._backwards:
            return  # a backward inside another one; the outer goes on
        if self.sync:
            for unit in [u for u in self.units if u in self._held]:
                self._over(unit)  # kept back earlier, and not part of this backward
        while self._in_flight:
            self._in_flight.popleft().finish()
        self.means.host.settle()
        for unit in self.units:
            unit.free()
        watch.check()
        watch.at(self.step, "", "after backward")

    # --- everything else --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Return to rest after an exception: nothing gathered, nothing on its way, no half-finished gradients."""
        reductions, self._in_flight = self._in_flight, deque()
        self._backwards.clear()
        self._stack.clear()
        self._order, self._left = [], []
        for reduction in reductions:
            reduction.wait()
        for unit in self.units:
            unit.free()
        self.means.host.abandon()
        for unit in self.units:
            for p in unit.parameters:
                p.drop_gradient()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Modules show their shards, whatever is gathered; for reading and writing parameters from outside."""
        self.means.host.settle()
        shown = [unit for unit in self.units if unit.shown]
        for unit in shown:
            unit.show_shards()
        try:
            yield
        finally:
            for unit in shown:
                unit.show_gathered(self._as_global)


def _cast_inputs(unit: Unit, inputs: Any) -> Any:
    return _cast(inputs, unit.precision.param_dtype) if unit.precision.cast_forward_inputs else inputs


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    return values if dtype is None else map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)
