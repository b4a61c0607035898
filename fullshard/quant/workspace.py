"""The buffer that quantized weights are dequantized into for a product: one per stream, for all layers.

A product reads its weight right after it was dequantized, on the same stream, and a stream runs in order. So the next
weight may overwrite the buffer at once. The buffer grows to the largest weight and is kept.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator

import torch

from fullshard.device import accelerator
from fullshard.quant.sharded_groups import weight_of


class _Buffer:
    """One stream's buffer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: torch.Tensor | None = None

    def bytes(self, size: int, device: torch.device) -> torch.Tensor:
        if self.memory is None or self.memory.numel() < size:
            self.memory = None  # freed first: the larger one may take its place
            with torch.inference_mode(False):  # it outlives the pass that allocates it
                self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self.memory[:size]


def allocated_buffer(device: torch.device) -> torch.Tensor | None:
    """The buffer of a device without streams."""
    return _buffer(device, 0).memory


def release(device: torch.device) -> None:
    """Free the buffer of a device without streams."""
    _buffer(device, 0).memory = None


@functools.cache
def _buffer(device: torch.device, stream: int) -> _Buffer:
    return _Buffer()


@contextlib.contextmanager
def dequantized(
    packed: torch.Tensor, absmax: torch.Tensor, nested: torch.Tensor | None, shape: tuple[int, ...], blocksize: int,
    quant_type: str, dtype: torch.dtype,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """A 4-bit weight, dequantized as in `filled`."""

    def fill(out: torch.Tensor) -> torch.Tensor:
        return weight_of(packed, absmax, nested, shape, blocksize, quant_type, dtype, out)

    with filled(shape, dtype, packed.device, fill) as weight:
        yield weight


@contextlib.contextmanager
def filled(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """A tensor that `fill` writes, in the buffer of the current stream. Whatever is queued inside may read it;
    afterwards the buffer belongs to the next caller.

    A second thread that needs it meanwhile gets memory of its own, and so does a pass that autograd records, which may
    keep the weight.
    """
    has_streams = accelerator.is_accelerator(device) and device.type != "meta"
    buffer = _buffer(device, accelerator.current_stream(device).stream_id if has_streams else 0)
    if torch.is_grad_enabled() or not buffer.lock.acquire(blocking=False):
        yield fill(torch.empty(shape, dtype=dtype, device=device))
        return
    try:
        yield fill(buffer.bytes(math.prod(shape) * dtype.itemsize, device).view(dtype).view(shape))
    finally:
        buffer.lock.release()
