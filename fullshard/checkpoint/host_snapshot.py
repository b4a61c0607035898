"""A copy of the state in host memory, for asynchronous saves.

One buffer per manager holds what this rank will write, and is reused by the next save. Copies from a GPU are
asynchronous, into pinned memory; nothing is allocated on the GPU. Shards of XLA devices are copies already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from fullshard import accelerator
from fullshard.checkpoint.shard_index import TensorShard, as_bytes, part_to_write

ALIGNMENT = 64


class HostBuffer:
    """Host memory that grows to the largest size needed and is reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Iterable[TensorShard]) -> list[TensorShard]:
        """Copies of the shards; returns once the originals may change."""
        found = [part for piece in pieces if (part := part_to_write(piece)) is not None]
        parts = [part for part in found if not part.own]
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-part.local.numel() * part.local.element_size() // ALIGNMENT) * ALIGNMENT
        self._reserve(end)
        copies = [_whole(part, part.local) for part in found if part.own]
        for part, start in zip(parts, starts, strict=True):
            size = part.local.numel() * part.local.element_size()
            copy = self._memory[start : start + size].view(part.local.dtype).view(part.local.shape)
            if not accelerator.is_accelerator(part.local.device) and part.local.is_contiguous():
                # numpy uses memcpy, which bypasses the cache for large blocks: twice as fast as torch's copy.
                np.copyto(np.asarray(as_bytes(copy)), np.asarray(as_bytes(part.local)))
            else:
                copy.copy_(part.local, non_blocking=True)
            copies.append(_whole(part, copy))
        for device in {part.local.device for part in parts}:
            accelerator.synchronize(device)
        return copies

    def _reserve(self, size: int) -> None:
        if self._memory.numel() < size:
            self.release()
            self._memory = accelerator.host_memory((size,), torch.uint8)

    def release(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def _whole(part: TensorShard, copy: torch.Tensor) -> TensorShard:
    """A part whose values are in `copy`; `part_to_write` must not split it again."""
    return replace(part, local=copy, copies=min(part.copies, 1), copy=0)
