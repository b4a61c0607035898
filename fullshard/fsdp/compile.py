"""`torch.compile` of a whole model, or of a function that calls it: each unit is compiled separately.

The engine's own work (communication, hooks, bookkeeping) cannot be part of a compiled graph. The outermost module
disables the compiler while the engine runs, and enables it for the forward of each unit that has no units inside, as
`compile_units` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fullshard.torch_private import set_eval_frame


def never_compile(*functions: Callable[..., Any]) -> None:
    """Exclude these functions from compilation. (Called when a model is wrapped, not on import: it loads the
    compiler.)"""
    for function in functions:
        torch.compiler.disable(function, recursive=False)


class Compiler:
    """The compiler that was active where the model was called."""

    def __init__(self) -> None:
        self._callback: Any = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the body without compiling it."""
        before, found = self._callback, set_eval_frame(None)
        if found is not None:
            self._callback = found
        try:
            yield
        finally:
            self._callback = before
            if found is not None:
                set_eval_frame(found)

    def uncompiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a hook of the engine, which autograd may run inside a compiled function."""
        with self.suspended():
            return function(*args)

    def resumed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled if the model is."""
        callback = self._callback
        if callback is None:
            return function

        def compiled(*args: Any, **kwargs: Any) -> Any:
            set_eval_frame(callback)
            try:
                return function(*args, **kwargs)
            finally:
                set_eval_frame(None)

        return compiled
