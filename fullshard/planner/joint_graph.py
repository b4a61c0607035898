"""The forward and backward of a layer as one graph, divided by torch's partitioner: what a compiled layer keeps.

`torch.compile` traces a layer and its backward into a joint graph, and a partitioner of AOTAutograd decides what
forward saves and what backward computes again. Compiling a layer takes seconds, most of it for tracing. Here the graph
is recorded from the operators that run on the meta device, and torch's own partitioner divides it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fullshard.activations.levels import Level
from fullshard.device.torch_private import (
    DispatchMode,
    compiling_flag,
    decomposition_table,
    min_cut_partition,
    operator_packet,
    overload_name,
    recomputed_node_meta,
    schema_of,
    storage_id,
    tree_map,
)

aten = torch.ops.aten
DECOMPOSED = (
    aten.silu.default, aten.silu_backward.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._softmax.default, aten._softmax_backward_data.default,
    aten.transpose.int, aten.t.default, aten.sigmoid_backward.default, aten.tanh_backward.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.rsub.Scalar, aten.rsub.Tensor, aten.stack.default,
    aten.slice_backward.default, aten.select_backward.default, aten.embedding_dense_backward.default,
)  # fmt: skip
"""Operators that the compiler divides into simpler ones, which it can fuse."""
Key = tuple[Any, ...]


class DividedGraph(NamedTuple):
    """A layer's forward and backward, and how many outputs the layer has: the others are saved for backward."""

    forward: fx.Graph
    backward: fx.Graph
    outputs: int


class JointGraph(DispatchMode):
    """Records operators as a graph. Tensors are told apart by their memory and layout."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[Key, fx.Node] = {}
        self.recomputed: list[fx.Node] = []
        """Nodes that were recorded inside `recomputing`."""
        self._recomputing = False
        self._inputs = 0
        self._first: fx.Node | None = None

    def input(self, t: torch.Tensor, kind: str = "primals") -> fx.Node:
        """Make a tensor an input of the graph; gradients of outputs are "tangents"."""
        self._inputs += 1
        with (
            self.graph.inserting_before(self._first) if kind == "primals" and self._first else contextlib.nullcontext()
        ):
            node = self.graph.placeholder(f"{kind}_{self._inputs}")
        node.meta["val"] = t.detach()
        self.nodes[_key(t)] = node
        return node

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, nodes are those of a checkpointed module."""
        before, self._recomputing = self._recomputing, True
        try:
            yield
        finally:
            self._recomputing = before

    def node_of(self, t: torch.Tensor) -> fx.Node:
        """The node of a tensor, which becomes an input if nothing has computed it."""
        return self.nodes.get(_key(t)) or self.input(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DECOMPOSED and func in decomposition_table:
            with self:
                return decomposition_table[func](*args, **kwargs)
        out = func(*args, **kwargs)
        leaves = [out] if isinstance(out, torch.Tensor) else out
        if not isinstance(leaves, tuple | list) or not any(isinstance(t, torch.Tensor) for t in leaves):
            return out
        if len(leaves) == 1 and _key(leaves[0]) in self.nodes and not _writes(func):
            return out  # a view of everything, such as `detach`
        args, kwargs = tree_map(lambda v: self.node_of(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        node = self._add(_functional(func), args, kwargs, out)
        if isinstance(out, torch.Tensor):
            self.nodes[_key(out)] = node
        else:
            for i, t in enumerate(out):
                if isinstance(t, torch.Tensor):
                    self.nodes[_key(t)] = self._add(operator.getitem, (node, i), {}, t)
        return out

    def _add(self, target: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self._first = self._first or node
        node.meta["val"] = value
        source = args[0] if target is operator.getitem else node
        if self._recomputing and torch.Tag.nondeterministic_seeded not in getattr(source.target, "tags", ()):
            self.recomputed.append(node)
        return node


def _key(t: torch.Tensor) -> Key:
    return storage_id(t), t.storage_offset(), t.shape, t.stride(), t.dtype


def _writes(func: Any) -> bool:
    return bool(schema_of(func).is_mutable)


def _functional(func: Any) -> Any:
    """The operator that returns what another one writes: the compiler's graphs write nothing."""
    packet = getattr(aten, str(operator_packet(func)).rpartition(".")[2].rstrip("_"), None) if _writes(func) else None
    if packet is None:
        return func
    return getattr(packet, overload_name(func), None) or getattr(packet, packet.overloads()[0])


class Recording(NamedTuple):
    """The joint graph of a function, and how many outputs the function has: behind them are gradients of inputs."""

    graph: fx.Graph
    outputs: int
    inputs: list[torch.Tensor]
    recomputed: frozenset[fx.Node]
    """Nodes of the part that may be checkpointed."""


def record(run: Callable[[JointGraph], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Recording:
    """The joint graph of a function, as it runs when it is compiled. `run` returns the outputs for the inputs, which it
    knows; those of `inputs` that need a gradient get one."""
    joint = JointGraph()
    recorded_inputs = [joint.input(t).meta["val"] for t in inputs]
    with compiling_flag(), joint:
        outputs = list(run(joint))
    trained = [t for t in inputs if t.requires_grad]
    differentiable = [t for t in outputs if t.requires_grad]
    tangents = [torch.empty_like(t) for t in differentiable]
    for t in tangents:
        joint.input(t, "tangents")
    with compiling_flag(), joint:
        grads = torch.autograd.grad(differentiable, trained, tangents, allow_unused=True)
    by_input = dict(zip(map(id, trained), grads, strict=True))
    input_grads = [by_input.get(id(t)) for t in inputs]
    joint.graph.output(
        [joint.node_of(t) for t in outputs] + [None if g is None else joint.node_of(g) for g in input_grads]
    )
    return Recording(joint.graph, len(outputs), recorded_inputs, frozenset(joint.recomputed))


def divide(recording: Recording, level: Level) -> DividedGraph:
    """Forward and backward as the compiler divides them, for what a layer keeps."""
    if level >= Level.RECOMPUTE:
        return _all_again(recording.graph, recording.outputs)
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(recording.graph, copied)
    graph.output(tree_map(lambda n: copied.get(n), recording.graph.output_node().args[0]))
    if level is Level.RECOMPUTE_MLP:
        for node in recording.recomputed:
            copied[node].meta = {**node.meta, **recomputed_node_meta()}
    forward, backward = min_cut_partition(graph, recording.outputs)
    return DividedGraph(forward, backward, recording.outputs)


def _all_again(joint: fx.Graph, outputs: int) -> DividedGraph:
    """A graph whose forward saves its inputs, and whose backward begins with the forward."""
    results = joint.output_node().args[0]
    assert isinstance(results, tuple | list)
    inputs = [n for n in joint.nodes if n.op == "placeholder" and "tangents" not in str(n.target)]
    parts = []
    for chosen in ([*results[:outputs], *inputs], list(results[outputs:])):
        part, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        part.graph_copy(joint, copied)
        part.output([None if n is None else copied[n] for n in chosen])
        part.eliminate_dead_code()
        parts.append(part)
    return DividedGraph(parts[0], parts[1], outputs)
