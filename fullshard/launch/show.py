"""What the launcher prints: the settings in use, and the help of its flags. Both come from the typed configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fullshard.launch.config import ProcessSettings, RunSettings
from fullshard.launch.resolve import LaunchSettings
from fullshard.options import Option, options_of
from fullshard.train.engine import EngineSettings

GROUPS = (
    ("The run", RunSettings, "Flags only; they have no place in the file."),
    ("Processes", ProcessSettings, "Keys at the top level of the file."),
    ("The engine", EngineSettings, "Keys of the file, most of them in its section `fsdp_config`."),
)


def console() -> Console:
    """Where the launcher speaks: stderr, so that the script's own output stays apart."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """One line for the user."""
    print(f"fullshard: {line}", file=sys.stderr, flush=True)


def show_settings(settings: LaunchSettings) -> None:
    """One compact table: which file is in use, the effective settings, what was interpreted and what has no effect."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in settings.describe().items():
        table.add_row(name, value)
    for note in settings.notes:
        table.add_row("note", note)
    for key, reason in settings.without_effect().items():
        table.add_row("without effect", f"{key}: {reason}")
    console().print(table)


def show_help() -> None:
    """The flags of `fullshard launch`."""
    out = Console(highlight=False)
    out.print("Usage: fullshard launch [flags] script.py [arguments of the script]\n", markup=False)
    out.print(
        "Starts the script on every rank, with the settings of a configuration file that is also Accelerate's. Flags "
        "beat the file; hyphens and underscores are the same. A flag of a true-or-false option may stand alone.\n",
        markup=False,
    )
    for title, config, _ in GROUPS:
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 1, 0))
        for one in options_of(config):
            table.add_row(flag_of(one), help_of(one))
        out.print(table, markup=False)


def flag_of(one: Option) -> str:
    """`--flag VALUE`, with its other names."""
    names = ", ".join(("-" if len(name) == 1 else "--") + name for name in (one.key, *one.flags))
    if one.kind is bool:
        return names
    return f"{names} {one.given_as or {int: 'N', float: 'X', str: 'TEXT', tuple: 'A,B', dict: '{…}'}.get(one.kind, '')}"


def help_of(one: Option) -> str:
    """The help text, the values, the default, and why it is without effect where it is."""
    parts = [one.help]
    if one.choices:
        parts.append(f"One of {one.values}.")
    if one.default not in (None, False, ""):
        parts.append(f"Default: {default_of(one)}.")
    if one.no_op:
        parts.append(f"No effect here: {one.no_op}.")
    return " ".join(parts)


def default_of(one: Option) -> str:
    if one.default is None:
        return "unset"
    return str(one.default).lower() if isinstance(one.default, bool) else f"{one.default}" or "empty"


def count_gpus() -> int:
    """The GPUs of this machine. torch is asked only where there may be one: importing it takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    may_have: Iterable[Path] = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    if sys.platform.startswith("linux") and not any(may_have):
        return 0
    from fullshard.launcher import gpu_count

    return gpu_count()
