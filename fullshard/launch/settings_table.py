"""What the launcher prints: the settings in use, and the help of its flags. Both come from the typed configuration."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fullshard.launch.config import ProcessSettings, RunSettings
from fullshard.launch.questionnaire import Machine
from fullshard.launch.resolve import LaunchSettings
from fullshard.log_filter import own_line
from fullshard.options import Option, options_of
from fullshard.parallelize.ignored_options import IGNORED_OPTIONS
from fullshard.parallelize.settings import EngineSettings

HELP_WIDTH = 100
"""The widest help: longer lines are hard to read."""
GROUPS = (
    ("The run", RunSettings, "Flags only; they have no place in the file."),
    ("Processes", ProcessSettings, "Keys at the top level of the file."),
    ("The engine", EngineSettings, "Keys of the file, most of them in its section `fsdp_config`."),
)
IGNORED = "Accepted and ignored (options of other launchers)"


def console() -> Console:
    """Where the launcher speaks: stderr, so that the script's own output stays apart."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """One line for the user."""
    print(f"{own_line(sys.stderr)}fullshard: {line}", file=sys.stderr, flush=True)


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


HELP = ("--help", "-h")
NEEDS_SCRIPT = ("module", "no_python")


def show_launch_help() -> None:
    """The flags of `fullshard launch`."""
    show_help(
        "fullshard launch [flags] script.py [arguments of the script]",
        "Starts the script on every rank, with the settings of a configuration file that is also Accelerate's. Flags "
        "beat the file; hyphens and underscores are the same. A flag of a true-or-false option may stand alone.",
        {**{title: options_of(config) for title, config, _ in GROUPS}, IGNORED: IGNORED_OPTIONS},
    )


def show_test_help() -> None:
    """The flags of `fullshard test`."""
    show_help(
        "fullshard test [flags]",
        "Trains a tiny model for three steps on the processes and with the settings that a run would have, and reports "
        "line by line what works: the ranks meet, collectives add up, the losses are those of one device, a checkpoint "
        "comes back bit for bit. Nothing is written that stays. The exit code is 0 if everything works.\n\n"
        "Settings come from the configuration file of fullshard launch; flags beat it.",
        {
            **{title: [o for o in options_of(config) if o.name not in NEEDS_SCRIPT] for title, config, _ in GROUPS},
            IGNORED: IGNORED_OPTIONS,
        },
    )


def show_help(usage: str, about: str, groups: Mapping[str, Sequence[Option]]) -> None:
    """A command's help: how it is called, what it does, and its options by groups, in the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, HELP_WIDTH)
    print(textwrap.fill(f"Usage: {usage}", width, subsequent_indent=" " * 7))
    for paragraph in about.split("\n\n"):
        print("\n" + textwrap.fill(paragraph, width))
    for title, options in groups.items():
        print(f"\n{title}:")
        for one in options:
            print(_option_text(flag_of(one), help_of(one), width))


def _option_text(flag: str, text: str, width: int) -> str:
    """A flag with its help beside it, or below it where the flag is long. Nothing is cut off."""
    beside = " " * min(32, width // 2)
    flag = textwrap.fill(flag, width, initial_indent="  ", subsequent_indent=" " * 4, break_on_hyphens=False)
    text = textwrap.fill(text, width, initial_indent=beside, subsequent_indent=beside, break_on_hyphens=False)
    if len(flag) + 2 > len(beside):
        return f"{flag}\n{text}"
    return flag.ljust(len(beside)) + text[len(beside) :]


def flag_of(one: Option) -> str:
    """`--flag VALUE`, with its other names."""
    names = ", ".join(("-" if len(name) == 1 else "--") + name for name in (one.key, *one.flags))
    if one.kind is bool:
        return names
    return f"{names} {one.given_as or {int: 'N', float: 'X', str: 'TEXT', tuple: 'A,B', dict: '{…}'}.get(one.kind, '')}"


def help_of(one: Option) -> str:
    """The help text, the values and the default; for an ignored option, the reason."""
    if one.no_op:
        return f"Ignored: {one.no_op}."
    parts = [one.help]
    if one.choices:
        parts.append(f"One of {one.values}.")
    if one.default not in (None, False, ""):
        parts.append(f"Default: {default_of(one).replace(',', ', ')}.")
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
    from fullshard.rank_env import gpu_count

    return gpu_count()


def look_around() -> Machine:
    """What this machine has."""
    slurm = shutil.which("srun") is not None
    if not count_gpus():
        return Machine(slurm=slurm)
    from fullshard import accelerator

    return Machine(tuple(accelerator.names()), accelerator.computes_bf16(), slurm)
