"""Dense weights as they come back from 4 bits: the values that an adapter is trained beside in QLoRA.

`rounded_readers` puts them in place of the weights in the files, one tensor at a time: weights that lie there dense are
quantised and unpacked again, those that lie there in 4 bits are unpacked.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.quant import bnb_format, sharded_groups
from fullshard.quant.config import Quantization
from fullshard.quant.quantize import expert_modules, linears
from fullshard.quant.sharded_groups import Scheme
from fullshard.weights.safetensors_index import SafetensorsFiles
from fullshard.weights.slice_reader import Cuts, Job, Stored, TensorReader


class _Whole(TensorReader):
    """A weight that is made as a whole, in the dtype it is wanted in; `transposed` if it is one of a `Conv1D`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool):
        self.shape, self.dtype, self.transposed = shape, dtype, transposed
        self.form = shape[::-1] if transposed else shape
        """As it is quantised: [out, in]."""

    @abstractmethod
    def value(self) -> torch.Tensor:
        """All of it, as it is quantised."""

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        if out.numel():
            yield lambda: out.copy_((self.value().T if self.transposed else self.value())[cuts])


class Rounded(_Whole):
    """A dense weight, quantised as a run does it that holds weights in dtype `held`, and unpacked."""

    def __init__(self, reader: TensorReader, scheme: Scheme, held: torch.dtype, dtype: torch.dtype, transposed: bool):
        super().__init__(reader.shape, dtype, transposed)
        self.reader, self.scheme, self.held = reader, scheme, held

    def value(self) -> torch.Tensor:
        dense = self.reader[()].to(self.held)
        flat = (dense.T if self.transposed else dense).reshape(-1)
        parts = sharded_groups.quantize_shard(flat, math.prod(self.shape), self.scheme)
        return sharded_groups.dense(parts, self.form, self.scheme, self.dtype)


class RoundedStack(TensorReader):
    """A weight of fused experts, quantised and unpacked one expert at a time."""

    def __init__(self, reader: TensorReader, scheme: Scheme, held: torch.dtype, dtype: torch.dtype):
        self.shape, self.dtype = reader.shape, dtype
        self.reader, self.scheme, self.held = reader, scheme, held

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        for place, i in zip(out, range(cuts[0].start, cuts[0].stop), strict=True):
            yield functools.partial(self._one, place, i, cuts[1:])

    def _one(self, out: torch.Tensor, i: int, cuts: Cuts) -> None:
        shape = self.shape[1:]
        flat = self.reader[i : i + 1].to(self.held).reshape(-1)
        parts = sharded_groups.quantize_shard(flat, math.prod(shape), self.scheme)
        out.copy_(sharded_groups.dense(parts, shape, self.scheme, self.dtype)[cuts])


class Unpacked(_Whole):
    """A weight that lies in the files in 4 bits, under bitsandbytes' keys."""

    def __init__(
        self, source: SafetensorsFiles, name: str, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool
    ):
        super().__init__(shape, dtype, transposed)
        self.parts = {key: entry for key, entry in source.entries.items() if key == name or key.startswith(f"{name}.")}
        self.source, self.name = source, name

    def value(self) -> torch.Tensor:
        tensors = {key: Stored(self.source, entry)[()] for key, entry in self.parts.items()}
        parts, scheme = sharded_groups.from_state(*bnb_format.from_tensors(tensors, self.name))
        return sharded_groups.dense(parts, self.form, scheme, self.dtype)


def rounded_readers(
    model: nn.Module,
    source: SafetensorsFiles,
    readers: Mapping[str, TensorReader],
    how: Quantization,
    held: torch.dtype,
    dtype: Any,
) -> dict[str, TensorReader]:
    """Readers of the weights that are quantised, in `dtype`, by their names in the (plain, empty) model."""
    found: dict[str, TensorReader] = {}
    for name, linear, form in linears(model, how.skip):
        key = f"{name}.weight"
        if bnb_format.is_quantized(source.entries, key):
            found[key] = Unpacked(source, key, tuple(linear.weight.shape), dtype, form.transposed)
        elif key in readers:
            found[key] = Rounded(readers[key], how.scheme, held, dtype, form.transposed)
    for name, _, weights in expert_modules(model, how.skip):
        for own in weights:
            if (key := f"{name}.{own}") in readers:
                found[key] = RoundedStack(readers[key], how.scheme, held, dtype)
    return found
