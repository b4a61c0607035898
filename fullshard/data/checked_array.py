"""Arrays in files, with a checksum for each block that is compared when the block is first read.

Damage is found whichever way a file has changed, and opening stays fast: nothing is read before it is used. What is
done about damage is decided by the owner of the files (`token_table.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.config.errors import DataError

BLOCK = 1 << 16
"""Bytes of a block; the last block of a file may have fewer."""


class BlockChecksums:
    """The checksums (CRC-32) of the blocks of a file, while it is written."""

    def __init__(self) -> None:
        self._whole: list[int] = []
        self._last, self._filled = 0, 0

    def add(self, data: bytes | memoryview) -> None:
        """Continue with what the file gets next."""
        view = memoryview(data).cast("B")
        while len(view):
            part, view = view[: BLOCK - self._filled], view[BLOCK - self._filled :]
            self._last, self._filled = zlib.crc32(part, self._last), self._filled + len(part)
            if self._filled == BLOCK:
                self._whole.append(self._last)
                self._last, self._filled = 0, 0

    def hex(self) -> str:
        """The checksums so far, eight digits each."""
        return np.array([*self._whole, *([self._last] if self._filled else [])], ">u4").tobytes().hex()


class CheckedArray:
    """An array in a file, memory-mapped. Reading a part compares the checksums of its blocks, once each.

    Indexing gives numpy arrays; `[:]` is the whole array.
    """

    def __init__(self, path: Path, dtype: Any, checksums: str, mend: Callable[[str], CheckedArray] | None) -> None:
        """`checksums` as `BlockChecksums` gives them. `mend` is called with a description of damage and returns the
        array that replaces this one; None: damage is an error. Raises `ValueError` if the file has another length."""
        size = path.stat().st_size
        self.path, self._mend = path, mend
        self._checksums = np.frombuffer(bytes.fromhex(checksums), ">u4")
        if len(self._checksums) != -(-size // BLOCK):
            raise ValueError(f"{path} has {size} bytes")
        # A plain array: slicing a numpy.memmap is slower.
        self._values = np.asarray(np.memmap(path, dtype=dtype, mode="r")) if size else np.empty(0, dtype)
        self._per_block = BLOCK // self._values.itemsize
        self._is_checked = bytearray(len(self._checksums))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: Any) -> Any:
        """A value by its number, or those of a slice or of an array of numbers."""
        if isinstance(key, slice):
            first, end, _ = key.indices(len(self._values))
            if first < end:
                self._check(range(first // self._per_block, (end - 1) // self._per_block + 1))
        elif isinstance(key, int | np.integer):
            self._check((range(len(self))[key] // self._per_block,))
        else:
            self._check(np.unique(np.asarray(key) // self._per_block).tolist())
        return self._values[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self[:], dtype, copy=copy)

    def is_sound(self) -> bool:
        """Whether every block has its checksum. Reads the whole file."""
        return all(map(self._agrees, range(len(self._checksums))))

    def _agrees(self, block: int) -> bool:
        part = self._values[block * self._per_block : (block + 1) * self._per_block]
        return zlib.crc32(part.data) == self._checksums[block]

    def _check(self, blocks: Any) -> None:
        for block in blocks:
            if not self._is_checked[block]:
                if not self._agrees(block):
                    self._replace(f"block {block} of {self.path.name} has another checksum than when it was written")
                    if not self._agrees(block):
                        raise DataError(f"{self.path}: block {block} is read as other bytes than were just written.")
                self._is_checked[block] = 1

    def _replace(self, damage: str) -> None:
        if self._mend is None:
            raise DataError(f"the tokens in {self.path.parent} are damaged: {damage}.")
        other = self._mend(damage)
        self._values, self._checksums = other._values, other._checksums
        self._is_checked = bytearray(len(self._checksums))
