"""Dense weights as they come back from 4 bits: the values that an adapter is trained beside in QLoRA.

`rounded_readers` puts them in place of the weights in the files, one tensor at a time: weights that lie there dense are
quantised and unpacked again, those that lie there in 4 bits are unpacked.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.adapters import bnb, groups
from fullshard.adapters.groups import Scheme
from fullshard.adapters.quantize import Quantization, linears
from fullshard.weights.files import Source
from fullshard.weights.reader import Cuts, Job, Reader, Stored


class _Whole(Reader):
    """A weight that is made as a whole, in the dtype it is wanted in."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def value(self) -> torch.Tensor:
        """All of it."""

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        if out.numel():
            yield lambda: out.copy_(self.value()[cuts])


class Rounded(_Whole):
    """A dense weight, quantised as a run does it that holds weights in dtype `held`, and unpacked."""

    def __init__(self, reader: Reader, scheme: Scheme, held: torch.dtype, dtype: torch.dtype):
        super().__init__(reader.shape, dtype)
        self.reader, self.scheme, self.held = reader, scheme, held

    def value(self) -> torch.Tensor:
        flat = self.reader[()].to(self.held).reshape(-1)
        parts = groups.quantize_shard(flat, math.prod(self.shape), self.scheme)
        return groups.dense(parts, self.shape, self.scheme, self.dtype)


class Unpacked(_Whole):
    """A weight that lies in the files in 4 bits, under bitsandbytes' keys."""

    def __init__(self, source: Source, name: str, shape: tuple[int, ...], dtype: torch.dtype):
        super().__init__(shape, dtype)
        self.parts = {key: entry for key, entry in source.entries.items() if key == name or key.startswith(f"{name}.")}
        self.source, self.name = source, name

    def value(self) -> torch.Tensor:
        tensors = {key: Stored(self.source, entry)[()] for key, entry in self.parts.items()}
        parts, scheme = groups.from_state(*bnb.from_tensors(tensors, self.name))
        return groups.dense(parts, self.shape, scheme, self.dtype)


def rounded_readers(
    model: nn.Module, source: Source, readers: Mapping[str, Reader], how: Quantization, held: torch.dtype, dtype: Any
) -> dict[str, Reader]:
    """Readers of the weights that are quantised, in `dtype`, by their names in the (plain, empty) model."""
    found: dict[str, Reader] = {}
    for name, linear in linears(model, how.skip):
        key = f"{name}.weight"
        if bnb.is_quantized(source.entries, key):
            found[key] = Unpacked(source, key, tuple(linear.weight.shape), dtype)
        elif key in readers:
            found[key] = Rounded(readers[key], how.scheme, held, dtype)
    return found
