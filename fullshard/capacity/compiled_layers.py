"""The memory of a compiled layer, from its graphs of forward and backward (`joint_graph.py`).

What is assumed of the compiler, which generates code for these graphs:

- Element-wise operators and reductions are fused into the kernels that use them. Only what other operators (products,
  attention, our own) read or write, what is saved, and outputs are in memory.
- A fused kernel writes over an input of the same size that nobody needs afterwards.
- What forward saved is released in backward after its last use; the gradients of outputs are held until the end.
- Our own operators allocate what their implementations do, which are traced one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fullshard.capacity.joint_graph import DividedGraph
from fullshard.capacity.operator_flops import FLOPS
from fullshard.capacity.trace_storages import StorageTrace, Usage
from fullshard.models.kernels_on_meta import WORKSPACES
from fullshard.torch_private import (
    fusible_operators,
    implementation_of,
    operator_packet,
    storage_id,
    tree_leaves,
    tree_map,
)


class Cost(NamedTuple):
    """What a graph needs; memory relative to its start."""

    peak: int
    kept: int
    flops: int
    read_write: int


@dataclass
class _Buffer:
    """A tensor's memory in a graph."""

    size: int
    made: int
    """The position of the operator that allocates it."""
    fused: bool
    """Whether that operator can be fused with others."""
    reads: set[int] = field(default_factory=set)
    """The buffers that it is computed from."""
    in_memory: bool = False
    last_use: int = -1


def forward_cost(divided: DividedGraph, inputs: Iterable[torch.Tensor], states: torch.Tensor, rounding: int) -> Cost:
    """Forward of a layer. `inputs` exist already; `states` is the one that is released if it is not saved."""
    results = _tensors(divided.forward.output_node().args[0])
    plan = _Plan(divided.forward, {storage_id(t) for t in inputs}, {storage_id(t) for t in results}, rounding)
    saved = {storage_id(t) for t in results[divided.outputs :]}
    released = 0 if storage_id(states) in saved else plan.rounded(states.untyped_storage().nbytes())
    peak, kept = plan.usage({}, set())
    return Cost(peak, kept - released, plan.flops, plan.read_write)


def backward_cost(divided: DividedGraph, inputs: Iterable[torch.Tensor], states: torch.Tensor, rounding: int) -> Cost:
    """Backward of a layer: it releases what forward saved, `states` too, and the gradients of the outputs."""
    graph = divided.backward
    outside = {storage_id(t) for t in inputs} - {storage_id(states)}
    placeholders = {n: n.meta["val"] for n in graph.nodes if n.op == "placeholder"}
    results = {storage_id(t) for t in _tensors(graph.output_node().args[0])}
    plan = _Plan(graph, outside, results, rounding)
    held = {
        storage_id(t): plan.rounded(t.untyped_storage().nbytes())
        for t in placeholders.values()
        if isinstance(t, torch.Tensor) and storage_id(t) not in outside
    }
    tangents = {storage_id(t) for n, t in placeholders.items() if "tangents" in str(n.target)}
    return Cost(*plan.usage(held, tangents), plan.flops, plan.read_write)


class _Plan:
    """Which buffers a graph has, and when they are in memory."""

    def __init__(self, graph: fx.Graph, outside: set[int], results: set[int], rounding: int) -> None:
        self.rounding, self.outside, self.results = rounding, outside, results
        self.flops = self.read_write = 0
        self.buffers: dict[int, _Buffer] = {}
        self.needed: dict[int, int] = {}
        """The position at which each buffer, or input, is read last."""
        self.inside: dict[int, int] = {}
        """By position, the bytes that an operator allocates while it runs."""
        fusible = fusible_operators()
        for position, node in enumerate(graph.nodes):
            if node.op == "call_function":
                self._add(node, position, _packet(node) in fusible)
        self._settle()

    def rounded(self, size: int) -> int:
        return -(-size // self.rounding) * self.rounding

    def _add(self, node: fx.Node, position: int, fused: bool) -> None:
        made = {storage_id(t): t for t in _tensors(node)}
        read = {storage_id(t) for t in _tensors(node.args, node.kwargs)}
        new = {key: t for key, t in made.items() if key not in read and key not in self.outside}
        for key, t in new.items():
            if key not in self.buffers:
                size = self.rounded(t.untyped_storage().nbytes())
                self.buffers[key] = _Buffer(size, position, fused)
            self.buffers[key].reads |= read
        if made.keys() <= read and not _writes(node):
            return  # a view
        if not fused:
            for key in read:
                self._use(key, position)
            for key in new:
                self.buffers[key].in_memory = True
            self._price(node, position)

    def _use(self, key: int, position: int) -> None:
        self.needed[key] = max(position, self.needed.get(key, -1))
        if key in self.buffers:
            self.buffers[key].in_memory = True

    def _price(self, node: fx.Node, position: int) -> None:
        """The operations of an operator that is not fused, and its memory besides its results."""
        args, kwargs = tree_map(lambda n: n.meta["val"] if isinstance(n, fx.Node) else n, (node.args, node.kwargs))
        implementation = implementation_of(node.target)
        packet = _packet(node)
        if implementation is not None and packet not in FLOPS:
            usage, flops = _traced(implementation, args, kwargs, self.rounding)
            self.inside[position] = usage.peak - usage.kept
            self.flops += flops
        else:
            self.flops += FLOPS[packet](*args) if packet in FLOPS else 0
            if packet in WORKSPACES:
                self.inside[position] = self.rounded(WORKSPACES[packet](*args))
        values = _tensors(node, node.args, node.kwargs)
        self.read_write += sum(t.numel() * t.element_size() for t in values)

    def _settle(self) -> None:
        """Find what is in memory, and until when it is needed."""
        for key in self.results:
            if key in self.buffers:
                self.buffers[key].in_memory = True
        sources: dict[int, set[int]] = {}
        for key, buffer in self.buffers.items():
            sources[key] = set().union(
                *({one} if self._is_read(one) else sources.get(one, set()) for one in buffer.reads)
            )
            if buffer.in_memory:
                for one in sources[key]:
                    self.needed[one] = max(buffer.made, self.needed.get(one, -1))
                if buffer.fused:
                    read = sum(self.buffers[one].size for one in sources[key] if one in self.buffers)
                    self.read_write += buffer.size + read

    def _is_read(self, key: int) -> bool:
        return key not in self.buffers or self.buffers[key].in_memory

    def usage(self, held: dict[int, int], to_the_end: set[int]) -> Usage:
        """The peak, and what is in memory at the end. `held` are buffers that exist at the start and are released after
        their last use; some only at the end."""
        ends: dict[int, list[int]] = {}
        sizes = dict(held)
        for key, buffer in self.buffers.items():
            if buffer.in_memory:
                sizes[key] = buffer.size
        for key in sizes:
            if key not in self.results and key not in to_the_end:
                last = self.needed.get(key, self.buffers[key].made if key in self.buffers else 0)
                ends.setdefault(last, []).append(key)
        begins: dict[int, list[int]] = {}
        for key, buffer in self.buffers.items():
            if buffer.in_memory and key not in held:
                begins.setdefault(buffer.made, []).append(key)
        now = peak = 0
        for position in sorted({*ends, *begins, *self.inside}):
            over = [sizes[key] for key in ends.get(position, ())]
            for key in begins.get(position, ()):
                size = sizes[key]
                if self.buffers[key].fused and size in over:
                    over.remove(size)  # written over an input
                else:
                    now += size
            peak = max(peak, now + self.inside.get(position, 0))
            now -= sum(over)
        return Usage(peak, now - sum(held.get(key, 0) for key in to_the_end))


def _traced(implementation: Callable[..., Any], args: Any, kwargs: Any, rounding: int) -> tuple[Usage, int]:
    """The memory and the operations of one of our own operators."""
    trace = StorageTrace(rounding, [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)], WORKSPACES)
    start = trace.mark()
    with torch.no_grad(), trace:
        result = implementation(*args, **kwargs)
        usage = trace.usage(start, trace.mark())
    del result  # only now: results count
    return usage, trace.flops


def _tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors of the nodes in arguments, in order."""
    nodes = [n for n in tree_leaves(values) if isinstance(n, fx.Node)]
    return [t for n in nodes for t in tree_leaves(n.meta.get("val")) if isinstance(t, torch.Tensor)]


def _packet(node: fx.Node) -> Any:
    return node.target if node.target is operator.getitem else operator_packet(node.target)


def _writes(node: fx.Node) -> bool:
    return str(node.target).endswith("_.default") or "_." in str(node.target)
