"""Data: reading files, chat templates, tokenization, packing, and the batches of each training step.

`source_of` is the public function of this package; torch is imported only by the modules that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.data.find_dataset import source_of

__all__ = ["source_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fullshard.data import find_dataset

    return getattr(find_dataset, name)
