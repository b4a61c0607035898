"""`torch.compile` of a whole model, or of a function that calls it: units are compiled one by one.

The engine's own work (communication, hooks, bookkeeping) cannot be part of a graph. The outermost module takes the
compiler out of force while the engine runs and gives it to the forward of each unit that has no units inside, as
`compile_units` would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fullshard.torch_private import set_eval_frame


def keep_out(*entries: Callable[..., Any]) -> None:
    """Never compile these functions themselves. (When a model is wrapped, not on import: it loads the compiler.)"""
    for entry in entries:
        torch.compiler.disable(entry, recursive=False)


class Compiler:
    """The compiler in force where the model was called."""

    def __init__(self) -> None:
        self._callback: Any = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run what follows as it is, without compiling it."""
        before, found = self._callback, set_eval_frame(None)
        if found is not None:
            self._callback = found
        try:
            yield
        finally:
            self._callback = before
            if found is not None:
                set_eval_frame(found)

    def aside(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a hook of the engine, which autograd may run inside a compiled function."""
        with self.suspended():
            return call(*args)

    def resumed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is compiled, if the model is."""
        callback = self._callback
        if callback is None:
            return call

        def compiled(*args: Any, **kwargs: Any) -> Any:
            set_eval_frame(callback)
            try:
                return call(*args, **kwargs)
            finally:
                set_eval_frame(None)

        return compiled
