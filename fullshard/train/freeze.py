"""Which parameters do not train, by patterns of their names."""

from __future__ import annotations

import fnmatch

from torch import nn

from fullshard.errors import ConfigError
from fullshard.options import as_list, nearest
from fullshard.train.adapter import Say


def freeze(model: nn.Module, patterns: str, say: Say) -> None:
    """Freeze what the patterns name. A pattern that names nothing that trains is an error."""
    named = dict(model.named_parameters(remove_duplicate=False))
    trains = {name for name, p in named.items() if p.requires_grad}
    frozen: set[str] = set()
    for pattern in as_list(patterns):
        found = {name for name in named if matches(name, pattern)}
        if not found & trains:
            parts = {".".join(name.split(".")[i:j]) for name in trains for i in range(name.count(".") + 1)
                     for j in range(i + 1, name.count(".") + 2)}  # fmt: skip
            why = "names only what does not train anyway" if found else f"names no parameter{nearest(pattern, parts)}"
            raise ConfigError(f"freeze: {pattern!r} {why}. Parameters that train: {_some(sorted(trains))}.")
        frozen |= found & trains
    for name in frozen:
        named[name].requires_grad_(False)
    count = sum(p.numel() for p in {id(named[name]): named[name] for name in frozen}.values())
    say(f"freeze: {len(frozen)} parameters ({count:,} values) do not train.")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern stands for a parameter's name, or for whole parts of it between dots."""
    return any(fnmatch.fnmatchcase(name, p) for p in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
