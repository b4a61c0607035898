"""Through which tensors a backward pass enters the calls of units.

Most gradients enter a call through what its unit returned, where the engine has its hooks. A loss may also be computed
from tensors that left by another way: an attribute (`self.aux_loss`), a list, a forward hook. autograd numbers
operations in the order in which they ran, so an operation belongs to the call during which it got its number. What lies
between a loss and the calls is followed, up to the first operation of a call: if that is none of the call's outputs it
gets a hook too. torch offers no hook where a backward pass begins, so its one way from Python into autograd's engine
leads through here.
"""

from __future__ import annotations

import bisect
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fullshard.errors import FSDPError
from fullshard.fsdp import shard, uneven_batches
from fullshard.fsdp.compile import keep_out
from fullshard.fsdp.unit import Unit
from fullshard.torch_private import (
    current_graph_task_id,
    engine_run_backward,
    next_sequence_nr,
    replace_engine_run_backward,
    sequence_nr,
)

KEPT = 16
"""Outermost calls that are remembered after their outputs are gone; a tensor taken from inside may live on."""


class Call:
    """One call of a unit whose backward may come. It keeps neither autograd's graph alive nor the model."""

    def __init__(self, unit: Unit, ticket: int, as_global: bool, weight: float):
        self._unit = weakref.ref(unit)
        self.ticket, self.as_global, self.weight = ticket, as_global, weight
        self.end = ticket
        """A number above those of all calls made inside this one."""
        self.casts = unit.casts
        self.first = next_sequence_nr()
        """The number of the first operation that autograd recorded during the call."""
        self.last = sys.maxsize
        """A number above that of the last one."""
        self.outputs: frozenset[int] = frozenset()
        """The numbers of the operations that made its outputs."""
        self.inner: list[Call] = []
        """The calls made inside it, in order."""
        self.graph: weakref.ref[Graph] | None = None
        self.passed_on: set[int] = set()
        """The outputs of those."""
        self.begins: weakref.WeakMethod[Callable[[Call], None]] | None = None
        """Called when backward enters it by another way than its outputs."""

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None
        return unit

    def lives(self) -> bool:
        """Whether backward may still come to one of its outputs, or of the calls inside it."""
        return (self.graph is not None and self.graph() is not None) or any(call.lives() for call in self.inner)


class Graph:
    """Lives as long as autograd's graph of a call: hooks on its tensors hold it, and nothing else does."""

    def __init__(self, call: Call):
        self.call = call
        call.graph = weakref.ref(self)


class _Calls(threading.local):
    """The calls of one thread: autograd numbers operations by thread."""

    def __init__(self) -> None:
        self.outermost: list[Call] = []
        self.open: list[Call] = []
        self.followed: set[int] = set()
        """Operations outside of calls, and of calls with others inside, whose inputs have been looked at."""
        self.enough = 2 * KEPT
        """How many outermost calls are kept until it is looked which ones still matter."""


_calls = _Calls()


def inside_a_call() -> bool:
    return bool(_calls.open)


def begin(call: Call, begins: weakref.WeakMethod[Callable[[Call], None]]) -> None:
    """A call begins; `end` follows, also if it raises."""
    call.begins = begins
    if not _calls.open:
        _forget()
    _siblings().append(call)
    _calls.open.append(call)


def end(call: Call) -> None:
    """A call is over."""
    call.last = next_sequence_nr()
    _calls.open.remove(call)
    if _calls.open:
        _calls.open[-1].passed_on |= call.outputs


def _siblings() -> list[Call]:
    return _calls.open[-1].inner if _calls.open else _calls.outermost


def _forget() -> None:
    """Drop calls whose graph is gone, but for the latest; now and then, as there may be many that live."""
    if len(_calls.outermost) < _calls.enough:
        return
    old, late = _calls.outermost[:-KEPT], _calls.outermost[-KEPT:]
    _calls.outermost = [call for call in old if call.lives()] + late
    _calls.followed = {number for number in _calls.followed if number >= _calls.outermost[0].first}
    _calls.enough = 2 * len(_calls.outermost)


# --- following the graph ----------------------------------------------------------------------------------------------


def _around(number: int) -> list[Call]:
    """The calls during which an operation ran, outermost first."""
    found: list[Call] = []
    calls = _calls.outermost
    while calls:
        place = bisect.bisect_right(calls, number, key=lambda call: call.first) - 1
        if place < 0 or number >= calls[place].last:
            break
        found.append(calls[place])
        calls = calls[place].inner
    return found


def look(tensors: Sequence[Any]) -> list[float]:
    """Find where gradients that come to these tensors enter calls by another way than outputs, and put hooks there.

    What they have to be multiplied with before (a tensor may be inside a weighted call itself).
    """
    if not _calls.outermost:
        return [1.0] * len(tensors)
    here = list(_calls.open)
    found = [t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in tensors]
    factors = [1.0 if node is None else _enter(node, here) for node in found]
    todo = [(node, sequence_nr(node)) for node in found if node is not None]
    while todo:
        node, number = todo.pop()
        if number < _calls.outermost[0].first or number in _calls.followed:
            continue
        around = _around(number)
        if around and not around[-1].inner and around[-1] not in here:
            continue  # nothing was called in there
        _calls.followed.add(number)
        for place, (into, _) in enumerate(node.next_functions):
            if into is not None:
                factor = _enter(into, around)
                if factor != 1.0:
                    node.register_hook(partial(_multiply, place, factor))
                todo.append((into, sequence_nr(into)))
    return factors


def look_at_inputs(inputs: Sequence[torch.Tensor]) -> dict[int, float]:
    """Look at the inputs of a call; by id, those that come from inside a weighted call, and that weight."""
    made = [t for t in inputs if t.grad_fn is not None]
    if len(_calls.open) > 1:  # most are what another unit returned
        passed_on = _calls.open[-2].passed_on
        made = [t for t in made if t.grad_fn is not None and sequence_nr(t.grad_fn) not in passed_on]
    return {id(t): factor for t, factor in zip(made, look(made), strict=True) if factor != 1.0} if made else {}


def _enter(node: Any, come_from: list[Call]) -> float:
    """Put a hook on an operation where backward enters calls; what gradients are multiplied with on the way there."""
    number = sequence_nr(node)
    around = _around(number)
    strange = [call for call in around if call not in come_from and number not in call.outputs]
    if strange:
        node.register_prehook(partial(_begin_all, strange))
    if not around or around[0] in come_from or uneven_batches.is_weighed(node, around[0].weight):
        return 1.0
    return around[0].weight


def _begin_all(calls: list[Call], grads: Any) -> None:
    for call in calls:
        if call.begins is not None and (begins := call.begins()) is not None:
            begins(call)


def _multiply(place: int, factor: float, grads: Sequence[Any], _: Any) -> tuple[Any, ...]:
    return tuple(g * factor if i == place and g is not None else g for i, g in enumerate(grads))


# --- where a backward pass begins -------------------------------------------------------------------------------------

engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines of all models."""


@functools.cache
def watch_backward() -> None:
    """From now on every backward pass begins here."""
    plain = engine_run_backward()

    @functools.wraps(plain)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward():  # of a part that checkpointing has computed again
            return plain(outputs, *args, **kwargs)
        grads, keep, create, inputs, *rest = args
        if inputs:
            inputs = _gathered(inputs, kwargs.get("accumulate_grad", False))
            if not inputs:
                return ()
        factors = look(outputs)
        grads = tuple(g if f == 1.0 or g is None else g * f for g, f in zip(grads, factors, strict=True))
        return plain(outputs, grads, keep, create, inputs, *rest, **kwargs)

    keep_out(run)
    replace_engine_run_backward(run)


def in_backward() -> bool:
    return current_graph_task_id() != -1


def _gathered(inputs: Sequence[Any], accumulate: bool) -> tuple[Any, ...]:
    """What `inputs=` names, with gathered values in the place of shards: the graph ends there."""
    by_shard = {id(p.shard): p for engine in engines for unit in engine.units for p in unit.parameters}
    found: list[Any] = []
    for given in inputs:
        t = given if isinstance(given, torch.Tensor) else getattr(given.node, "variable", None)
        if t is not None and t in shard.replaced:
            raise FSDPError(
                f"backward for {shard.replaced[t].plan.name} as it was before the module was wrapped, which the model "
                f"no longer uses; take it from model.parameters() after FSDPv2(…)"
            )
        p = by_shard.get(id(t))
        if p is None:
            found.append(given)
            continue
        if not accumulate:
            raise FSDPError(
                f"torch.autograd.grad(…) for the sharded parameter {p.plan.name}: its gradient is summed over the "
                f"ranks and lands in .grad. Call loss.backward(inputs=[…]), which leaves all other parameters alone, "
                f"and read .grad"
            )
        found += [leaf for leaf in (p.full, p.full_global) if leaf is not None]
    return tuple(found)
