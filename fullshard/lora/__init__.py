"""LoRA and other adapters around PEFT: which layers get them, what trains, and what their folders contain.

The names below are imported when they are first used; `docs/qlora.md` is the guide.
"""

from __future__ import annotations

from fullshard.config.lazy_names import lazy_names

_HOMES = {
    **dict.fromkeys(("find_targets", "target_modules"), "targets"),
    **dict.fromkeys(("check_trains", "get_peft_model_on_meta"), "peft_model"),
    **dict.fromkeys(("bytes_by_kind", "count_parameters", "dense_line", "summary"), "model_size"),
}
"""Each public name and the module that defines it."""

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
