"""`fullshard sft`: the training job with its ranks. Flags of the run and flags of the launcher may be mixed.

Settings, paths, data and the output folder are parsed and checked here, once, before torch is imported or a process
exists; the ranks receive the checked run. Under another launcher, or with one process, the job runs in this process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from fullshard.config.errors import ConfigError
from fullshard.config.options import FALSE, TRUE, Option, nearest_option
from fullshard.launch import command
from fullshard.launch.config import find_file, launch_options
from fullshard.launch.help_text import HELP, show_help
from fullshard.launch.machine import count_gpus
from fullshard.launch.resolve import resolve
from fullshard.sft.cli_args import command_options

MODULE = "fullshard.sft"


def sft(words: Sequence[str]) -> int:
    """Run `fullshard sft` with these arguments; returns the exit code."""
    if any(word in HELP for word in words):
        show_sft_help()
        return 0
    from fullshard.sft.checked_run import RUN_VARIABLE, check_command
    from fullshard.sft.cli_args import parse

    refuse_unknown(words, (*command_options(), *launch_options()), "sft")
    mine, launchers = split(words)
    arguments = parse(mine)
    if arguments.config.preview:
        from fullshard.launch.preview import preview_run

        preview_run(check_command(arguments))
        return 0
    is_rank = bool(os.environ.get("RANK"))
    ranks = [*launchers, "-m", MODULE, *mine]
    launch = resolve(ranks) if not is_rank and (launchers or find_file(None)[0] is not None) else None
    # A rank of another launcher leaves the output folder to the first rank, once all have met.
    run = check_command(arguments, launch.engine if launch is not None else None, check_folder=not is_rank)
    if launch is None and not is_rank and count_gpus() > 1:  # counted last: that may import torch
        launch = resolve(ranks)
    if launch is not None:
        return command.start(dataclasses.replace(command.settle_here(launch), variables={RUN_VARIABLE: run.to_json()}))
    from fullshard.sft.trainer import train_run

    train_run(run)
    return 0


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the run and those of the launcher. A flag that both have is the run's."""
    runs = {name for o in command_options() for name in (o.key, *o.flags)}
    theirs = {name: one for one in launch_options() for name in (one.key, *one.flags) if name not in runs}
    for name in ("module", "m", "no_python"):
        theirs.pop(name)
    return separate(words, theirs)


def refuse_unknown(words: Sequence[str], options: Iterable[Option], command: str) -> None:
    """Refuse flags that are none of these options, with the name that comes nearest."""
    options = tuple(options)
    names = {name for one in options for name in (one.key, *one.flags)}
    for word in words:
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if flag.startswith("--") and name and not {name, name.removeprefix("no_")} & names:
            hint = nearest_option(name, options, names) or "."
            raise ConfigError(f"{command}: unknown flag {flag}{hint} See fullshard {command} --help.")


def separate(words: Sequence[str], flags: Mapping[str, Option]) -> tuple[list[str], list[str]]:
    """The words without these flags and their values, and the flags with their values."""
    others: list[str] = []
    run_words: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        option = flags.get(name) or flags.get(name.removeprefix("no_"))
        if not word.startswith("-") or option is None:
            others.append(word)
            continue
        run_words.append(word)
        takes_value = "=" not in word and name in flags
        alone = option.kind is bool and not (left and left[0].lower() in (*TRUE, *FALSE))
        if takes_value and not alone and left:
            run_words.append(left.pop(0))
    return others, run_words


def show_sft_help() -> None:
    """The flags of `fullshard sft`."""
    show_help(
        "fullshard sft [run.yaml] [flags] [flags of fullshard launch]",
        "Fine-tunes a language model, fully sharded. Settings come from the file and from flags, which override it; "
        "hyphens and underscores are the same. --num_processes, --config_file and the other flags of fullshard launch "
        "set the processes to run on.",
        {
            "Flags": [one for one in command_options() if not (one.no_op or one.refused)],
            "Accepted, without effect": [one for one in command_options() if one.no_op],
        },
    )
