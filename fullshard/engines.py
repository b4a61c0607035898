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
from typing import Any, NamedTuple

from fullshard.errors import RuntimeSetupError

ENGINE_VARIABLE = "FULLSHARD_ENGINE"
TORCH_NEEDED = (2, 11)
"""The first torch that the torch engine runs on."""
TORCH_XLA_NEEDED = (2, 9)
"""The first torch_xla, and with it torch, that the XLA engine runs on."""


class Choice(NamedTuple):
    """The engine, or an empty string and why there is none."""

    engine: str
    problem: str = ""


def engine() -> str:
    """The engine of this process: "torch" or "xla". Raises where neither can be offered."""
    choice = _choice()
    if not choice.engine:
        raise RuntimeSetupError(choice.problem)
    return choice.engine


def is_xla() -> bool:
    """Whether the engine is XLA. Never raises: the torch engine's names report that they cannot be used."""
    return _choice().engine == "xla"


def has_torch_engine() -> bool:
    """Whether the engine is the torch engine. Never raises."""
    return _choice().engine == "torch"


def require_torch_engine(what: str) -> None:
    """Raise where `what`, a part of the torch engine, is used without that engine."""
    choice = _choice()
    if choice.engine == "xla":
        raise RuntimeSetupError(
            f"{what} is not available on the XLA engine, which this process uses (torch {_version('torch')}, torch_xla "
            f"{_version('torch_xla')}). It needs the torch engine: install torch {_dotted(TORCH_NEEDED)} or newer."
        )
    if not choice.engine:
        raise RuntimeSetupError(f"{what}: {choice.problem}")


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


@functools.cache
def _choice() -> Choice:
    return choose(os.environ, _version("torch"), _version("torch_xla"))


def choose(env: Mapping[str, str], torch: str | None, torch_xla: str | None) -> Choice:
    """The engine for the given versions of torch and torch_xla; None for one that is not installed."""
    has_torch = torch is not None and _numbers(torch) >= TORCH_NEEDED
    has_xla = torch is not None and torch_xla is not None and _numbers(torch) == _numbers(torch_xla) >= TORCH_XLA_NEEDED
    found = f"This installation has torch {torch or '(none)'} and torch_xla {torch_xla or '(none)'}."
    needs = {
        "torch": f"The torch engine needs torch {_dotted(TORCH_NEEDED)} or newer.",
        "xla": f"The XLA engine needs torch {_dotted(TORCH_XLA_NEEDED)} with the torch_xla of the same version.",
    }
    asked = env.get(ENGINE_VARIABLE, "")
    if asked and asked not in needs:
        return Choice("", f"{ENGINE_VARIABLE}={asked}: the engines are torch and xla.")
    offered = [name for name, has in (("torch", has_torch), ("xla", has_xla)) if has]
    if asked and asked not in offered:
        return Choice("", f"{ENGINE_VARIABLE}={asked} cannot be offered. {needs[asked]} {found}")
    if not offered:
        return Choice("", f"No engine can run here. {needs['torch']} {needs['xla']} {found}")
    return Choice(asked or offered[0])


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
