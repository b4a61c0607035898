"""What can be said of a path that a user named: whether it means a place here, and what a folder holds."""

from __future__ import annotations

from pathlib import Path


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: on the hub names have at most one slash."""
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def held(folder: Path) -> str:
    """The first few things in a folder, for messages."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
