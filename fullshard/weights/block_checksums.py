"""Checksums of weight files, computed from the bytes that are read.

Each tensor of a file is divided into blocks of a fixed size, so blocks do not depend on the number of ranks or on what
a rank reads. A block is checksummed by whoever reads it; a rank whose slice begins or ends inside a block reads the
rest of it. `SafetensorsFiles` reads, this module keeps the checksums and remembers those of whole files.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

BLOCK = 128 * 2**10
"""Bytes of a block. The last block of a tensor may be shorter."""
UNKNOWN = np.iinfo(np.int64).min
"""The checksum of a block that was not read yet: less than all others."""

ReadRest = Callable[[int, memoryview], None]
"""Reads bytes of a tensor, from an offset on."""


class BlockChecksums:
    """The checksums of all blocks of a sequence of tensors; `sizes` are the bytes of the tensors."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = list(sizes)
        self.first = np.cumsum([0, *(-(-size // BLOCK) for size in self.sizes)])
        """The index of each tensor's first block."""
        self.values = np.full(self.first[-1], UNKNOWN, dtype=np.int64)

    def add(self, tensor: int, offset: int, data: memoryview, read_rest: ReadRest) -> None:
        """Record what was read of a tensor. Where it ends inside a block, the rest is read, unless the whole run is
        shorter than a block: then the block is left for `missing`."""
        end, size = offset + len(data), self.sizes[tensor]
        for i in range(offset // BLOCK, -(-end // BLOCK)):
            index, start, stop = self.first[tensor] + i, i * BLOCK, min((i + 1) * BLOCK, size)
            if self.values[index] != UNKNOWN:
                continue
            if offset <= start and stop <= end:
                self.values[index] = _checksum(data[start - offset : stop - offset])
            elif len(data) >= BLOCK:
                block = memoryview(bytearray(stop - start))
                begin, until = max(start, offset), min(stop, end)
                block[begin - start : until - start] = data[begin - offset : until - offset]
                for low, high in ((start, begin), (until, stop)):
                    if low < high:
                        read_rest(low, block[low - start : high - start])
                self.values[index] = _checksum(block)

    def missing(self) -> np.ndarray:
        """The indices of the blocks that are not known."""
        return np.flatnonzero(self.values == UNKNOWN)

    def place(self, index: int) -> tuple[int, int, int]:
        """The tensor of a block, and where the block begins and ends in it."""
        tensor = int(np.searchsorted(self.first, index, side="right")) - 1
        start = int(index - self.first[tensor]) * BLOCK
        return tensor, start, min(start + BLOCK, self.sizes[tensor])


def _checksum(data: memoryview) -> int:
    value = xxhash.xxh3_64_intdigest(data) - 2**63
    return max(value, UNKNOWN + 1)


def combined(header: bytes, values: np.ndarray) -> str:
    """The checksum of a file, from its header and the checksums of its blocks."""
    return hashlib.blake2b(header + values.astype("<i8").tobytes(), digest_size=16).hexdigest()


# --- whole files ----------------------------------------------------------------------------------------------------

State = tuple[int, ...]
"""What changes when a file is written to: device, number, size and times."""
_whole: dict[State, str] = {}
CLOCK = 2 * 10**9
"""Nanoseconds: a file written to more recently could change again and keep its times."""


def state_of(file: Path) -> State:
    """The state of a file now."""
    at = os.stat(file)
    return at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns


def remember(state: State, checksum: str) -> None:
    """Remember the checksum of a file that was in this state before it was read."""
    if time.time_ns() - max(state[-2:]) > CLOCK:
        _whole[state] = checksum


def remembered(file: Path) -> str | None:
    """The checksum of a file that has not changed since it was read in this process."""
    return _whole.get(state_of(file))
