"""The files a model was loaded from: where they lie, how they are recognised, and which parameters they still provide.

A checkpoint leaves out frozen values that the base files give again. It may do so only for parameters that came whole
and unchanged from those files and that nobody has written to since; `Base` keeps that record on the model.
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
"""Where a loaded model keeps its `Base`."""
SAMPLES = 64
"""Places per file that a fingerprint looks at, beside its header and size."""
SAMPLE_BYTES = 4096


Loaded = tuple["weakref.ref[torch.Tensor]", tuple[int, int, int]]
"""A piece, and how often it and the sharded tensor around it had been written to."""


@dataclass
class SourceFiles:
    """The origin of a model's values."""

    path: str
    """The directory (or file) they were read from."""
    fingerprint: str
    """`fingerprint_of(path)` when they were read."""
    loaded: dict[str, Loaded] = field(default_factory=dict, repr=False)
    """By parameter name, the state of this rank's piece once it was loaded."""

    def record(self, names: Iterable[str], shard: torch.Tensor) -> None:
        """Note that the files provide this parameter, under every name it has."""
        self.loaded.update(dict.fromkeys(names, (weakref.ref(piece_of(shard)), writes_of(shard))))

    def provides(self, name: str, shard: torch.Tensor) -> bool:
        """Whether reading the files again gives this parameter's present value.

        Any write since then, whatever it wrote, makes this False; only writes through `.data` go unseen, as they do
        everywhere in torch.
        """
        if name not in self.loaded:
            return False
        known, writes = self.loaded[name]
        return known() is piece_of(shard) and writes_of(shard) == writes


def base_of(model: nn.Module) -> SourceFiles | None:
    """The base of a loaded model; None if its values came from elsewhere."""
    return getattr(model, ATTRIBUTE, None)


def fingerprint_of(path: str | Path) -> str:
    """A short text that changes when the weight files under `path` do.

    Names, sizes and headers of the files that hold the weights count, and evenly spaced samples of their contents:
    cheap for any size, and enough to tell apart models, versions of a model and damaged copies, not to prove equality.
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
