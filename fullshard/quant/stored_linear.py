"""`StoredLinear`: a linear layer whose frozen weight is kept as a released model stores it.

Nothing is quantized while loading: each rank reads the bytes of its rows. The weight is unpacked for the product in
forward and again in backward; no dense copy is kept in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.quant import base_product, stored_files
from fullshard.quant.ops import without_autocast
from fullshard.quant.quantizable import LinearForm
from fullshard.quant.quantized_linear import QuantizedLinear
from fullshard.quant.stored_format import PARTS, StoredFormat, StoredWeight, Tile
from fullshard.quant.stored_values import decode
from fullshard.spmd.rule_table import RULES
from fullshard.spmd.rules_elementwise import Independent
from fullshard.spmd.tensor import is_sharded


def _product(form: str, tensors: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with without_autocast(x.device):
        out = base_product.product(form, tensors, x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


def _grad_input(form: str, tensors: list[torch.Tensor], dy: torch.Tensor) -> torch.Tensor:
    with without_autocast(dy.device):
        dx = base_product.grad_input(form, tensors, dy.reshape(-1, dy.shape[-1]))
    return dx.view(*dy.shape[:-1], dx.shape[-1])


class _Linear(torch.autograd.Function):
    """`x @ weight.T` for plain tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, form: str, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.form = form
        return _product(form, list(tensors), x)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        tensors = list(ctx.saved_tensors)
        return _grad_input(ctx.form, tensors, grad_out), *[None] * (1 + len(tensors))


@torch.library.custom_op("fullshard::linear_stored", mutates_args=())
def linear_stored(x: torch.Tensor, tensors: list[torch.Tensor], form: str) -> torch.Tensor:
    """`x @ weight.T` for compiled layers and sharded inputs."""
    return _product(form, tensors, x)


@torch.library.custom_op("fullshard::linear_stored_gradient", mutates_args=())
def linear_stored_gradient(gradient: torch.Tensor, tensors: list[torch.Tensor], form: str) -> torch.Tensor:
    """The gradient with respect to `x`."""
    return _grad_input(form, tensors, gradient)


@linear_stored.register_fake
def _(x, tensors, form):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], base_product.shape(form, tensors)[0])


@linear_stored_gradient.register_fake
def _(gradient, tensors, form):  # type: ignore[no-untyped-def]
    return gradient.new_empty(*gradient.shape[:-1], base_product.shape(form, tensors)[1])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, tensors, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def _operator_backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    return linear_stored_gradient(grad_out, tensors, ctx.form), [None] * len(tensors), None


linear_stored.register_autograd(_operator_backward, setup_context=_keep)

RULES[torch.ops.fullshard.linear_stored.default] = Independent("x: b* -> b*", "b")
RULES[torch.ops.fullshard.linear_stored_gradient.default] = Independent("gradient: b* -> b*", "b")


class StoredLinear(QuantizedLinear):
    """A linear layer with a frozen weight in the format of a released model's files."""

    PARTS = PARTS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        stored: StoredFormat,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a dense weight
        self.stored_weight, self.FORMAT = StoredWeight(stored, out_features, in_features), stored.name
        self._set_up(in_features, out_features, bias, None, device, dtype)

    @classmethod
    def of(cls, linear: Any, form: StoredFormat, linear_form: LinearForm | None = None) -> StoredLinear:
        """A layer in the place of a dense one on the meta device."""
        layer, _ = cls._like(linear, linear_form, stored=form)
        return layer

    # --- the weight ---------------------------------------------------------------------------------------------------

    def stored_weights(self) -> dict[str, StoredWeight]:
        """The weights in files, by the name of the dense one."""
        return {"weight": self.stored_weight}

    def stored_form(self, name: str) -> tuple[str, int]:
        """The format of a parameter, and how many weights it has the codes of (`fsdp/plan_model.py`)."""
        codes = self.in_features * self.out_features if name == "packed" else 0
        return (self.FORMAT, codes) if name in self.PARTS else ("", 0)

    def part_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the parameters."""
        return self.stored_weight.part_shapes()

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._dense(self.whole_parts(), dtype or self.dtype)

    def _dense(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        tensors = [parts[part] for part in self.stored_weight.parts]
        out = torch.empty(self.shape, dtype=dtype, device=tensors[0].device)
        return decode(self.stored_weight.format.coding, tensors, Tile(1, *self.shape), out)

    def base_form(self) -> tuple[str, list[torch.Tensor]]:
        """The weight for `base_product`."""
        return self.stored_weight.form, list(self.parts.values())

    # --- loading: the protocol `KeepsFiles` of `weights/transforms.py` ------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that files store."""
        return stored_files.file_shapes(self.stored_weight, "weight")

    def part_files(self) -> dict[str, tuple[StoredWeight, str, str]]:
        """The weight, part and file tensor of each parameter that is read as bytes."""
        names = stored_files.file_names(self.stored_weight, "weight")
        return {part: (self.stored_weight, part, name) for part, name in names.items()}

    def from_files(self, readers: Any, device: torch.device) -> torch.Tensor:
        names = stored_files.file_names(self.stored_weight, "weight")
        parts = stored_files.read_weight(self.stored_weight, {part: readers[name] for part, name in names.items()})
        return self._dense({part: value.to(device) for part, value in parts.items()}, self.dtype)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that files store, from the whole parts."""
        names = stored_files.file_names(self.stored_weight, "weight")
        return {
            name: stored_files.as_file_tensor(self.stored_weight, part, values[part]) for part, name in names.items()
        }

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, out_dtype = self.product_dtypes(x)
        form, tensors = self.base_form()
        if torch.compiler.is_compiling() or is_sharded(x):
            out = linear_stored(x.to(dtype), tensors, form)
        else:
            out = _Linear.apply(x.to(dtype), form, *tensors)
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.to(out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.FORMAT}"
