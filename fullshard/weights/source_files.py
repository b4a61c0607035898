"""The files a model was loaded from: their path and fingerprint, and which parameters they still provide.

A checkpoint omits frozen parameters that can be loaded from the base files again. That is allowed only for parameters
that were loaded unchanged and not written to since; `SourceFiles` records this on the model.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import WeightsError
from fullshard.fsdp.write_count import piece_of, writes_of
from fullshard.weights.locate import weight_files

ATTRIBUTE = "_fullshard_base"
"""The attribute of a loaded model with its `SourceFiles`."""
SAMPLES = 64
"""Samples per file in a fingerprint, besides its header and size."""
SAMPLE_BYTES = 4096


WriteCount = tuple["weakref.ref[torch.Tensor]", tuple[int, int]]
"""A shard, and the write counts of it and of its sharded tensor."""


@dataclass
class SourceFiles:
    """The files that a model's parameters were loaded from."""

    path: str
    """The directory (or file)."""
    fingerprint: str
    """`fingerprint_of(path)` at load."""
    loaded: dict[str, WriteCount] = field(default_factory=dict, repr=False)
    """By parameter name, the write counts of this rank's shard after loading."""
    left_out: tuple[str, ...] = ()
    """The tensors in the files that belong to parts left out of the model; they are copied when it is saved."""

    def record(self, names: Iterable[str], shard: torch.Tensor) -> None:
        """Record that the files provide this parameter, under all its names."""
        self.loaded.update(dict.fromkeys(names, (weakref.ref(piece_of(shard)), writes_of(shard))))

    def provides(self, name: str, shard: torch.Tensor) -> bool:
        """Whether the files contain this parameter's current value.

        False after any write to it, even of the same value. Writes through `.data` are not detected, because torch does
        not count them.
        """
        if name not in self.loaded:
            return False
        loaded, writes = self.loaded[name]
        return loaded() is piece_of(shard) and writes_of(shard) == writes


def base_of(model: nn.Module) -> SourceFiles | None:
    """The files that a model was loaded from; None if it was not loaded from files."""
    return getattr(model, ATTRIBUTE, None)


def fingerprint_of(path: str | Path) -> str:
    """A hash of the weight files at `path`: of their names, sizes and headers, and of evenly spaced samples.

    It is cheap for any model size. It distinguishes models, versions of a model and damaged copies, but equal
    fingerprints do not prove equal files.
    """
    files = weight_files(Path(path))
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in files:
            _add_file(digest, file)
    except OSError as error:
        raise WeightsError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with open(file, "rb", buffering=0) as stream:
        head = 8 + min(int.from_bytes(stream.read(8), "little"), max(size - 8, 0))  # a damaged length reads less
        stream.seek(0)
        digest.update(_read(stream, head))
        room = max(size - head - SAMPLE_BYTES, 0)
        for i in range(SAMPLES):
            stream.seek(head + room * i // max(SAMPLES - 1, 1))
            digest.update(_read(stream, SAMPLE_BYTES))


def _read(stream: Any, length: int) -> bytes:
    parts = []
    while length > 0 and (part := stream.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
