"""Model files: loading safetensors into shards, and writing shards back as files that transformers and PEFT read.

The names below are imported when they are first used; `docs/weights.md` is the guide.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "load_pretrained": "load",
    "save_pretrained": "export",
    **dict.fromkeys(("base_of", "fingerprint_of"), "source_files"),
}
"""Each public name and the module that defines it. (`fill` and `merge_adapter` are also the names of their modules.)"""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
