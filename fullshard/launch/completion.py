"""Shell completion of the flags that commands read from configuration classes, and of the values that a flag takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fullshard.config.options import Option, options_of
from fullshard.launch.config import launch_options
from fullshard.launch.help_text import help_of
from fullshard.launch.plan_command import plan_options
from fullshard.launch.show_command import ShowOptions
from fullshard.sft.cli_args import command_options

OPTIONS: dict[str, Callable[[], tuple[Option, ...]]] = {
    "launch": launch_options,
    "test": launch_options,
    "sft": lambda: (*command_options(), *launch_options()),
    "plan": lambda: (*plan_options(), *command_options(), *launch_options()),
    "show": lambda: (*options_of(ShowOptions), *plan_options(), *command_options(), *launch_options()),
}
"""The options of each command that parses its own flags."""


def complete(command: str, words: Sequence[str], incomplete: str) -> Iterator[tuple[str, str]]:
    """What may stand where a command line ends in `incomplete`, with a help text; nothing where that is a file."""
    by_key = {one.key: one for one in reversed(OPTIONS[command]()) if not one.refused}
    before = by_key.get(words[-1].lstrip("-").replace("-", "_")) if words and words[-1].startswith("-") else None
    if before is not None and before.choices:
        yield from ((value, "") for value in before.choices if value.startswith(incomplete))
    elif incomplete.startswith("-"):
        hyphens = "-" in incomplete.lstrip("-")
        flags = {f"--{key.replace('_', '-') if hyphens else key}": one for key, one in sorted(by_key.items())}
        yield from ((flag, help_of(one)) for flag, one in flags.items() if flag.startswith(incomplete))
