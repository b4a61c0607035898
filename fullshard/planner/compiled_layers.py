"""A compiled layer in a traced step: a function takes the place of its forward, and its cost comes from its graph.

The function allocates the layer's outputs and, in backward, the gradient of its input, so that what the model does
around the layer is traced as it is. Graphs are recorded once for each kind of layer and batch, and divided once for
each level.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fullshard.activations.levels import Level, mlp_of
from fullshard.device.torch_private import (
    fusible_operators,
    implementation_of,
    operator_packet,
    storage_id,
    tree_leaves,
    tree_map,
)
from fullshard.models.kernels_on_meta import FLOPS, WORKSPACES
from fullshard.planner.joint_graph import DividedGraph, JointGraph, Recording, divide, record
from fullshard.planner.storages import StorageTrace, Usage, Work
from fullshard.quant import workspace
from fullshard.spmd.tensor_tree import map_tensors, tensors_in


class Cost(NamedTuple):
    """What a graph needs; memory relative to its start."""

    peak: int
    kept: int
    work: Work


@dataclass
class _Buffer:
    """A tensor's memory in a graph."""

    size: int
    allocated_at: int
    """The position of the operator that allocates it."""
    fused: bool
    """Whether that operator can be fused with others."""
    reads: set[int] = field(default_factory=set)
    """The buffers that it is computed from."""
    in_memory: bool = False


def forward_cost(divided: DividedGraph, inputs: Iterable[torch.Tensor], states: torch.Tensor, rounding: int) -> Cost:
    """Forward of a layer. `inputs` exist already; `states` is the one that is released if it is not saved."""
    results = _tensors(divided.forward.output_node().args[0])
    plan = _Plan(divided.forward, {storage_id(t) for t in inputs}, {storage_id(t) for t in results}, rounding)
    saved = {storage_id(t) for t in results[divided.outputs :]}
    released = 0 if storage_id(states) in saved else plan.rounded(states.untyped_storage().nbytes())
    peak, kept = plan.usage({}, set())
    return Cost(peak, kept - released, plan.work)


def backward_cost(divided: DividedGraph, inputs: Iterable[torch.Tensor], states: torch.Tensor, rounding: int) -> Cost:
    """Backward of a layer: it releases what forward saved, `states` too, and the gradients of the outputs."""
    graph = divided.backward
    outside = {storage_id(t) for t in inputs} - {storage_id(states)}
    placeholders = {n: n.meta["val"] for n in graph.nodes if n.op == "placeholder"}
    results = {storage_id(t) for t in _tensors(graph.output_node().args[0])}
    plan = _Plan(graph, outside, results, rounding)
    existing = {
        storage_id(t): plan.rounded(t.untyped_storage().nbytes())
        for t in placeholders.values()
        if isinstance(t, torch.Tensor) and storage_id(t) not in outside
    }
    tangents = {storage_id(t) for n, t in placeholders.items() if "tangents" in str(n.target)}
    return Cost(*plan.usage(existing, tangents), plan.work)


class _Plan:
    """Which buffers a graph has, and when they are in memory."""

    def __init__(self, graph: fx.Graph, outside: set[int], results: set[int], rounding: int) -> None:
        self.rounding, self.outside, self.results = rounding, outside, results
        self.work = Work()
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
        results = {storage_id(t): t for t in _tensors(node)}
        read = {storage_id(t) for t in _tensors(node.args, node.kwargs)}
        new = {key: t for key, t in results.items() if key not in read and key not in self.outside}
        for key, t in new.items():
            if key not in self.buffers:
                size = self.rounded(t.untyped_storage().nbytes())
                self.buffers[key] = _Buffer(size, position, fused)
            self.buffers[key].reads |= read
        if results.keys() <= read and not _writes(node):
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
            usage, work = _traced(implementation, args, kwargs, self.rounding)
            self.inside[position] = usage.peak - usage.kept
            self.work += replace(work, read_write=0)
        else:
            self.work.count(packet, args)
            if packet in WORKSPACES:
                self.inside[position] = self.rounded(WORKSPACES[packet](*args))
        values = _tensors(node, node.args, node.kwargs)
        self.work.read_write += sum(t.numel() * t.element_size() for t in values)

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
                    self.needed[one] = max(buffer.allocated_at, self.needed.get(one, -1))
                if buffer.fused:
                    read = sum(self.buffers[one].size for one in sources[key] if one in self.buffers)
                    self.work.read_write += buffer.size + read

    def _is_read(self, key: int) -> bool:
        return key not in self.buffers or self.buffers[key].in_memory

    def usage(self, existing: dict[int, int], to_the_end: set[int]) -> Usage:
        """The peak, and what is in memory at the end. `existing` are buffers that exist at the start and are released
        after their last use; some only at the end."""
        ends: dict[int, list[int]] = {}
        sizes = dict(existing)
        for key, buffer in self.buffers.items():
            if buffer.in_memory:
                sizes[key] = buffer.size
        for key in sizes:
            if key not in self.results and key not in to_the_end:
                last = self.needed.get(key, self.buffers[key].allocated_at if key in self.buffers else 0)
                ends.setdefault(last, []).append(key)
        begins: dict[int, list[int]] = {}
        for key, buffer in self.buffers.items():
            if buffer.in_memory and key not in existing:
                begins.setdefault(buffer.allocated_at, []).append(key)
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
        return Usage(peak, now - sum(existing.get(key, 0) for key in to_the_end))


def _traced(implementation: Callable[..., Any], args: Any, kwargs: Any, rounding: int) -> tuple[Usage, Work]:
    """The memory and the operations of one of our own operators."""
    trace = StorageTrace(rounding, [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)], WORKSPACES)
    start = trace.mark()
    with torch.no_grad(), trace:
        result = implementation(*args, **kwargs)
        usage = trace.usage(start, trace.mark())
    del result  # only now: results count
    return usage, trace.work


def _tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors of the nodes in arguments, in order."""
    nodes = [n for n in tree_leaves(values) if isinstance(n, fx.Node)]
    return [t for n in nodes for t in tree_leaves(n.meta.get("val")) if isinstance(t, torch.Tensor)]


def _packet(node: fx.Node) -> Any:
    return node.target if node.target is operator.getitem else operator_packet(node.target)


def _writes(node: fx.Node) -> bool:
    return str(node.target).endswith("_.default") or "_." in str(node.target)


@dataclass(frozen=True)
class LayerCost:
    """Forward and backward of a layer."""

    forward: Cost
    backward: Cost
    gradients: int
    """Bytes of the parameters' gradients."""
    workspace: int
    """Bytes of the buffer for dequantized weights, which all layers share."""


@dataclass
class _Known:
    """What is known of a layer's calls with one shape of inputs."""

    recording: Recording
    output: Any
    """The output, on the meta device."""
    costs: dict[tuple[Level, int], LayerCost] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Known]] = weakref.WeakKeyDictionary()
"""By model, what is known of the calls of its layers, by kind and shapes."""


class CompiledCall:
    """Takes the place of a layer's forward."""

    def __init__(
        self, model: nn.Module, layer: nn.Module, pause: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.model, self.layer, self.pause = model, layer, pause
        self.known: _Known | None = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the layer calls it."""
        plain = self.layer.forward
        with _replaced(self.layer, lambda *args, **kwargs: self._call(plain, args, kwargs)):
            yield

    def _call(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        states, *others = tensors_in((args, kwargs))
        with self.pause():
            self.known = self._look_up(plain, args, kwargs, states, others)
        templates = list(tensors_in(self.known.output))
        outputs = iter(_StandIn.apply(states, *templates))
        return map_tensors(lambda _: next(outputs), self.known.output)

    def _look_up(self, plain: Any, args: Any, kwargs: Any, states: torch.Tensor, others: list[torch.Tensor]) -> _Known:
        parameters = list(self.layer.parameters())
        shapes = tuple((t.shape, t.dtype, t.requires_grad) for t in (states, *others, *parameters))
        shape = type(self.layer), *shapes
        calls = _known.setdefault(self.model, {})
        if shape not in calls:
            # Copies, because the recording holds them longer than the step does.
            copies = map_tensors(lambda t: torch.empty_like(t).requires_grad_(t is states), (args, kwargs))
            leaf, *others = tensors_in(copies)
            outputs: list[Any] = []

            def run(joint: JointGraph) -> list[torch.Tensor]:
                with _marking(mlp_of(self.layer), joint):
                    outputs.append(plain(*copies[0], **copies[1]))
                return list(tensors_in(outputs[0]))

            recording = record(run, [leaf, *others, *parameters])
            calls[shape] = _Known(recording, map_tensors(torch.empty_like, outputs[0]))
        return calls[shape]

    @property
    def recorded(self) -> list[torch.Tensor]:
        """The inputs of the call that the recording holds."""
        return [] if self.known is None else self.known.recording.inputs

    def cost(self, level: Level, rounding: int) -> LayerCost:
        """What the call costs at a level. The layer must have run."""
        assert self.known is not None
        if (level, rounding) not in self.known.costs:
            self.known.costs[level, rounding] = _cost(self.known.recording, level, rounding)
        return self.known.costs[level, rounding]


def _cost(recording: Recording, level: Level, rounding: int) -> LayerCost:
    divided = divide(recording, level)
    states = recording.inputs[0]
    grads = divided.backward.output_node().args[0]
    assert isinstance(grads, tuple | list)
    sizes = {storage_id(t): _rounded(t, rounding) for n in grads[1:] if n is not None for t in [n.meta["val"]]}
    workspace.release(states.device)
    forward = forward_cost(divided, recording.inputs, states, rounding)
    backward = backward_cost(divided, recording.inputs, states, rounding)
    both = forward.work.flops + backward.work.flops
    backward.work.recomputed = both - _Plan(recording.graph, set(), set(), rounding).work.flops
    buffer = workspace.allocated_buffer(states.device)
    return LayerCost(forward, backward, sum(sizes.values()), 0 if buffer is None else _rounded(buffer, rounding))


def _rounded(t: torch.Tensor, rounding: int) -> int:
    return -(-t.untyped_storage().nbytes() // rounding) * rounding


@contextlib.contextmanager
def _marking(mlp: nn.Module | None, joint: JointGraph) -> Iterator[None]:
    """Inside, operators of the feed-forward part are recorded as those of a checkpointed module."""
    if mlp is None:
        yield
        return
    plain = mlp.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with joint.recomputing():
            return plain(*args, **kwargs)

    with _replaced(mlp, forward):
        yield


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module has another forward."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


# --- norms between layers ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiled_norms(
    norms: Iterable[nn.Module], pause: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, norms allocate what compiled ones do: one kernel forward and one backward each, which keep the input."""
    with contextlib.ExitStack() as stack:
        for norm in norms:
            stack.enter_context(_replaced(norm, _normalize(norm, pause)))
        yield


def _normalize(norm: nn.Module, pause: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[..., Any]:
    """What takes the place of a norm's forward."""
    plain = norm.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with pause(), torch.no_grad():
            template = plain(*args, **kwargs)
        if not isinstance(template, torch.Tensor):
            return plain(*args, **kwargs)
        return _Norm.apply(template, *tensors_in((args, kwargs)), *norm.parameters())

    return forward


class _Norm(torch.autograd.Function):
    """A normalized tensor like the template; gradients for the inputs and the norm's own vectors."""

    @staticmethod
    def forward(ctx: Any, template: torch.Tensor, *read: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*read)
        return torch.empty_like(template)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *[torch.empty_like(t) if wants else None for t, wants in wanted]


class _StandIn(torch.autograd.Function):
    """Outputs of given shapes, and a gradient for the first input."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, *templates: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.about = states.shape, states.dtype, states.device, len(templates)
        outputs = tuple(torch.empty_like(t) for t in templates)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shape, dtype, device, count = ctx.about
        return torch.empty(shape, dtype=dtype, device=device), *[None] * count
