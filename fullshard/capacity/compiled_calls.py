"""A compiled layer in a traced step: a function takes the place of its forward, and its cost comes from its graph.

The function allocates the layer's outputs and, in backward, the gradient of its input, so that what the model does
around the layer is traced as it is. Graphs are recorded once for each kind of layer and batch, and divided once for
each level.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.capacity.compiled_layers import Cost, backward_cost, forward_cost
from fullshard.capacity.joint_graph import JointGraph, Recording, divide, record
from fullshard.fsdp.activation_memory import Level, mlp_of
from fullshard.fsdp.tensor_tree import map_tensors, tensors_in
from fullshard.quant import workspace
from fullshard.torch_private import storage_id


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
        made = iter(_StandIn.apply(states, *templates))
        return map_tensors(lambda _: next(made), self.known.output)

    def _look_up(self, plain: Any, args: Any, kwargs: Any, states: torch.Tensor, others: list[torch.Tensor]) -> _Known:
        parameters = list(self.layer.parameters())
        shapes = tuple((t.shape, t.dtype, t.requires_grad) for t in (states, *others, *parameters))
        shape = type(self.layer), *shapes
        found = _known.setdefault(self.model, {})
        if shape not in found:
            # Copies, because the recording holds them longer than the step does.
            given = map_tensors(lambda t: torch.empty_like(t).requires_grad_(t is states), (args, kwargs))
            leaf, *others = tensors_in(given)
            outputs: list[Any] = []

            def run(joint: JointGraph) -> list[torch.Tensor]:
                with _marking(mlp_of(self.layer), joint):
                    outputs.append(plain(*given[0], **given[1]))
                return list(tensors_in(outputs[0]))

            recording = record(run, [leaf, *others, *parameters])
            found[shape] = _Known(recording, map_tensors(torch.empty_like, outputs[0]))
        return found[shape]

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
    buffer = workspace.held(states.device)
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
        made = tuple(torch.empty_like(t) for t in templates)
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shape, dtype, device, count = ctx.about
        return torch.empty(shape, dtype=dtype, device=device), *[None] * count
