"""`fullshard launch`, `config` and `test`: from the words of the command line to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fullshard.config.configfile import SUFFIXES, nest, read_file, sort_keys, write_file
from fullshard.config.errors import ConfigError
from fullshard.config.options import convert, parse_flags
from fullshard.config.redaction import hide
from fullshard.distributed.console import Terminal
from fullshard.distributed.terminal_text import print_text
from fullshard.launch.config import accelerate_file, file_options, find_file, launch_options, own_file
from fullshard.launch.help_text import HELP, show_launch_help, show_test_help
from fullshard.launch.machine import count_gpus, detect_machine, gpu_type
from fullshard.launch.questionnaire import CPU_PROCESSES, OPTIONS, Asker, ask_all
from fullshard.launch.resolve import LaunchSettings, check_values, resolve, settle


def launch(words: Sequence[str]) -> int:
    """`fullshard launch WORDS`."""
    ours = [word for word in words if word not in HELP]
    if len(ours) < len(words) and not parse_flags(ours, launch_options(), "launch").rest:
        show_launch_help()  # after a script, --help belongs to the script
        return 0
    return start(settle_here(resolve(words)))


def start(settings: LaunchSettings) -> int:
    """Show the settings, start the processes and wait for them; returns the exit code."""
    prints = settings.slurm is None or settings.slurm.task == 0
    if prints and not settings.run.quiet:
        show_settings(settings)
    if settings.run.dry_run:
        return 0
    from fullshard.launch import agent

    return agent.launch(settings, say)


def say(line: str) -> None:
    """Print one line for the user. It goes to stderr, so that stdout has only the script's output."""
    print_text(f"fullshard: {line}", sys.stderr, over_bar=True)


def show_settings(settings: LaunchSettings) -> None:
    """Print a compact table: the file in use, the effective settings, notes, and options without effect."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in settings.describe().items():
        table.add_row(name, hide(value))
    for note in settings.notes:
        table.add_row("note", hide(note))
    for key, reason in settings.without_effect().items():
        table.add_row("without effect", f"{key}: {reason}")
    Terminal(file=sys.stderr, soft_wrap=True).print(table)


def settle_here(settings: LaunchSettings) -> LaunchSettings:
    """The settings for this machine; its GPUs are counted only if they matter."""
    gpus = 0 if settings.engine.use_cpu else count_gpus()
    return settle(settings, gpus, gpu_type() if gpus else "cpu")


ALWAYS = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no",
    "num_machines": 1, "rdzv_backend": "static", "same_network": True, "tpu_env": (),
    "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
"""Keys that every file gets: Accelerate's reader expects them."""


def config(action: str, file: str | None, force: bool, mixed_precision: str | None) -> None:
    """`fullshard config`: ask, write defaults, or rewrite a file with current key names."""
    target = Path(file).expanduser() if file is not None else own_file()
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--config_file {target}: expected a name that ends in {', '.join(SUFFIXES)}")
    out = Terminal(soft_wrap=True)
    if action == "update":
        source, _ = find_file(file)
        if source is None:
            raise ConfigError(f"there is no file to update: neither {own_file()} nor Accelerate's {accelerate_file()}")
        notes: list[str] = []
        values = sort_keys(read_file(source), file_options(), notes).values
        for note in notes:
            out.print(note)
    else:
        if target.exists() and not force:
            if action == "default":
                raise ConfigError(f"{target} exists; --force replaces it, --update rewrites it with current key names")
            if not Asker(out).yes(f"{target} exists. Replace it?", False):
                raise ConfigError(f"{target} was not changed; use --config_file to write another file")
        values = ask_all(out, detect_machine()) if action == "ask" else default_values()
    if mixed_precision is not None:
        values["mixed_precision"] = convert(OPTIONS["mixed_precision"], mixed_precision, "--mixed_precision")
    check_values(values)
    write_file(target, nest({**ALWAYS, **values}, file_options()))
    out.print(f"written to {target}; fullshard launch{'' if file is None else f' --config_file {target}'} uses it")


def default_values() -> dict[str, Any]:
    """Settings for this machine alone: the model is sharded over its GPUs, or over CPU processes."""
    gpus = count_gpus()
    return {
        "num_processes": gpus or CPU_PROCESSES, "use_cpu": gpus == 0, "version": 2, "reshard_after_forward": True,
        "offload_params": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": True, "activation_checkpointing": False,
    }  # fmt: skip


def test(words: Sequence[str]) -> int:
    """`fullshard test`: the flags of launch, without a script."""
    if any(word in HELP for word in words):
        show_test_help()
        return 0
    if rest := parse_flags(words, launch_options(), "test").rest:
        raise ConfigError(f"fullshard test runs its own model and takes flags only; got {rest[0]!r}")
    return launch([*words, "-m", "fullshard.launch.selftest"])
