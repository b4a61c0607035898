"""Data: reading files, chat templates, tokenization, packing, and the batches of each training step.

`source_of` is the public function of this package; torch is imported only by the modules that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from fullshard.data.find_dataset import source_of

_HOMES = {"source_of": "find_dataset"}
__all__ = ["source_of"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
