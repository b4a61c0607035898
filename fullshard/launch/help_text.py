"""The `--help` of `launch`, `test` and `sft`: flags with their texts, from the typed configuration classes."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from fullshard.config.options import Option, options_of
from fullshard.distributed.terminal_text import print_text
from fullshard.launch.config import ProcessSettings, RunSettings
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.settings import EngineSettings

HELP_WIDTH = 100
"""The widest help: longer lines are hard to read."""
GROUPS = (("Run", RunSettings), ("Processes", ProcessSettings), ("Engine", EngineSettings))
IGNORED = "Accepted and ignored (options of other launchers)"
HELP = ("--help", "-h")
NEEDS_SCRIPT = ("module", "no_python")


def show_launch_help() -> None:
    """The flags of `fullshard launch`."""
    show_help(
        "fullshard launch [flags] script.py [arguments of the script]",
        "Starts the script on every rank. Settings come from a configuration file, in Accelerate's format; flags "
        "override the file. Hyphens and underscores are the same. A true-or-false flag needs no value.",
        {**{title: options_of(config) for title, config in GROUPS}, IGNORED: IGNORED_OPTIONS},
    )


def show_test_help() -> None:
    """The flags of `fullshard test`."""
    show_help(
        "fullshard test [flags]",
        "Trains a tiny model for three steps, on the processes and with the settings of a real run, and reports each "
        "check: all ranks start, collectives are correct, the losses equal those of one device, a checkpoint is "
        "restored bit for bit. No files are kept. The exit code is 0 if everything works.\n\n"
        "Settings come from the configuration file of fullshard launch; flags override it.",
        {
            **{title: [o for o in options_of(config) if o.name not in NEEDS_SCRIPT] for title, config in GROUPS},
            IGNORED: IGNORED_OPTIONS,
        },
    )


def show_help(usage: str, about: str, groups: Mapping[str, Sequence[Option]]) -> None:
    """Print a command's help: usage, description, and options by group, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, HELP_WIDTH)
    print_text(textwrap.fill(f"Usage: {usage}", width, subsequent_indent=" " * 7))
    for paragraph in about.split("\n\n"):
        print_text("\n" + textwrap.fill(paragraph, width))
    for title, options in groups.items():
        print_text(f"\n{title}:")
        for one in options:
            print_text(_option_text(flag_of(one), help_of(one), width))


def _option_text(flag: str, text: str, width: int) -> str:
    """A flag with its help beside it, or below it if the flag is long. Nothing is cut off."""
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
    return f"{names} {one.metavar or {int: 'N', float: 'X', str: 'TEXT', tuple: 'A,B', dict: '{…}'}.get(one.kind, '')}"


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
    """The default of an option, for `--help`."""
    if one.default is None:
        return "unset"
    return str(one.default).lower() if isinstance(one.default, bool) else f"{one.default}" or "empty"
