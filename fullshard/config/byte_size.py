"""Numbers of bytes as text: memory in powers of 1024 (GiB), files in powers of 1000 (GB), as the tools around us do;
and text as a number of bytes."""

from __future__ import annotations

import re

UNITS = {"b": 1} | {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}


def memory_size(count: float) -> str:
    """Bytes of memory, such as `512 B`, `1.5 MiB` or `22.31 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def file_size(count: float) -> str:
    """Bytes in files, or read from them, such as `512 B`, `1.5 MB` or `22.31 GB`."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def parse_size(text: str) -> int:
    """The bytes of a size with its unit, such as `40GiB`, `512 MB` or `1.5TiB`; `ValueError` if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    if match is None or match[2].lower() not in UNITS or not float(match[1]):
        raise ValueError(f"{text!r} is no size with its unit")
    return round(float(match[1]) * UNITS[match[2].lower()])


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while count >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:.{(0, 1, 1, 2, 2)[power]}f} {units[power]}"
