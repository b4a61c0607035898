"""The versions of fullshard and of the libraries that a result depends on, as runs and checkpoints record them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from fullshard import __version__

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers")


def library_versions() -> dict[str, str]:
    """Name and version of fullshard, Python and each library that is installed."""
    found = {"fullshard": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
