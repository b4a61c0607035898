"""The version of this package, and of the libraries that a result depends on."""

from __future__ import annotations

__version__ = "0.2.0"
TORCH_NEEDED = (2, 11)
"""The first torch that the torch engine runs on."""

LIBRARIES = ("torch", "torch_xla", "transformers", "peft", "safetensors", "tokenizers")


def library_versions() -> dict[str, str]:
    """Name and version of fullshard, Python and each library that is installed, as runs and checkpoints record them."""
    import platform
    import sys
    from importlib.metadata import PackageNotFoundError, version

    versions = {"fullshard": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            # An imported module also names its build: 2.11.0+cu130.
            versions[name] = str(getattr(sys.modules.get(name), "__version__", None) or version(name))
        except PackageNotFoundError:
            continue
    return versions


def version_numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))
