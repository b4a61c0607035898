"""fullshard trains and fine-tunes transformer models fully sharded, from code written as if for one device.

Importing this package is cheap: torch is imported when a part that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from fullshard.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "runtime", "spmd", "use_spmd", "xm"]

_ROOMS = ("runtime", "spmd", "xm")
_HOMES = {"use_spmd": "runtime"}
"""Names that `fullshard` itself offers, and the room each comes from."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"fullshard.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"fullshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fullshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
