"""The products of a frozen linear weight, whatever its storage: `x @ Wᵀ` and `dy @ W`.

A weight is a form and a list of tensors. The form is a short string, because operators take strings and tensors but no
Python objects: a kind, and the numbers that the tensors do not tell, separated by colons.

| form | tensors |
|---|---|
| `dense` | weight [out, in] |
| `nf4:64:4096x14336`, `fp4:…` | packed, absmax and, with double quantization, nested (blocks of 64, [out, in]) |
| `fp8` | packed [out, in], scales [out, 4], both as bytes |
| `stored:e4m3:128x128:float32:::1x1x4096x14336`, … | the parts of a released model's weight (`stored_format.py`) |

A new kind of storage adds an entry to `KINDS`, and its layer a method `base_form`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from fullshard.quant import fp8, workspace
from fullshard.quant.stored_format import Coding, Tile
from fullshard.quant.stored_values import decode

Tensors = Sequence[torch.Tensor]
Prepared: TypeAlias = torch.Tensor | fp8.Input
"""An input from `prepare`."""


class BaseForm(NamedTuple):
    """A frozen weight: its form, its tensors, and the only dtype its layer computes in (None: any)."""

    form: str
    tensors: list[torch.Tensor]
    compute_dtype: torch.dtype | None = None


class Kind(Protocol):
    """How weights of one kind of storage are multiplied. `arguments` are the parts of the form behind the kind.

    `x` is [tokens, in] and `dy` [tokens, out]; the result has their dtype, as has `bias`. `out` is where the result is
    written, if given; with `accumulate` it is added there (and there is no bias).
    """

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        """(out features, in features)."""

    def product(
        self, arguments: Sequence[str], tensors: Tensors, x: Any, out: torch.Tensor | None, bias: torch.Tensor | None,
        accumulate: bool,
    ) -> Any:  # fmt: skip
        """`x @ weight.T + bias`, into `out` or added to it."""

    def grad_input(
        self, arguments: Sequence[str], tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None, accumulate: bool
    ) -> Any:
        """`dy @ weight`, into `out` or added to it."""


class Dense:
    """A weight stored as it is, in the dtype of the product."""

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        rows, columns = tensors[0].shape
        return rows, columns

    def product(
        self, arguments: Sequence[str], tensors: Tensors, x: torch.Tensor, out: torch.Tensor | None,
        bias: torch.Tensor | None, accumulate: bool,
    ) -> torch.Tensor:  # fmt: skip
        weight = tensors[0].t()
        if out is not None and accumulate:
            return out.addmm_(x, weight)
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)

    def grad_input(
        self, arguments: Sequence[str], tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None, accumulate: bool
    ) -> torch.Tensor:
        if out is not None and accumulate:
            return out.addmm_(dy, tensors[0])
        return torch.mm(dy, tensors[0], out=out)


class Dequantized(Dense):
    """A weight that is dequantized for each product."""

    def product(
        self, arguments: Sequence[str], tensors: Tensors, x: torch.Tensor, out: torch.Tensor | None,
        bias: torch.Tensor | None, accumulate: bool,
    ) -> torch.Tensor:  # fmt: skip
        with self._dequantized(arguments, tensors, x.dtype) as weight:
            return super().product((), [weight], x, out, bias, accumulate)

    def grad_input(
        self, arguments: Sequence[str], tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None, accumulate: bool
    ) -> torch.Tensor:
        with self._dequantized(arguments, tensors, dy.dtype) as weight:
            return super().grad_input((), [weight], dy, out, accumulate)

    def _dequantized(
        self, arguments: Sequence[str], tensors: Tensors, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The weight [out, in] for one product, which is inside."""
        raise NotImplementedError


class FourBit(Dequantized):
    """A 4-bit weight of bitsandbytes."""

    def __init__(self, quant_type: str) -> None:
        self.quant_type = quant_type

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        rows, _, columns = arguments[1].partition("x")
        return int(rows), int(columns)

    def _dequantized(
        self, arguments: Sequence[str], tensors: Tensors, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        packed, absmax, nested = (*tensors, None)[:3]
        assert packed is not None and absmax is not None
        shape = self.shape(arguments, tensors)
        return workspace.dequantized(packed, absmax, nested, shape, int(arguments[0]), self.quant_type, dtype)


class Stored(Dequantized):
    """A weight of a released model, as its files store it."""

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        _, joined, rows, columns = map(int, arguments[-1].split("x"))
        return joined * rows, columns

    def _dequantized(
        self, arguments: Sequence[str], tensors: Tensors, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        *coding, shape = arguments
        _, joined, rows, columns = map(int, shape.split("x"))
        tile = Tile(joined, rows, columns)
        fill = functools.partial(decode, Coding.parse(*coding), tensors, tile)
        return workspace.filled((joined * rows, columns), dtype, tensors[0].device, fill)


class FP8:
    """An fp8 weight, multiplied in fp8. The input may be prepared (`fp8.prepare`)."""

    def shape(self, arguments: Sequence[str], tensors: Tensors) -> tuple[int, int]:
        rows, columns = tensors[0].shape
        return rows, columns

    def product(
        self, arguments: Sequence[str], tensors: Tensors, x: torch.Tensor | fp8.Input, out: torch.Tensor | None,
        bias: torch.Tensor | None, accumulate: bool,
    ) -> torch.Tensor:  # fmt: skip
        ready = fp8.prepare(x) if isinstance(x, torch.Tensor) else x
        result = fp8.product(fp8.Weight(*tensors), ready, None if accumulate else out)
        if out is not None and accumulate:
            return out.add_(result)
        return result if bias is None else result.add_(bias)

    def grad_input(
        self, arguments: Sequence[str], tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None, accumulate: bool
    ) -> torch.Tensor:
        return fp8.grad_input([fp8.Weight(*tensors)], [dy], out, accumulate)


KINDS: dict[str, Kind] = {
    "dense": Dense(),
    "nf4": FourBit("nf4"),
    "fp4": FourBit("fp4"),
    "fp8": FP8(),
    "stored": Stored(),
}


def base_form(layer: nn.Module) -> BaseForm | None:
    """The form of a linear layer's weight; None for layers that compute something else."""
    if type(layer) is nn.Linear:
        return BaseForm("dense", [layer.weight])
    if (own := getattr(layer, "base_form", None)) is None:
        return None
    form, tensors = own()
    return BaseForm(form, tensors, getattr(layer, "compute_dtype", None))


def shape(form: str, tensors: Tensors) -> tuple[int, int]:
    """(out features, in features) of a weight."""
    kind, *arguments = form.split(":")
    return KINDS[kind].shape(arguments, tensors)


def product(
    form: str, tensors: Tensors, x: Prepared, out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, accumulate: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`x @ Wᵀ`, plus the bias. `x` may come from `prepare`."""
    kind, *arguments = form.split(":")
    if isinstance(x, fp8.Input) and kind != "fp8":
        x = x.x
    result: torch.Tensor = KINDS[kind].product(arguments, tensors, x, out, bias, accumulate)
    return result


def adds_in_place(form: str) -> bool:
    """Whether a product with `accumulate` adds to the output while it computes, not in a pass of its own."""
    return form != "fp8"


def grad_input(
    form: str, tensors: Tensors, dy: torch.Tensor, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """`dy @ W`, the gradient with respect to `x`."""
    kind, *arguments = form.split(":")
    dx: torch.Tensor = KINDS[kind].grad_input(arguments, tensors, dy, out, accumulate)
    return dx


# --- weights that share an input --------------------------------------------------------------------------------------


def prepare(forms: Sequence[str], x: torch.Tensor) -> Prepared:
    """The input of several products: what some of their weights need of it is computed once."""
    return fp8.prepare(x) if "fp8" in forms else x


class Gradient(NamedTuple):
    """A weight, and the gradient of its product."""

    form: str
    tensors: Tensors
    dy: torch.Tensor


def grad_input_sum(
    products: Sequence[Gradient],
    out: torch.Tensor | None = None,
    adapters: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The sum of `dy @ W` over weights that share an input, and of `dh @ A` for the adapters' (dh, A). If `out` is
    given, it is added there. fp8 weights give one product together, of which `dh @ A` is a part."""
    total = out
    if joint := [one for one in products if one.form == "fp8"]:
        weights, grads = [fp8.Weight(*one.tensors) for one in joint], [one.dy for one in joint]
        total = fp8.grad_input(weights, grads, total, total is not None, adapters)
    elif adapters is not None:
        total = adapters[0] @ adapters[1] if total is None else total.addmm_(*adapters)
    for one in products:
        if one.form != "fp8":
            total = grad_input(*one, out=total, accumulate=total is not None)
    assert total is not None
    return total
