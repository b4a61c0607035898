"""What one training step allocates, found by running it on the meta device: no values, no memory, no accelerator.

The planned model runs one forward pass, its loss and a backward pass, with the operators of the device that the run
would use. `storages.py` follows the memory of each tensor. The step is divided into segments: the forward and the
backward of each layer, and what the model does around its layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fullshard.activations.levels import Level, has_slices, set_level
from fullshard.config.errors import CapacityError, first_line
from fullshard.device import accelerator
from fullshard.device.torch_private import storage_id, version_of
from fullshard.fsdp.compile import norms_between
from fullshard.fsdp.local_axes import slice_shape
from fullshard.fsdp.strategy import MixedPrecision
from fullshard.models.attention_masks import known_rows
from fullshard.models.experts import dispatch_of
from fullshard.models.kernels_on_meta import WORKSPACES, device_kernels, product_workspace
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.batch import BatchShape
from fullshard.planner.compiled_layers import CompiledCall, LayerCost, compiled_norms
from fullshard.planner.step_trace import Segment, StepTrace
from fullshard.planner.storages import Mark, StorageTrace, Work
from fullshard.quant import workspace
from fullshard.spmd.tensor_tree import map_tensors, tensors_in


class Traceable(Protocol):
    """What is traced of a `PlannedModel`."""

    @property
    def model(self) -> Any:
        """The model on the meta device."""

    @property
    def head(self) -> Any:
        """The loss head."""

    @property
    def packed(self) -> Any:
        """What isolates packed documents; None without packing."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kind of each unit, by its name."""

    @property
    def precision(self) -> MixedPrecision:
        """The dtypes of mixed precision."""

    @property
    def engine(self) -> EngineSettings:
        """The sharding settings."""

    @property
    def device(self) -> torch.device:
        """The device that the step is planned for."""


def trace_step(
    planned: Traceable, batch: BatchShape, level: Level = Level.RECOMPUTE, *, capability: tuple[int, int] = (9, 0)
) -> StepTrace:
    """The segments of one micro-batch if every layer keeps what `level` says.

    `capability` is the compute capability of the GPUs: whether they multiply in fp8, and what cuBLAS needs.

    Layers are those of the condensed model; see `PlannedModel.kinds`. Parameters have the dtype of gathered ones. They
    and the model's buffers are not counted, and their gradients stay until the end. A model with values runs as it is:
    that is how tests measure what is planned.
    """
    reduced = min(level, Level.RECOMPUTE)  # inputs on the host: the same step, less the inputs
    trace = _traced(_Step(planned, _layers_of(planned), reduced), batch, capability)
    return trace.with_inputs_on_host() if level is Level.OFFLOAD else trace


def trace_evaluation(planned: Traceable, batch: BatchShape, *, capability: tuple[int, int] = (9, 0)) -> StepTrace:
    """The segments of one batch of an evaluation, which keeps nothing for backward. Layers are not compiled: what they
    need then is the most."""
    level = Level.RECOMPUTE_MLP if has_slices(planned.model) else Level.KEEP_ALL
    return _traced(_Evaluation(planned, _layers_of(planned), level), batch, capability)


def _layers_of(planned: Traceable) -> dict[str, nn.Module]:
    modules = dict(planned.model.named_modules())
    return {name: modules[name] for name in dict.fromkeys(planned.kinds.values())}


def _traced(step: _Step, batch: BatchShape, capability: tuple[int, int]) -> StepTrace:
    planned = step.planned
    with contextlib.ExitStack() as stack:
        stack.enter_context(accelerator.meta_stands_for(planned.device, capability >= (8, 9), batch.routing_imbalance))
        stack.enter_context(device_kernels())
        stack.enter_context(_gathered_dtypes(planned.model, planned.precision))
        stack.enter_context(_unread_tokens(planned.model))
        stack.enter_context(step.compiled() if step.calls else _levels(list(step.layers.values()), step.level))
        workspace.release(next(planned.model.parameters()).device)
        try:
            trace = step.run(batch)
        except CapacityError:
            raise
        except Exception as error:
            raise CapacityError(
                f"{type(planned.model).__name__} cannot be traced without values ({type(error).__name__}: "
                f"{first_line(error)}), so its activations cannot be planned; measure them in a run (max_steps 2)."
            ) from error
    if accelerator.is_accelerator(planned.device):
        trace = dataclasses.replace(trace, workspace=trace.workspace + product_workspace(capability))
    return trace


# --- the model as the engine runs it ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _unread_tokens(model: nn.Module) -> Iterator[None]:
    """Inside, models of transformers do not look for padding among the tokens of a batch without a mask."""
    name = "warn_if_padding_and_no_attention_mask"
    parts = [part for part in model.modules() if hasattr(part, name)]
    for part in parts:
        part.__dict__[name] = lambda *args: None
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__[name]


@contextlib.contextmanager
def _gathered_dtypes(model: nn.Module, precision: MixedPrecision) -> Iterator[None]:
    """Inside, parameters have the dtypes of gathered values, and the shapes of slices, and no gradients."""
    parameters = list(model.parameters())
    before = [(p, p.data, p.grad) for p in parameters]
    try:
        for p in parameters:
            p.grad = None
            if p.dtype != (dtype := precision.computed(p.dtype)):
                p.data = p.data.to(dtype)
            if p.is_meta and p.shape != (shape := slice_shape(p)):
                p.data = p.data.new_empty(shape)
        yield
    finally:
        for p, data, grad in before:
            p.grad = None
            p.data = data
            p.grad = grad


@contextlib.contextmanager
def _levels(layers: list[nn.Module], level: Level) -> Iterator[None]:
    try:
        for layer in layers:
            set_level(layer, level)
        yield
    finally:
        for layer in layers:
            set_level(layer, Level.KEEP_ALL)


def make_batch(batch: BatchShape, device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of this shape as the data loader makes it; every token is trained, packed rows have two documents."""
    ids = torch.zeros(batch.rows, batch.length, dtype=torch.int64, device=device)
    tensors = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if batch.packed:
        first = -(-batch.length // 2)
        positions = torch.cat([torch.arange(first), torch.arange(batch.length - first)])
        tensors["position_ids"] = positions.repeat(batch.rows, 1).to(device)
    return tensors


# --- one step -------------------------------------------------------------------------------------------------------


class _Step:
    """Runs a step and divides it into segments."""

    training = True

    def __init__(self, planned: Traceable, layers: Mapping[str, nn.Module], level: Level) -> None:
        self.planned, self.layers, self.level = planned, layers, level
        self.inputs: dict[str, int] = {}
        """Bytes of each layer's input."""
        self.trace = StorageTrace(
            accelerator.allocation_rounding(planned.device),
            [*planned.model.parameters(), *planned.model.buffers()], WORKSPACES,
        )  # fmt: skip
        self.notes: list[str] = []
        self.calls: dict[str, CompiledCall] = {}
        """The layers that the run compiles."""
        if self.training and planned.engine.backend.lower() != "no":
            if has_router_loss(planned.model):
                self.notes.append(
                    "activations of compiled layers with a router loss are those of uncompiled ones, which keep more"
                )
            else:
                pause = self.trace.paused
                self.calls = {name: CompiledCall(planned.model, layer, pause) for name, layer in layers.items()}
        self.marks: list[tuple[str, str, Mark, int, int]] = []
        """Where each segment begins: unit, moment, and the bytes so far of gradients and of tokens sent to experts."""
        dispatches = (dispatch_of(module) for module in planned.model.modules())
        self.links = [dispatch.link for dispatch in dispatches if dispatch is not None]
        for link in self.links:
            link.meter.reset()
        self.gradients = 0
        self.counted: set[int] = set()
        """The storages of gradients so far."""
        self.shared: list[torch.Tensor] = []
        """Inputs of layers that all of them get, such as positions: kept to the end, whichever layer is the last."""
        self.moment = "forward"
        self.embedded: torch.Tensor | None = None
        """The first layer's input if the layers are compiled: their graphs say when it is released."""
        self.last_output = 0
        """The storage of the last layer's output."""
        self.left = 0
        """Layers that have not run forward yet."""

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, compiled layers are priced by their graphs."""
        norms = norms_between(self.planned.model, self.layers.values())
        with contextlib.ExitStack() as stack:
            stack.enter_context(compiled_norms(norms, self.trace.paused))
            for call in self.calls.values():
                stack.enter_context(call.in_place())
            yield

    def begin(self, unit: str) -> None:
        self.marks.append((unit, self.moment, self.trace.mark(), self.gradients, self.tokens_sent))

    @property
    def tokens_sent(self) -> int:
        """Bytes of tokens that were sent to experts on other ranks so far, and back."""
        return sum(link.meter.bytes_sent for link in self.links)

    def run(self, batch: BatchShape) -> StepTrace:
        model = self.planned.model
        device = next(model.parameters()).device
        host = make_batch(batch, torch.device("cpu"))
        model.train(self.training)
        packed = self.planned.packed
        rows = packed.rows(host) if packed is not None else known_rows(host.get("position_ids"))
        with self.hooks(), self.trace, rows:
            self.left = len(self.layers)
            self.begin("")
            inputs = {name: t.to(device, copy=True) for name, t in host.items()}
            loss = self.forward(inputs, batch.rows * (batch.length - 1))
            self.backward(loss)
            del loss, inputs
            self.shared.clear()
            end = self.trace.mark()
        return self.result(end)

    def backward(self, loss: torch.Tensor) -> None:
        self.moment = "backward"
        self.trace.in_backward = True
        self.begin("")
        loss.backward()

    def forward(self, inputs: dict[str, Any], tokens: int) -> torch.Tensor:
        """The loss, as `sft/training_step.py` computes it."""
        labels = inputs["labels"]
        labels.trained_tokens = (tokens, version_of(labels))
        with self.planned.head.loss_pass(1.0 / tokens, tokens) as measured:
            output = self.planned.model(**inputs, use_cache=False)
        _ = measured.sums
        loss: torch.Tensor = output["loss"]
        return loss

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = [self.planned.model.register_forward_pre_hook(self._cast, with_kwargs=True)]
        for name, layer in self.layers.items():
            handles.append(layer.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._after(name)))
        for p in self.planned.model.parameters():
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(self._accumulated))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _cast(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs as the engine casts them for each unit."""
        dtype = self.planned.precision.param_dtype if self.planned.precision.cast_forward_inputs else None
        if dtype is None or all(t.dtype == dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()):
            return args, kwargs
        cast: tuple[Any, Any] = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
        return cast

    def _accumulated(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        if (storage := storage_id(p.grad)) not in self.counted:  # gradients of a LoRA group share memory
            self.counted.add(storage)
            self.gradients += self.trace.size_of(p.grad)

    def _before(self, name: str) -> Any:
        def begins(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            args, kwargs = self._cast(layer, args, kwargs)
            states, *others = tensors_in((args, kwargs))
            if self.calls and self.left == len(self.layers):
                self.embedded = plain = states
                states = _Trained.apply(plain, torch.empty(0, device=plain.device, requires_grad=True))
                args, kwargs = map_tensors(lambda t: states if t is plain else t, (args, kwargs))
            self.inputs[name] = self.trace.size_of(states)
            # The hook of a layer's output begins its backward, and so ends that of the next one.
            if states.requires_grad and storage_id(states) != self.last_output:
                states.register_hook(lambda _: self.begin(""))
            self.shared += others
            self.begin(name)
            return args, kwargs

        return begins

    def _after(self, name: str) -> Any:
        def ends(layer: nn.Module, args: Any, output: Any) -> None:
            self._one_less()
            states = next((t for t in tensors_in(output) if t.requires_grad), None)
            if states is None:
                raise CapacityError(f"{name} returns no tensor that needs a gradient: nothing in or below it trains.")
            states.register_hook(lambda _: self.begin(name))
            self.last_output = storage_id(states)
            self.begin("")

        return ends

    def _one_less(self) -> None:
        """A layer has run; after the last one comes the loss."""
        self.left -= 1
        if not self.left:
            self.moment = "loss"

    # --- results ----------------------------------------------------------------------------------------------------

    def result(self, end: Mark) -> StepTrace:
        grads = [p.grad for p in self.planned.model.parameters() if p.grad is not None]
        recorded = [t for call in self.calls.values() for t in call.recorded]
        embedded = [] if self.embedded is None else [self.embedded]
        numbers = {self.trace.number_of(t) for t in (*grads, *recorded, *embedded)}
        lasting = {number: size for number, size in self.trace.living().items() if number not in numbers}
        following = [*self.marks[1:], ("", "", end, self.gradients, self.tokens_sent)]
        segments = []
        for (unit, moment, start, before, sent), (_, _, stop, after, sent_then) in zip(
            self.marks, following, strict=True
        ):
            peak, kept = self.trace.usage(start, stop, lasting)
            segment = _segment(unit, moment, peak, kept, after - before, stop.work - start.work)
            segment = dataclasses.replace(segment, tokens_sent=sent_then - sent)
            if unit in self.calls:
                segment = self._of_graph(unit, moment)
            if unit or any((segment.peak, segment.kept, segment.flops, segment.read_write)):
                segments.append(segment)
        buffers = [self._cost(unit).workspace for unit in self.calls]
        workspace = sum(lasting.values()) + max(buffers, default=0)
        return StepTrace(tuple(segments), workspace, tuple(self.notes), self.inputs)

    def _cost(self, unit: str) -> LayerCost:
        return self.calls[unit].cost(self.level, self.trace.rounding)

    def _of_graph(self, unit: str, moment: str) -> Segment:
        cost = self._cost(unit)
        if moment == "backward":
            peak, kept, work = cost.backward
            return _segment(unit, moment, peak, kept, cost.gradients, work)
        return _segment(unit, moment, cost.forward.peak, cost.forward.kept, 0, cost.forward.work)


def _segment(unit: str, moment: str, peak: int, kept: int, gradients: int, work: Work) -> Segment:
    return Segment(unit, moment, peak, kept, gradients, work.flops, work.read_write, dict(+work.kinds), work.recomputed)


class _Evaluation(_Step):
    """Runs a batch of an evaluation."""

    training = False

    @torch.no_grad()
    def run(self, batch: BatchShape) -> StepTrace:
        return super().run(batch)

    def backward(self, loss: torch.Tensor) -> None:
        """There is none."""

    def _before(self, name: str) -> Any:
        def begins(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            cast = self._cast(layer, args, kwargs)
            self.begin(name)
            return cast

        return begins

    def _after(self, name: str) -> Any:
        def ends(layer: nn.Module, args: Any, output: Any) -> None:
            self._one_less()
            self.begin("")

        return ends


class _Trained(torch.autograd.Function):
    """The same tensor as one that needs a gradient, even if nothing trains below it: compiled layers share a graph."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if ctx.needs_input_grad[0] else None, None
