"""`NF4Experts`: a module with fused expert weights [experts, rows, columns] in 4 bits, quantized expert by expert.

Our experts implementation (`models/experts.py`) takes each weight as a stack, whose experts are dequantized together.
With transformers' implementations, and for classes outside its interface, the module keeps the forward of its class:
each weight is a `FusedWeight` there, which is dequantized one expert at a time, in forward and again in backward.
PEFT's adapters on a weight (`target_parameters`) are products of their own in both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.device.torch_private import local_of, parameters_of
from fullshard.distributed import runtime
from fullshard.quant import blocks, sharded_groups
from fullshard.quant.expert_adapters import Adapters, patch_peft, runs_own_experts
from fullshard.quant.expert_weights import FusedWeight
from fullshard.quant.grouped_product import BUFFER, Stack, quantized
from fullshard.quant.ops import compute_dtype
from fullshard.quant.sharded_groups import GroupRun, Parts, Scheme
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.tensor import is_sharded

PARTS = ("packed", "absmax", "nested")


class NF4Experts(nn.Module):
    """A module with quantized fused experts; `NF4Experts.of` converts a module to a subclass of its own class.

    The packed parameter has the name of the dense weight, so PEFT finds it; scales are separate parameters
    (`…_absmax`, `…_nested`).
    """

    scheme: Scheme
    compute_dtype: torch.dtype | None
    dtype: torch.dtype
    """The dtype of the weights before quantization."""
    fused: dict[str, tuple[int, int, int]]
    """The shapes of the dense weights, by name."""
    plain: type[nn.Module]
    """The original class of the module."""
    running_dtype: torch.dtype | None
    """The dtype of the products while forward runs; otherwise None."""
    adapters: Adapters
    """The active adapters of each weight while forward runs."""
    applies_factors = True

    @staticmethod
    def of(
        module: nn.Module, names: Sequence[str], scheme: Scheme, compute_dtype: torch.dtype | None = None
    ) -> NF4Experts:
        """Quantize weights of a module in place; weights on the meta device stay there."""
        patch_peft()
        experts: Any = module
        experts.scheme, experts.compute_dtype, experts.plain = scheme, compute_dtype, type(module)
        experts.fused = {name: tuple(parameters_of(module)[name].shape) for name in names}
        experts.dtype = parameters_of(module)[names[0]].dtype
        experts.running_dtype, experts.adapters = None, {}
        for name in names:
            weight: Any = parameters_of(module)[name]
            count, numel = weight.shape[0], weight[0].numel()
            parts = {
                part: torch.zeros(shape, dtype=torch.uint8, device=weight.device)
                for part, shape in scheme.shapes(numel, count).items()
            }
            if not weight.is_meta:
                runs = [
                    GroupRun(i, *blocks.quantize(matrix.detach().reshape(-1), scheme.blocksize, scheme.quant_type))
                    for i, matrix in enumerate(weight)
                ]
                parts = sharded_groups.finish_runs(runs, count, numel, scheme)
            for part, value in parts.items():
                parameters_of(module)[parameter_name(name, part)] = nn.Parameter(value, requires_grad=False)
        module.__class__ = _class_of(experts.plain, tuple(names))
        return experts

    # --- the weights --------------------------------------------------------------------------------------------------

    def parts(self, name: str) -> Parts:
        """The current parts of a weight: gathered while the module's unit runs, otherwise sharded."""
        parameters = {part: parameters_of(self).get(parameter_name(name, part)) for part in PARTS}
        return {part: value for part, value in parameters.items() if value is not None}

    def whole_parts(self, name: str) -> Parts:
        """The parts of a whole weight as plain tensors; raises if this rank has only its shard."""
        local = {part: local_of(p) if is_sharded(p) else p.data for part, p in self.parts(name).items()}
        count, *matrix = self.fused[name]
        for part, shape in self.scheme.shapes(math.prod(matrix), count).items():
            if tuple(local[part].shape) != shape:
                raise QuantizationError(
                    f"this rank has only {tuple(local[part].shape)} of the {shape} {part} bytes of 4-bit experts; read "
                    f"the whole weight inside `with model.summon_full_params():`"
                )
        return local

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype that weights are dequantized to when they are used."""
        return self.running_dtype or self.compute_dtype or self.dtype

    def product_dtype_for(self, x: torch.Tensor) -> torch.dtype:
        """The dtype of products with this input."""
        return self.compute_dtype or compute_dtype(x)

    def expert_stack(self, name: str) -> Stack:
        """A weight for grouped products: of all experts, or of those that this rank holds."""
        parts, (_, *matrix) = self.parts(name), self.fused[name]
        count = len(parts["packed"]) // self.scheme.groups(math.prod(matrix))
        return quantized(self.scheme, (count, *matrix), parts)

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight as a dense tensor."""
        return dequantize_stack(self.whole_parts(name), self.fused[name], self.scheme, dtype or self.dtype)

    def restore(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Convert the module back to its original class, in place, with dense (rounded) weights."""
        dense = {name: self.dequantize(name, dtype) for name in self.fused}
        for name in self.made_parameters():
            del parameters_of(self)[name]
        self.__class__ = self.plain
        for name, weight in dense.items():
            parameters_of(self)[name] = nn.Parameter(weight, requires_grad=False)
        return self

    # --- loading: the protocol of `weights/transforms.py` -------------------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The dense weights."""
        return dict(self.fused)

    def made_parameters(self) -> tuple[str, ...]:
        return tuple(parameter_name(name, part) for name in self.fused for part in self.parts(name))

    def read_files(self, readers: Any, pieces: Any) -> dict[str, list[GroupRun]]:
        """Read only this rank's groups of each expert, and quantize them on the device that the module runs on."""
        return {name: self._read(readers[name], name, pieces[name].rows) for name in self.fused}

    def _read(self, reader: Any, name: str, rows: slice) -> list[GroupRun]:
        (count, _, width), scheme, runs = self.fused[name], self.scheme, []
        for i, start, stop in sharded_groups.runs_of(rows, count, math.prod(self.fused[name][1:]), scheme):
            first = start // width
            values = reader[i : i + 1, first : -(-stop // width)].reshape(-1)[start - first * width :][: stop - start]
            values = values.to(device=runtime.device(), dtype=self.dtype)
            runs.append(GroupRun(i, *blocks.quantize(values, scheme.blocksize, scheme.quant_type)))
        empty = torch.empty(0, device=runtime.device())
        return runs or [GroupRun(0, empty.to(torch.uint8), empty)]

    def finish_reading(self, read: dict[str, list[GroupRun]], pieces: Any) -> None:
        """Do the steps that need all ranks, and store this rank's rows."""
        for name, (count, *matrix) in self.fused.items():
            group = sharded_groups.ranks_of_shards(parameters_of(self)[name])
            here = _experts_of_rank(pieces[name].mesh, count)
            runs = [run._replace(matrix=max(run.matrix - here.start, 0)) for run in read[name]]
            parts = sharded_groups.finish_runs(runs, len(here), math.prod(matrix), self.scheme, group)
            for part, value in parts.items():
                pieces[parameter_name(name, part)].local.copy_(value)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Dense weights, because transformers keeps fused experts dense in 4-bit models."""
        files = {}
        for name, shape in self.fused.items():
            parts = {part: values[parameter_name(name, part)] for part in self.parts(name)}
            files[name] = dequantize_stack(parts, shape, self.scheme, self.dtype)
        return files

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, adapters: Adapters | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if runs_own_experts(self) and not is_sharded(hidden_states):
            own: torch.Tensor = self.plain.forward(self, hidden_states, *args, adapters=adapters, **kwargs)
            return own
        return self._by_expert(hidden_states, *args, adapters=adapters or {}, **kwargs)

    @torch.compiler.disable
    def _by_expert(self, hidden_states: torch.Tensor, *args: Any, adapters: Adapters, **kwargs: Any) -> torch.Tensor:
        """The forward of the module's class, with weights that are dequantized one expert at a time."""
        self.running_dtype, self.adapters = self.product_dtype_for(hidden_states), adapters
        try:
            out = self.plain.forward(self, hidden_states.to(self.running_dtype), *args, **kwargs)
        finally:
            self.running_dtype, self.adapters = None, {}
        return out.to(hidden_states.dtype)

    def requires_grad_(self, requires_grad: bool = True) -> NF4Experts:
        if requires_grad:
            raise QuantizationError(
                "4-bit experts are frozen and cannot be trained. Add adapters (LoRA, target_parameters) to train, or "
                "load the model without quantization"
            )
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.fused.items())
        return f"{shapes}: {self.scheme.quant_type}, blocks of {self.scheme.blocksize}"


def _experts_of_rank(mesh: Mesh, count: int) -> range:
    """The experts that this rank and those along `fsdp` hold: all, if there is no axis `ep`."""
    axis, place = mesh.get_axis_name_idx("ep"), mesh.coordinate(runtime.rank())
    if axis is None or place is None:
        return range(count)
    each = count // mesh.mesh_shape[axis]
    return range(each * place[axis], each * (place[axis] + 1))


def parameter_name(name: str, part: str) -> str:
    """The parameter name of a part of a weight; packed values have the name of the weight itself."""
    return name if part == "packed" else f"{name}_{part}"


def dequantize_stack(parts: Parts, shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize all experts; meta parts give a meta tensor."""
    out = torch.empty(shape, dtype=dtype, device=parts["packed"].device)
    if not out.is_meta:
        for rows, values in quantized(scheme, shape, parts).dense_parts(dtype, BUFFER):
            out[:, rows] = values
    return out


@functools.cache
def _class_of(plain: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of the module's class whose weights are `FusedWeight`s."""
    weights = {name: property(functools.partial(FusedWeight, name=name)) for name in names}
    return type(f"NF4{plain.__name__}", (NF4Experts, plain), weights)
