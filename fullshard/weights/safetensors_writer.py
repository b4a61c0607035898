"""`FileWriter`: writes a safetensors file one tensor at a time, in any order.

Names, dtypes and shapes are known beforehand, so the header is written first and every tensor has a fixed offset. The
checksum of each tensor is compared with the data read back from the disk.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from fullshard.errors import WeightsError
from fullshard.weights.safetensors_index import DTYPE_NAMES, read_header

BLOCK = 16 * 2**20
"""Number of bytes written, or read back, at a time."""


class FileWriter:
    """One safetensors file. `tensors` has the form of all tensors that will be written, on the meta device."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]):
        self.path = path
        self.offsets: dict[str, tuple[int, int]] = {}
        self.checksums: dict[str, int] = {}
        # Larger dtypes first, so that every tensor is aligned to its item size.
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in order:
            t = tensors[name]
            size = t.numel() * t.dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + size]}
            self.offsets[name] = (end, size)
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.start = 8 + len(text)
        self.size = self.start + end
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write one tensor at its offset."""
        offset, size = self.offsets[name]
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        assert data.numel() == size, f"{name}: {data.numel()} bytes, but the header has {size}"
        memory = memoryview(data.numpy())
        checksum = 0
        for begin in range(0, size, BLOCK):
            block = memory[begin : begin + BLOCK]
            _write(self._file, block, self.start + offset + begin)
            checksum = zlib.crc32(block, checksum)
        self.checksums[name] = checksum

    def finish(self, verify: bool) -> None:
        """Flush to disk, check header and size, and with `verify` the checksum of every tensor."""
        absent = [name for name in self.offsets if name not in self.checksums]
        assert not absent, f"{self.path}: {absent[:3]} are in the header but were not written"
        os.fsync(self._file)
        found = {e.name: e.start - self.start for e in read_header(self.path)[0]}
        if os.fstat(self._file).st_size != self.size or found != {n: start for n, (start, _) in self.offsets.items()}:
            raise WeightsError(f"{self.path}: header or size on disk differs from what was written")
        for name, (offset, size) in self.offsets.items() if verify else ():
            checksum = 0
            for begin in range(0, size, BLOCK):
                block = os.pread(self._file, min(BLOCK, size - begin), self.start + offset + begin)
                checksum = zlib.crc32(block, checksum)
            if checksum != self.checksums[name]:
                raise WeightsError(
                    f"{self.path}: {name} on disk differs from what was written. The disk may be failing"
                )
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """The size of tensors in bytes."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors.values())
