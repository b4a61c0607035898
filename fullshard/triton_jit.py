"""Triton's compiler, for kernels and for the functions that allocate what kernels write.

A kernel is not launched on the meta device: what its launcher allocates there is what it allocates on a GPU. So a step
can be traced without a GPU, and where Triton is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

__all__ = ["INSTALLED", "Kernel", "tl", "triton"]

INSTALLED = importlib.util.find_spec("triton") is not None

if INSTALLED:
    import triton
    import triton.language as tl
else:

    class tl:  # type: ignore[no-redef]
        """What files with kernels use of Triton's language when they are imported."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    class triton:  # type: ignore[no-redef]
        """What launchers use of Triton."""

        @staticmethod
        def jit(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

        @staticmethod
        def next_power_of_2(n: int) -> int:
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
