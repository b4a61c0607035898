"""What one training step allocates, computes and moves, piece by piece: plain values.

`activations.py` makes them by tracing a model on the meta device; whoever prices a run reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class BatchShape:
    """The batches of a step on one rank."""

    rows: int
    """Sequences in a micro-batch."""
    length: int
    """Tokens in a sequence."""
    accumulation: int = 1
    """Micro-batches in a step."""
    packed: bool = False
    """Whether a row holds several documents that must not attend to each other."""

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.rows * self.length


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
        found = []
        for segment in self.segments:
            moved = self.inputs.get(segment.unit, 0)
            if segment.moment == "forward" and moved:
                segment = replace(segment, kept=segment.kept - moved)
            elif segment.moment == "backward" and moved:
                segment = replace(segment, kept=segment.kept + moved, peak=segment.peak + moved)
            found.append(segment)
        return replace(self, segments=tuple(found))
