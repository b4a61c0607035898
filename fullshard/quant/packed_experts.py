"""`PackedExperts`: what modules with fused expert weights [experts, rows, columns] in few bits have in common.

Our experts implementation (`models/experts.py`) takes each weight as a stack, whose experts are dequantized together.
With transformers' implementations, and for classes outside its interface, the module keeps the forward of its class:
each weight is a `FusedWeight` there, which is dequantized one expert at a time, in forward and again in backward.
PEFT's adapters on a weight (`target_parameters`) are products of their own in both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.device.torch_private import local_of, parameters_of
from fullshard.quant.expert_adapters import Adapters, patch_peft, runs_own_experts
from fullshard.quant.expert_weights import FusedWeight
from fullshard.quant.grouped_product import BUFFER, Stack
from fullshard.quant.ops import compute_dtype
from fullshard.spmd.tensor import is_sharded


class PackedExperts(nn.Module):
    """A module with quantized fused experts, of a subclass of its own class.

    The rows of each part are those of one expert after the other, so that a rank may have some experts only.

    The packed parameter has the name of the dense weight, so PEFT finds it; other parts are separate parameters
    (`…_absmax`, `…_scales`).
    """

    PARTS: tuple[str, ...] = ()
    """The names that parts of a weight may have."""

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

    @classmethod
    def _convert(cls, module: nn.Module, names: Sequence[str], compute_dtype: torch.dtype | None) -> Any:
        """The module as one of this class, in place. Its weights are still dense."""
        patch_peft()
        experts: Any = module
        experts.compute_dtype, experts.plain = compute_dtype, type(module)
        experts.fused = {name: tuple(parameters_of(module)[name].shape) for name in names}
        experts.dtype = parameters_of(module)[names[0]].dtype
        experts.running_dtype, experts.adapters = None, {}
        kind: Any = cls
        module.__class__ = _class_of(kind, experts.plain, tuple(names))
        return experts

    def _set_parts(self, name: str, parts: Mapping[str, torch.Tensor]) -> None:
        """Replace a weight by its parts."""
        for part, value in parts.items():
            parameters_of(self)[parameter_name(name, part)] = nn.Parameter(value, requires_grad=False)

    # --- the weights --------------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """The format in messages: "4-bit", "mxfp4"."""
        raise NotImplementedError

    def part_shapes(self, name: str) -> Mapping[str, tuple[int, int]]:
        """The shape of each part of a whole weight."""
        raise NotImplementedError

    def stack_of(self, name: str, parts: Mapping[str, torch.Tensor]) -> Stack:
        """A weight with these parts, for grouped products."""
        raise NotImplementedError

    def is_swapped(self, name: str) -> bool:
        """Whether the matrices of a weight are stored transposed."""
        return False

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """The current parts of a weight: gathered while the module's unit runs, otherwise sharded."""
        parameters = {part: parameters_of(self).get(parameter_name(name, part)) for part in self.PARTS}
        return {part: value for part, value in parameters.items() if value is not None}

    def whole_parts(self, name: str) -> dict[str, torch.Tensor]:
        """The parts of a whole weight as plain tensors; raises if this rank has only its shard."""
        local = {part: local_of(p) if is_sharded(p) else p.data for part, p in self.parts(name).items()}
        for part, shape in self.part_shapes(name).items():
            if tuple(local[part].shape) != shape:
                raise QuantizationError(
                    f"this rank has only {tuple(local[part].shape)} of the {shape} {part} bytes of {self.format} "
                    f"experts; read the whole weight inside `with model.summon_full_params():`"
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
        """A weight for grouped products."""
        return self.stack_of(name, self.parts(name))

    def whole_stack(self, name: str) -> Stack:
        """The same, of plain tensors."""
        return self.stack_of(name, self.whole_parts(name))

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight as a dense tensor."""
        return self.dense(name, self.whole_parts(name), dtype or self.dtype)

    def dense(self, name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight with these parts as a dense tensor; meta parts give a meta tensor."""
        shape, swapped = self.fused[name], self.is_swapped(name)
        out = torch.empty(shape, dtype=dtype, device=parts["packed"].device)
        if not out.is_meta:
            stacked = out.transpose(1, 2) if swapped else out
            for rows, values in self.stack_of(name, parts).dense_parts(dtype, BUFFER):
                stacked[:, rows] = values
        return out

    def restore(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Convert the module back to its original class, in place, with dense (rounded) weights."""
        dense = {name: self.dequantize(name, dtype) for name in self.fused}
        for name in self.made_parameters():
            del parameters_of(self)[name]
        self.__class__ = self.plain
        for name, weight in dense.items():
            parameters_of(self)[name] = nn.Parameter(weight, requires_grad=False)
        return self

    def made_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are computed from files (`weights/transforms.py`)."""
        return tuple(parameter_name(name, part) for name in self.fused for part in self.parts(name))

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

    def requires_grad_(self, requires_grad: bool = True) -> PackedExperts:
        if requires_grad:
            raise QuantizationError(
                f"{self.format} experts are frozen and cannot be trained. Add adapters (LoRA, target_parameters) to "
                f"train, or load the model without quantization"
            )
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.fused.items())
        return f"{shapes}: {self.format}"


def parameter_name(name: str, part: str) -> str:
    """The parameter name of a part of a weight; packed values have the name of the weight itself."""
    return name if part == "packed" else f"{name}_{part}"


@functools.cache
def _class_of(kind: Any, plain: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of the module's class whose weights are `FusedWeight`s."""
    weights = {name: property(functools.partial(FusedWeight, name=name)) for name in names}
    return type(f"{kind.__name__.removesuffix('Experts')}{plain.__name__}", (kind, plain), weights)
