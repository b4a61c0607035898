"""Model files: loading safetensors into shards, and writing shards back as files that transformers and PEFT read.

The names below are imported when they are first used; `docs/weights.md` is the guide.
"""

from __future__ import annotations

from fullshard.config.lazy_names import lazy_names

_HOMES = {
    "load_pretrained": "load",
    "save_pretrained": "export",
    **dict.fromkeys(("base_of", "fingerprint_of"), "source_files"),
}
"""Each public name and the module that defines it. (`fill` and `merge_adapter` are also the names of their modules.)"""

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
