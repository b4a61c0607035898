"""Triton's compiler, for kernels and for the functions that allocate what kernels write.

A kernel is not launched on the meta device: what its launcher allocates there is what it allocates on a GPU. So a step
can be traced without a GPU, and where Triton is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from torch.version import hip

__all__ = ["INSTALLED", "Kernel", "exp", "sigmoid", "tl", "triton"]

INSTALLED = importlib.util.find_spec("triton") is not None

if INSTALLED:
    import triton
    import triton.language as tl
else:

    class tl:  # type: ignore[no-redef]
        """What files with kernels use of Triton's language when they are imported."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            """The value itself."""
            return value

    class triton:  # type: ignore[no-redef]
        """What launchers use of Triton."""

        @staticmethod
        def jit(function: Callable[..., Any]) -> Callable[..., Any]:
            """The function itself, which is never launched."""
            return function

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            """The quotient, rounded up."""
            return -(-a // b)

        @staticmethod
        def next_power_of_2(n: int) -> int:
            """The smallest power of 2 that is not less than `n`."""
            return 1 << max(0, n - 1).bit_length()


class Kernel:
    """A kernel that is launched from Python: `kernel[grid](first tensor, …)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.compiled: Any = triton.jit(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], first: Any, *args: Any, **options: Any) -> None:
        if not first.is_meta:
            self.compiled[grid](first, *args, **options)


# --- functions for kernels --------------------------------------------------------------------------------------------
# A chip at its power limit computes more slowly than it reads, and a large part of `tl.exp` and of a division is how
# they treat denormal numbers. NVIDIA's own instructions, exact but for the last bits of fp32, take those as zero.

PTX: tl.constexpr = tl.constexpr(hip is None and os.environ.get("TRITON_INTERPRET") != "1")
"""Whether kernels run on NVIDIA's chips."""


@triton.jit
def _exp2(x):  # type: ignore[no-untyped-def]
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """The exponential of fp32 numbers."""
    return _exp2(x * 1.4426950408889634)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) of fp32 numbers."""
    y = 1 + _exp2(x * -1.4426950408889634)
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1)
    else:
        return 1 / y
