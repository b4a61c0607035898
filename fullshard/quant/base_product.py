"""The products of a frozen linear weight, whatever its storage: `x @ Wᵀ` and `dy @ W`.

A weight is a form and a list of tensors. The form is a short string, because operators take strings and tensors but no
Python objects: a kind, and the numbers that the tensors do not tell, separated by colons.

| form | tensors |
|---|---|
| `dense` | weight [out, in] |
| `nf4:64:4096x14336`, `fp4:…` | packed, absmax and, with double quantization, nested (blocks of 64, [out, in]) |

A new kind of storage adds an entry to `KINDS`, and its layer a method `base_form`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fullshard.quant import workspace

Tensors = Sequence[torch.Tensor]


class BaseForm(NamedTuple):
    """A frozen weight: its form and its tensors."""

    form: str
    tensors: list[torch.Tensor]


class Kind(Protocol):
    """How weights of one kind of storage are multiplied. `arguments` are the parts of the form behind the kind.

    `x` is [tokens, in] and `dy` [tokens, out]; the result has their dtype. `out` is where it is written, if given; with
    `accumulate` it is added there.
    """

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        """(out features, in features)."""

    def product(self, arguments: Sequence[str], tensors: Tensors, x: torch.Tensor, out: torch.Tensor | None) -> Any: ...

    def grad_input(
        self, arguments: Sequence[str], tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None, accumulate: bool
    ) -> Any: ...


class Dense:
    """A weight stored as it is, in the dtype of the product."""

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        rows, columns = tensors[0].shape
        return rows, columns

    def weight(
        self, arguments: Sequence[str], tensors: Tensors, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The weight [out, in] for one product, which is inside."""
        return contextlib.nullcontext(tensors[0])

    def product(
        self, arguments: Sequence[str], tensors: Tensors, x: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        with self.weight(arguments, tensors, x.dtype) as weight:
            return torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)

    def grad_input(
        self, arguments: Sequence[str], tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None, accumulate: bool
    ) -> torch.Tensor:
        with self.weight(arguments, tensors, dy.dtype) as weight:
            if out is None:
                return torch.mm(dy, weight)
            return out.addmm_(dy, weight) if accumulate else torch.mm(dy, weight, out=out)


class FourBit(Dense):
    """A 4-bit weight, which is dequantized for each product."""

    def __init__(self, quant_type: str) -> None:
        self.quant_type = quant_type

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        rows, _, columns = arguments[1].partition("x")
        return int(rows), int(columns)

    def weight(
        self, arguments: Sequence[str], tensors: Tensors, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        packed, absmax, nested = (*tensors, None)[:3]
        assert packed is not None and absmax is not None
        shape = self.shape(arguments, tensors)
        return workspace.dequantized(packed, absmax, nested, shape, int(arguments[0]), self.quant_type, dtype)


KINDS: dict[str, Kind] = {"dense": Dense(), "nf4": FourBit("nf4"), "fp4": FourBit("fp4")}


def base_form(layer: nn.Module) -> BaseForm | None:
    """The form of a linear layer's weight; None for layers that compute something else."""
    if (own := getattr(layer, "base_form", None)) is not None:
        form, tensors = own()
        return BaseForm(form, tensors)
    if type(layer) is nn.Linear:
        return BaseForm("dense", [layer.weight])
    return None


def shape(form: str, tensors: Tensors) -> tuple[int, int]:
    """(out features, in features) of a weight."""
    kind, *arguments = form.split(":")
    return KINDS[kind].shape(arguments, tensors)


def product(form: str, tensors: Tensors, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ Wᵀ`."""
    kind, *arguments = form.split(":")
    found: torch.Tensor = KINDS[kind].product(arguments, tensors, x, out)
    return found


def grad_input(
    form: str, tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """`dy @ W`, the gradient with respect to `x`."""
    kind, *arguments = form.split(":")
    found: torch.Tensor = KINDS[kind].grad_input(arguments, tensors, dy, out, accumulate)
    return found
