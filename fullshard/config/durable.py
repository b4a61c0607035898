"""Durable writes: wait until files and directory entries are on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """fsync a file, or a directory (its entries)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """fsync everything in a directory, and the directory: before it is renamed to the name that readers know."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
