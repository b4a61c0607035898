"""Readers for dequantized weights: the base weights that an adapter was trained with in QLoRA.

`rounded_readers` replaces the readers of a model's weights. Dense weights in the files are quantized and dequantized,
weights stored in 4 bits are dequantized; one tensor at a time.
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
    """A weight that is computed whole, in dtype `dtype`; `transposed` for the weight of a `Conv1D`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool):
        self.shape, self.dtype, self.transposed = shape, dtype, transposed
        self.form = shape[::-1] if transposed else shape
        """The shape in which it is quantized: [out, in]."""

    @abstractmethod
    def value(self) -> torch.Tensor:
        """The whole weight as [out, in]."""

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        if out.numel():
            yield lambda: out.copy_((self.value().T if self.transposed else self.value())[cuts])


class Rounded(_Whole):
    """A dense weight, converted to dtype `held` (that of the training run), quantized and dequantized."""

    def __init__(self, reader: TensorReader, scheme: Scheme, held: torch.dtype, dtype: torch.dtype, transposed: bool):
        super().__init__(reader.shape, dtype, transposed)
        self.reader, self.scheme, self.held = reader, scheme, held

    def value(self) -> torch.Tensor:
        dense = self.reader[()].to(self.held)
        flat = (dense.T if self.transposed else dense).reshape(-1)
        parts = sharded_groups.quantize_shard(flat, math.prod(self.shape), self.scheme)
        return sharded_groups.dense(parts, self.form, self.scheme, self.dtype)


class RoundedStack(TensorReader):
    """A fused expert weight, quantized and dequantized one expert at a time."""

    def __init__(self, reader: TensorReader, scheme: Scheme, held: torch.dtype, dtype: torch.dtype):
        self.shape, self.dtype = reader.shape, dtype
        self.reader, self.scheme, self.held = reader, scheme, held

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        for part, i in zip(out, range(cuts[0].start, cuts[0].stop), strict=True):
            yield functools.partial(self._one, part, i, cuts[1:])

    def _one(self, out: torch.Tensor, i: int, cuts: Cuts) -> None:
        shape = self.shape[1:]
        flat = self.reader[i : i + 1].to(self.held).reshape(-1)
        parts = sharded_groups.quantize_shard(flat, math.prod(shape), self.scheme)
        out.copy_(sharded_groups.dense(parts, shape, self.scheme, self.dtype)[cuts])


class Dequantized(_Whole):
    """A weight stored in 4 bits, under bitsandbytes' keys."""

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
    """Readers for the weights that are quantized, in `dtype`, by their names in the model (which is on meta)."""
    found: dict[str, TensorReader] = {}
    for name, linear, form in linears(model, how.skip):
        key = f"{name}.weight"
        if bnb_format.is_quantized(source.entries, key):
            found[key] = Dequantized(source, key, tuple(linear.weight.shape), dtype, form.transposed)
        elif key in readers:
            found[key] = Rounded(readers[key], how.scheme, held, dtype, form.transposed)
    for name, _, weights in expert_modules(model, how.skip):
        for own in weights:
            if (key := f"{name}.{own}") in readers:
                found[key] = RoundedStack(readers[key], how.scheme, held, dtype)
    return found
