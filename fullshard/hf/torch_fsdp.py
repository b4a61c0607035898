"""The static methods of torch's `FullyShardedDataParallel`, for models that fullshard has sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.fsdp import FSDPv2
from fullshard.fsdp.torch_methods import wrapped_modules
from fullshard.hf.patches import TORCH_FSDP

Method = Callable[..., Any]


def _patch(name: str) -> Callable[[Method], Method]:
    """The patch of one method: `FSDPv2`'s own, where a module among the arguments holds wrapped ones."""

    def replacement(original: Method) -> Method:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            modules = [one for one in (*args, *kwargs.values()) if isinstance(one, nn.Module)]
            if not any(wrapped_modules(module, root_only=False) for module in modules):
                return original(*args, **kwargs)
            if "module" in kwargs:
                args = (kwargs.pop("module"), *args)
            return getattr(FSDPv2, name)(*args, **kwargs)

        return method

    return replacement


def __getattr__(name: str) -> Any:
    """The patch of each method, by which the table names it."""
    if name in TORCH_FSDP:
        return _patch(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
