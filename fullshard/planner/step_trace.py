"""What one training step allocates, computes and moves, piece by piece: plain values.

`tracer.py` makes them by tracing a model on the meta device; whoever prices a run reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fullshard.activations.levels import Level


@dataclass(frozen=True)
class Segment:
    """A part of a step: one layer's forward or backward, or what the model does around its layers.

    Bytes are those of tensors that the step allocates. Parameters and buffers are not counted.
    """

    unit: str
    """The layer that runs; empty for the model's own operations around its layers."""
    moment: str
    """"forward", "loss" or "backward"."""
    peak: int
    """The most bytes allocated during it, above those at its start."""
    kept: int
    """Bytes at its end above those at its start; negative where it frees memory."""
    gradients: int
    """Of `kept`: gradients of parameters, whole and in the dtype that autograd gives them."""
    flops: int
    """Floating-point operations of matrix products and attention."""
    read_write: int
    """Bytes that its operators read and write."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The operations by kind (`kernels_on_meta.KINDS`), with those of tiles that are not full; plain products where
    nothing is said."""
    recomputed: int = 0
    """Of `flops`: those that repeat what forward has computed."""
    tokens_sent: int = 0
    """Bytes of tokens that are sent to experts on other ranks, and back."""


@dataclass(frozen=True)
class StepTrace:
    """The segments of one micro-batch in order: the model's own forward and its layers', loss, and backward."""

    segments: tuple[Segment, ...]
    workspace: int = 0
    """Bytes that are allocated in the first step and kept: the buffer for dequantized weights, and cuBLAS's."""
    notes: tuple[str, ...] = ()
    """What was assumed because it cannot be traced."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each layer's input."""

    def with_inputs_on_host(self) -> StepTrace:
        """The same step if each layer's input waits on the host: it leaves with the layer's forward and is back before
        the layer's backward. (The input that the next backward needs is copied back meanwhile, and not counted.)"""
        segments = []
        for segment in self.segments:
            moved = self.inputs.get(segment.unit, 0)
            if segment.moment == "forward" and moved:
                segment = replace(segment, kept=segment.kept - moved)
            elif segment.moment == "backward" and moved:
                segment = replace(segment, kept=segment.kept + moved, peak=segment.peak + moved)
            segments.append(segment)
        return replace(self, segments=tuple(segments))


@dataclass(frozen=True)
class TracedModel:
    """A model's traced steps, of which some layers stand for all."""

    traces: Mapping[Level, StepTrace]
    """One micro-batch for each level of its layers."""
    layers: Sequence[str]
    """The layers of the whole model, in order."""
    kinds: Mapping[str, str]
    """For each layer, the one in the traces that stands for it."""
