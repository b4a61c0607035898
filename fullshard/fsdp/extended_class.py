"""How a wrapped module stays the same object: its class is replaced by one that extends it.

The base of all wrapped modules, with what they refuse on every engine. Each engine's `FSDPv2` adds its methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.spmd.mesh import Mesh


class Factory(type):
    """Lets `FSDPv2(module, …)` wrap a module, and `type(wrapped)(…)` build the plain class.

    Wrapping here rather than in `__new__` keeps Python from calling the module's `__init__` a second time.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (cls.__dict__.get("_fullshard_plain") or cls._fullshard_wrap)(*args, **kwargs)  # type: ignore[attr-defined]


class WrappedModule(metaclass=Factory):
    """What every wrapped module has, on any engine."""

    _fullshard_wrap: Callable[..., Any]
    """Wraps a module: what `FSDPv2(module, …)` calls."""
    _fullshard_mesh: Mesh

    @property
    def mesh(self) -> Mesh:
        """The mesh that the module is sharded on."""
        return self._fullshard_mesh

    def __deepcopy__(self, memo: Any) -> Any:
        raise FSDPError(
            f"a wrapped {type(self).__name__} cannot be deep-copied: its shards belong to an engine that runs on all "
            f"ranks. Copy the module before wrapping it, or build a second one and load_state_dict(model.state_dict()) "
            f"into it. For averaged weights (AveragedModel), keep {{name: p.detach().clone()}} of "
            f"model.named_parameters() and lerp_ each towards its parameter after a step"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FSDPError(
            f"a wrapped {type(self).__name__} cannot be pickled; save model.state_dict() (sharded) or "
            f"model.full_state_dict() (whole values)"
        )


def extended_class(module: nn.Module, base: type[WrappedModule]) -> type:
    """A class with `base` and the module's class as bases. It has the same name, which `save_pretrained` writes."""
    plain = type(module)
    if plain not in _extended:
        meta = type(plain)
        combined = Factory if meta is type else type("Factory", (Factory, meta), {})
        names = {"_fullshard_plain": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
        for method, needed in (("save_pretrained", "save_pretrained"), ("generate", "prepare_inputs_for_generation")):
            if not hasattr(plain, needed):
                names[method] = inspect.getattr_static(plain, method, None) or _absent(method)
        _extended[plain] = combined(plain.__name__, (base, plain), names)
    return _extended[plain]


_extended: dict[type, type] = {}


def _absent(name: str) -> property:
    """What a class without a method of `FSDPv2` has in its place."""

    def missing(self: Any) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return property(missing)
