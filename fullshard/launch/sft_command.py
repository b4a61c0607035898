"""`fullshard sft`: the training job with its ranks. Flags of the run and flags of the launcher may stand side by side.

What is wrong with the settings, paths or the output folder is said here, before torch is imported or a process exists.
Under a launcher, or where one process is all there is, the job runs in this process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from fullshard.launch import command
from fullshard.launch.config import find_file, launch_options
from fullshard.launch.help_text import HELP, show_help
from fullshard.launch.machine import count_gpus
from fullshard.options import FALSE, TRUE, Option, options_of
from fullshard.train.config import SFTConfig
from fullshard.train.run_dir import check_folder

MODULE = "fullshard.train"


def sft(words: Sequence[str]) -> int:
    """`fullshard sft WORDS`; the exit code."""
    if any(word in HELP for word in words):
        show_sft_help()
        return 0
    from fullshard.train.cli_args import check_paths, inputs_of, parse

    mine, launchers = split(words)
    arguments = parse(mine)
    data = check_paths(arguments.config)
    if arguments.config.preview:
        from fullshard.train import preview

        preview.run(arguments.config, arguments.notes)
        return 0
    if int(os.environ.get("RANK") or 0) == 0:
        check_folder(arguments.config, inputs_of(arguments.config, data))
    launched = bool(os.environ.get("RANK"))
    if not launched and (launchers or find_file(None)[0] is not None or count_gpus() > 1):
        return command.launch([*launchers, "-m", MODULE, *mine])
    from fullshard.train.trainer import run

    run(arguments.config, arguments.notes)
    return 0


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The run's words and the launcher's. A flag that both know is the run's."""
    runs = {name for o in options_of(SFTConfig) for name in (o.key, *o.flags)}
    launchers: dict[str, Option] = {}
    for one in launch_options():
        launchers |= {name: one for name in (one.key, *one.flags) if name not in runs}
    mine: list[str] = []
    theirs: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        found = launchers.get(name) or launchers.get(name.removeprefix("no_"))
        if not word.startswith("-") or found is None or name in ("module", "m", "no_python"):
            mine.append(word)
            continue
        theirs.append(word)
        takes_value = "=" not in word and name in launchers
        alone = found.kind is bool and not (left and left[0].lower() in (*TRUE, *FALSE))
        if takes_value and not alone and left:
            theirs.append(left.pop(0))
    return mine, theirs


def show_sft_help() -> None:
    """The flags of `fullshard sft`."""
    show_help(
        "fullshard sft [run.yaml] [flags] [flags of fullshard launch]",
        "Fine-tunes a language model, fully sharded. Settings come from the file, flags beat it; hyphens and "
        "underscores are the same. --num_processes, --config_file and the other flags of fullshard launch say on which "
        "processes.",
        {"Flags": options_of(SFTConfig)},
    )
