"""Limits of the numbers in a model's config.json, which may come from anywhere.

transformers makes one object for each layer, label or position that the file asks for, so a large number keeps it busy
for ever. The limits are far above those of real models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard.config.errors import WeightsError

LIMITS = (
    (re.compile(r"(layers?|depths?|blocks?|stages?)$"), 2_000),
    (re.compile(r"^(num|n)_|positions?(_embeddings)?$|_num$"), 2**24),
    (re.compile(r""), 2**31 - 1),
)
"""The largest number for a name; the first pattern that matches counts."""
LARGEST_FILE = 2**26
"""Bytes of a config.json."""


def check_config(place: str | Path, changes: Mapping[str, Any] | None = None) -> None:
    """Refuse numbers in a model's config.json, or among the changes made to it, that no model has.

    `place` is the file or its folder. What else is wrong with it is reported by whoever reads it.
    """
    file = Path(place).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise WeightsError(f"{file} has {file.stat().st_size:,} bytes; at most {LARGEST_FILE:,} are supported")
        values = json.loads(file.read_bytes())
    except RecursionError:
        raise WeightsError(f"{file} is nested too deeply to be read") from None
    except (OSError, ValueError):
        return
    if isinstance(values, dict):
        check_limits({**values, **(changes or {})}, file)


def check_limits(config: Mapping[str, Any], place: str | Path) -> None:
    """Refuse numbers that no model has in the contents of a config.json."""
    for name, value in _numbers(config):
        limit = next(limit for pattern, limit in LIMITS if pattern.search(name))
        if abs(value) > limit:
            raise WeightsError(
                f"{place} has {name} = {_short(value)}; at most {limit:,} is supported: the file is damaged, or not "
                f"that of a model"
            )


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """All whole numbers, each with the name of the setting it is in."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value


def _short(value: int) -> str:
    return f"{value:,}" if abs(value) < 2**70 else f"a number of {value.bit_length()} bits"
