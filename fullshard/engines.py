"""Which engine this installation offers: fullshard's own on torch ("torch"), or the compiler of PyTorch/XLA ("xla").

torch_xla is tied to one version of torch, and the torch engine needs a newer one, so torch's version decides. Nothing
is imported to find out. `lazy_names.py` and the packages' own tables of names resolve each public name once, to the
module of the engine; no other part of the package chooses.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from fullshard.errors import RuntimeSetupError

ENGINE_VARIABLE = "FULLSHARD_ENGINE"
TORCH_NEEDED = (2, 11)
"""The first torch that the torch engine runs on."""
TORCH_XLA_NEEDED = (2, 9)
"""The first torch_xla, and with it torch, that the XLA engine runs on."""


@functools.cache
def engine() -> str:
    """The engine of this process: "torch" or "xla". Raises where neither can be offered."""
    return choose(os.environ, _version("torch"), _version("torch_xla"))


def offers(name: str) -> bool:
    """Whether this is the engine of this process. Never raises: where there is none, the first use does."""
    try:
        return engine() == name
    except RuntimeSetupError:
        return False


def is_xla() -> bool:
    """Whether the engine is XLA."""
    return offers("xla")


def require_torch_engine(what: str) -> None:
    """Raise where `what`, a part of the torch engine, is used without that engine."""
    if engine() != "torch":
        raise RuntimeSetupError(
            f"{what} is not available on the XLA engine, which this process uses (torch {_version('torch')}, torch_xla "
            f"{_version('torch_xla')}). It needs the torch engine: install torch {_dotted(TORCH_NEEDED)} or newer."
        )


def use_xla_names(names: dict[str, Any], home: str) -> None:
    """On the XLA engine, replace functions of a module (its `globals()`) by those of `fullshard.xla.<home>` that its
    `REPLACES` names."""
    if is_xla():
        module = importlib.import_module(f"fullshard.xla.{home}")
        names.update({name: getattr(module, name) for name in module.REPLACES})


def xla_name(name: str, homes: Mapping[str, Sequence[str]]) -> Any:
    """On the XLA engine, the object called `name`; None on the other, and for unknown names. `homes` lists names by the
    module of `fullshard.xla` that defines them."""
    home = next((home for home, names in homes.items() if name in names), None)
    if home is None or not is_xla():
        return None
    return getattr(importlib.import_module(f"fullshard.xla.{home}"), name)


def choose(env: Mapping[str, str], torch: str | None, torch_xla: str | None) -> str:
    """The engine for the given versions of torch and torch_xla; None for one that is not installed."""
    offered = []
    if torch is not None and _numbers(torch) >= TORCH_NEEDED:
        offered.append("torch")
    if torch is not None and torch_xla is not None and _numbers(torch) == _numbers(torch_xla) >= TORCH_XLA_NEEDED:
        offered.append("xla")
    asked = env.get(ENGINE_VARIABLE, "")
    if asked not in ("", "torch", "xla"):
        raise RuntimeSetupError(f"{ENGINE_VARIABLE}={asked}: expected torch or xla.")
    found = (
        f"torch {torch or 'is not installed'}, torch_xla {torch_xla or 'is not installed'}. The torch engine needs "
        f"torch {_dotted(TORCH_NEEDED)} or newer; the xla engine needs torch {_dotted(TORCH_XLA_NEEDED)} or newer and "
        f"the torch_xla of the same version."
    )
    if asked and asked not in offered:
        raise RuntimeSetupError(f"{ENGINE_VARIABLE}={asked}: this engine cannot run here: {found}")
    if not offered:
        raise RuntimeSetupError(f"No engine can run in this installation: {found}")
    return asked or offered[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
