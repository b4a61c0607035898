"""Safetensors files: the dtype, shape and position of every tensor, and reading of byte ranges.

Bytes are read with `pread` directly into their destination, never through a memory map: a rank holds only what it
requested, and a failing disk raises an error on that rank instead of killing its process. What is read is checksummed
(`block_checksums.py`). Slices of tensors are read by `slice_reader.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fullshard.config.errors import WeightsError
from fullshard.weights.block_checksums import BlockChecksums, combined, remember, state_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""torch dtypes by their names in safetensors headers."""
PART = 512 * 2**10
"""Long runs are read in parts of about this many bytes."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""

    @property
    def bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFiles:
    """An index of all tensors in a set of safetensors files; reads byte ranges. `path` is used in messages."""

    def __init__(self, path: str | Path, files: Iterable[Path]):
        self.path = Path(path)
        self.files = list(files)
        self.entries: dict[str, Entry] = {}
        self.headers: list[bytes] = []
        """A digest of each file's header."""
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._states = [state_of(file) for file in self.files if file.is_file()]  # before anything is read
        self._in_order: list[Entry] = []
        self._ends: list[int] = []  # for each file, how many tensors are in it and those before
        for file in self.files:
            entries, header = read_header(file)
            self.headers.append(header)
            for entry in entries:
                if entry.name in self.entries:
                    raise WeightsError(
                        f"tensor {entry.name} is in two files, {self.entries[entry.name].file} and {file}; remove the "
                        f"file that does not belong to the model"
                    )
                self.entries[entry.name] = entry
            self._in_order += sorted(entries, key=lambda entry: (entry.start, entry.bytes))
            self._ends.append(len(self._in_order))
        self._index = {entry.name: i for i, entry in enumerate(self._in_order)}
        self.blocks = BlockChecksums([entry.bytes for entry in self._in_order])

    def read(self, entry: Entry, offset: int, into: memoryview) -> None:
        """Read the bytes of a tensor from `offset` on into `into`. Thread-safe."""
        read_rest = functools.partial(self._pread, entry)
        while len(into):  # checksummed while it is in the processor's cache
            size = len(into) if len(into) < 3 * PART else PART + -offset % PART
            self._pread(entry, offset, into[:size])
            self.blocks.add(self._index[entry.name], offset, into[:size], read_rest)
            offset, into = offset + size, into[size:]

    def read_blocks(self, indices: Iterable[int]) -> None:
        """Read blocks for their checksums only."""
        for index in indices:
            tensor, start, stop = self.blocks.place(index)
            self.read(self._in_order[tensor], start, memoryview(bytearray(stop - start)))

    def checksums(self) -> dict[str, str]:
        """The checksum of every byte of each file, by file name; reads what was not read yet."""
        self.read_blocks(self.blocks.missing())
        parts = np.split(self.blocks.values, self.blocks.first[self._ends])
        by_file = [combined(header, values) for header, values in zip(self.headers, parts, strict=False)]
        for state, checksum in zip(self._states, by_file, strict=True):
            remember(state, checksum)
        return dict(zip(file_names(self.files), by_file, strict=True))

    def file_of_block(self, index: int) -> Path:
        """The file that a block is in."""
        return self._in_order[self.blocks.place(index)[0]].file

    def _pread(self, entry: Entry, offset: int, into: memoryview) -> None:
        file, at, done = entry.file, entry.start + offset, 0
        descriptor = self._open(file)
        try:
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], at + done)
                if count == 0:
                    raise WeightsError(f"{file} ends at byte {at + done}, inside a tensor: the file is truncated")
                done += count
        except OSError as error:
            raise WeightsError(f"{file} cannot be read at byte {at + done}: {error.strerror}") from error
        with self._lock:
            self.bytes_read += done

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                except OSError as error:
                    raise WeightsError(f"{file} cannot be opened: {error.strerror}") from error
            return self._descriptors[file]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def file_names(files: list[Path]) -> list[str]:
    """The names of files in the folder that all of them are in."""
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    return [os.path.relpath(file, top) for file in files]


def read_header(file: Path) -> tuple[list[Entry], bytes]:
    """The tensors of a file, and a digest of its header. The safetensors library checks that header and file size
    match."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with open(file, "rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            text = stream.read(length)
            header: dict[str, Any] = json.loads(text)
    except SafetensorError as error:
        raise WeightsError(
            f"{file} is not a valid safetensors file ({error}; {os.path.getsize(file):,} bytes on disk). It is "
            f"truncated or damaged, most often by an interrupted download or copy: get it again"
        ) from error
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    entries = []
    for name, item in header.items():
        if item["dtype"] not in DTYPES:
            raise WeightsError(f"{file}: tensor {name} has dtype {item['dtype']}, which torch does not support")
        start = 8 + length + item["data_offsets"][0]
        entries.append(Entry(name, file, DTYPES[item["dtype"]], tuple(item["shape"]), start))
    return entries, hashlib.blake2b(prefix + text, digest_size=16).digest()


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
        starts = {e.name: e.start - self.start for e in read_header(self.path)[0]}
        if os.fstat(self._file).st_size != self.size or starts != {n: start for n, (start, _) in self.offsets.items()}:
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
        """Close the file."""
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
