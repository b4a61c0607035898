"""Safetensors files: the dtype, shape and position of every tensor, and reading of byte ranges.

Bytes are read with `pread` directly into their destination, never through a memory map: a rank holds only what it
requested, and a failing disk raises an error on that rank instead of killing its process. Slices of tensors are read by
`slice_reader.py`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fullshard.errors import WeightsError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""torch dtypes by their names in safetensors headers."""
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


class SafetensorsFiles:
    """An index of all tensors in a set of safetensors files; reads byte ranges. `path` is used in messages."""

    def __init__(self, path: str | Path, files: Iterable[Path]):
        self.path = Path(path)
        self.files = list(files)
        self.entries: dict[str, Entry] = {}
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        for file in self.files:
            for entry in read_header(file):
                if entry.name in self.entries:
                    raise WeightsError(
                        f"tensor {entry.name} is in two files, {self.entries[entry.name].file} and {file}; remove the "
                        f"file that does not belong to the model"
                    )
                self.entries[entry.name] = entry

    def read(self, file: Path, offset: int, into: memoryview) -> None:
        """Read the bytes from `offset` on into `into`. Thread-safe."""
        descriptor = self._open(file)
        done = 0
        try:
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], offset + done)
                if count == 0:
                    raise WeightsError(f"{file} ends at byte {offset + done}, inside a tensor: the file is truncated")
                done += count
        except OSError as error:
            raise WeightsError(f"{file} cannot be read at byte {offset + done}: {error.strerror}") from error
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
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file. The safetensors library checks that header and file size match."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
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
    return entries
