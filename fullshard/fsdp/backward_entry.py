"""Where a backward pass enters the calls of units.

Most gradients enter a call through the unit's outputs, where the engine has its hooks. A loss may also be computed from
tensors that left the unit in another way: an attribute (`self.aux_loss`), a list, a forward hook. Autograd numbers
operations in the order in which they run, so an operation belongs to the call during which it got its number. The graph
between a loss and the calls is searched up to the first operation of a call; if that is not one of the call's outputs,
it gets a hook too. torch has no hook for the start of a backward pass, so the one function through which Python enters
autograd's engine is replaced here.
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

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import (
    current_graph_task_id,
    engine_run_backward,
    next_sequence_nr,
    replace_engine_run_backward,
    sequence_nr,
)
from fullshard.fsdp import shard, uneven_batches
from fullshard.fsdp.compile import never_compile
from fullshard.fsdp.unit import Unit

KEPT = 16
"""How many outermost calls are remembered after their outputs are gone: a tensor from inside may still be in use."""


class UnitCall:
    """One call of a unit that may have a backward. It keeps neither autograd's graph nor the model alive."""

    def __init__(self, unit: Unit, order: int, as_global: bool, weight: float):
        self._unit = weakref.ref(unit)
        self.as_global, self.weight = as_global, weight
        self.order = order
        """Its place among all calls of units."""
        self.end = order
        """A number above the `order` of all calls inside this one."""
        self.casts = unit.casts
        self.first = next_sequence_nr()
        """Autograd's number of the first operation during the call."""
        self.last = sys.maxsize
        """A number above that of the last operation."""
        self.outputs: frozenset[int] = frozenset()
        """The numbers of the operations that made its outputs."""
        self.inner: list[UnitCall] = []
        """The calls made inside it, in order."""
        self.inner_outputs: set[int] = set()
        """The outputs of those."""
        self.graph: weakref.ref[CallGraph] | None = None
        self.on_inner_grad: weakref.WeakMethod[Callable[[UnitCall], None]] | None = None
        """Called when backward enters it at a tensor that is not one of its outputs."""

    @property
    def unit(self) -> Unit:
        """The unit that was called."""
        unit = self._unit()
        assert unit is not None
        return unit

    def lives(self) -> bool:
        """Whether backward may still reach one of its outputs, or of the calls inside it."""
        return (self.graph is not None and self.graph() is not None) or any(call.lives() for call in self.inner)


class CallGraph:
    """An object that lives as long as autograd's graph of a call: only the hooks on the call's tensors refer to it."""

    def __init__(self, call: UnitCall):
        self.call = call
        call.graph = weakref.ref(self)


class _Calls(threading.local):
    """The calls of one thread: autograd numbers operations by thread."""

    def __init__(self) -> None:
        self.outermost: list[UnitCall] = []
        self.open: list[UnitCall] = []
        self.searched: set[int] = set()
        """Operations outside of calls, or in calls with others inside, whose inputs have been searched."""
        self.limit = 2 * KEPT
        """How many outermost calls are kept before the ones no longer needed are dropped."""


_calls = _Calls()


def inside_a_call() -> bool:
    """Whether this thread is inside the forward of a unit."""
    return bool(_calls.open)


def begin(call: UnitCall, on_inner_grad: weakref.WeakMethod[Callable[[UnitCall], None]]) -> None:
    """Record the start of a call; `end` must follow, also if the call raises."""
    call.on_inner_grad = on_inner_grad
    if not _calls.open:
        _drop_old_calls()
    _siblings().append(call)
    _calls.open.append(call)


def end(call: UnitCall) -> None:
    """Record the end of a call."""
    call.last = next_sequence_nr()
    _calls.open.remove(call)
    if _calls.open:
        _calls.open[-1].inner_outputs |= call.outputs


def _siblings() -> list[UnitCall]:
    return _calls.open[-1].inner if _calls.open else _calls.outermost


def _drop_old_calls() -> None:
    """Drop calls whose graph is gone, except the latest. Done rarely, as there may be many live ones."""
    if len(_calls.outermost) < _calls.limit:
        return
    old, latest = _calls.outermost[:-KEPT], _calls.outermost[-KEPT:]
    _calls.outermost = [call for call in old if call.lives()] + latest
    _calls.searched = {number for number in _calls.searched if number >= _calls.outermost[0].first}
    _calls.limit = 2 * len(_calls.outermost)


# --- searching the graph ----------------------------------------------------------------------------------------------


def _calls_around(number: int) -> list[UnitCall]:
    """The calls during which an operation ran, outermost first."""
    around: list[UnitCall] = []
    calls = _calls.outermost
    while calls:
        index = bisect.bisect_right(calls, number, key=lambda call: call.first) - 1
        if index < 0 or number >= calls[index].last:
            break
        around.append(calls[index])
        calls = calls[index].inner
    return around


def hook_entries(tensors: Sequence[Any]) -> list[float]:
    """Put hooks where gradients of these tensors would enter calls at other tensors than outputs.

    Returns the factor for the gradient of each tensor: a tensor may itself come from inside a weighted call.
    """
    if not _calls.outermost:
        return [1.0] * len(tensors)
    open_calls = list(_calls.open)
    nodes = [t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in tensors]
    factors = [1.0 if node is None else _hook_entry(node, open_calls) for node in nodes]
    todo = [(node, sequence_nr(node)) for node in nodes if node is not None]
    while todo:
        node, number = todo.pop()
        if number < _calls.outermost[0].first or number in _calls.searched:
            continue
        around = _calls_around(number)
        if around and not around[-1].inner and around[-1] not in open_calls:
            continue  # no unit was called inside
        _calls.searched.add(number)
        for index, (source, _) in enumerate(node.next_functions):
            if source is not None:
                factor = _hook_entry(source, around)
                if factor != 1.0:
                    node.register_hook(partial(_multiply, index, factor))
                todo.append((source, sequence_nr(source)))
    return factors


def hook_inputs(inputs: Sequence[torch.Tensor]) -> dict[int, float]:
    """`hook_entries` for the inputs of a call; returns the factors other than 1, by the id of the input."""
    computed = [t for t in inputs if t.grad_fn is not None]
    if len(_calls.open) > 1:  # most inputs are the output of another unit
        known = _calls.open[-2].inner_outputs
        computed = [t for t in computed if t.grad_fn is not None and sequence_nr(t.grad_fn) not in known]
    if not computed:
        return {}
    return {id(t): factor for t, factor in zip(computed, hook_entries(computed), strict=True) if factor != 1.0}


def _hook_entry(node: Any, come_from: list[UnitCall]) -> float:
    """Hook an operation if backward enters calls there; returns the factor for gradients on the way to it."""
    number = sequence_nr(node)
    around = _calls_around(number)
    entered = [call for call in around if call not in come_from and number not in call.outputs]
    if entered:
        node.register_prehook(partial(_enter_all, entered))
    if not around or around[0] in come_from or uneven_batches.is_weighed(node, around[0].weight):
        return 1.0
    return around[0].weight


def _enter_all(calls: list[UnitCall], grads: Any) -> None:
    for call in calls:
        if call.on_inner_grad is not None and (on_inner_grad := call.on_inner_grad()) is not None:
            on_inner_grad(call)


def _multiply(index: int, factor: float, grads: Sequence[Any], _: Any) -> tuple[Any, ...]:
    return tuple(g * factor if i == index and g is not None else g for i, g in enumerate(grads))


# --- where a backward pass begins -------------------------------------------------------------------------------------

engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines of all models."""


@functools.cache
def intercept_backward() -> None:
    """From now on, look at the graph before each backward pass. Once per process."""
    plain = engine_run_backward()

    @functools.wraps(plain)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward():  # of a part that activation checkpointing has recomputed
            return plain(outputs, *args, **kwargs)
        grads, keep, create, inputs, *rest = args
        if inputs:
            inputs = _with_gathered_values(inputs, kwargs.get("accumulate_grad", False))
            if not inputs:
                return ()
        factors = hook_entries(outputs)
        grads = tuple(g if f == 1.0 or g is None else g * f for g, f in zip(grads, factors, strict=True))
        return plain(outputs, grads, keep, create, inputs, *rest, **kwargs)

    never_compile(run)
    replace_engine_run_backward(run)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return current_graph_task_id() != -1


def _with_gathered_values(inputs: Sequence[Any], accumulate: bool) -> tuple[Any, ...]:
    """The `inputs=` of a backward with gathered values in place of shards: those are the leaves of the graph."""
    by_shard = {id(p.shard): p for engine in engines for unit in engine.units for p in unit.parameters}
    edges: list[Any] = []
    for entry in inputs:
        t = entry if isinstance(entry, torch.Tensor) else getattr(entry.node, "variable", None)
        if t is not None and t in shard.replaced:
            raise FSDPError(
                f"backward(inputs=…) names {shard.replaced[t].plan.name} as it was before the module was wrapped, "
                f"which the model no longer uses; take it from model.parameters() after FSDPv2(…)"
            )
        p = by_shard.get(id(t))
        if p is None:
            edges.append(entry)
            continue
        if not accumulate:
            raise FSDPError(
                f"torch.autograd.grad(…) for the sharded parameter {p.plan.name}: its gradient is summed over the "
                f"ranks and written to .grad. Call loss.backward(inputs=[…]), which leaves all other parameters "
                f"unchanged, and read .grad"
            )
        edges += [leaf for leaf in (p.full, p.full_global) if leaf is not None]
    return tuple(edges)
