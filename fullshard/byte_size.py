"""Numbers of bytes as text: memory in powers of 1024 (GiB), files in powers of 1000 (GB), as the tools around us do."""

from __future__ import annotations


def memory_size(count: float) -> str:
    """Bytes of memory, such as `512 B`, `1.5 MiB` or `22.31 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def file_size(count: float) -> str:
    """Bytes in files, or read from them, such as `512 B`, `1.5 MB` or `22.31 GB`."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while count >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:.{(0, 1, 1, 2, 2)[power]}f} {units[power]}"
