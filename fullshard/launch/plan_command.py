"""`fullshard plan`: what a run needs and costs on a machine, without starting it.

Takes the settings of `fullshard sft` and of `fullshard launch`. No process is started, no GPU is needed and no weights
are read; the data need not be there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.config.configfile import SUFFIXES, read_file
from fullshard.config.errors import ConfigError
from fullshard.config.options import Option, option, options_of, parse_flags
from fullshard.distributed import engines
from fullshard.distributed.terminal_text import print_text
from fullshard.launch.config import ProcessSettings, launch_options
from fullshard.launch.help_text import HELP, show_help
from fullshard.launch.resolve import resolve
from fullshard.launch.sft_command import refuse_unknown, separate, split
from fullshard.planner.machines import MACHINES, Machine, MachineOptions, find_machine, names_one, stand_in
from fullshard.planner.request import PlanRequest
from fullshard.sft.checked_run import sharding_settings, starting_point
from fullshard.sft.cli_args import command_options, parse


@dataclass(frozen=True)
class PlanOptions(MachineOptions):
    """The machine to plan for, and what to print."""

    search: bool = False
    """Rank the settings that fit this machine by estimated speed, each with the YAML that runs it."""
    longest: bool = False
    """Find the longest rows that fit this machine with these settings, what limits them, and how long they can be with
    changes that cost time alone."""
    allow: tuple[str, ...] = option((), kind=tuple, metavar="lora,qlora,fp8,…")
    """What the search may change beside strategy, offload, checkpointing and micro-batch."""
    routing_imbalance: float = 1.0
    """For mixtures of experts: how many times the mean of tokens the busiest expert gets; 1 is balanced routing."""
    json: bool = False
    """Print one JSON object; docs/planning.md describes it."""

    def __post_init__(self) -> None:
        if self.search and self.longest:
            raise ConfigError("search and longest are two questions; ask one at a time.")
        if not 1 <= self.routing_imbalance < math.inf:
            raise ConfigError(
                f"routing_imbalance is {self.routing_imbalance:g}; expected 1 (balanced) or more: how many times the "
                f"mean of tokens the busiest expert gets."
            )


def plan_options() -> tuple[Option, ...]:
    """The flags that `fullshard plan` alone has, or reads for the machine."""
    return options_of(PlanOptions)


EXIT_CODES = {True: 0, False: 1, None: 3}
"""By whether a run fits; None is unknown. 2 is for wrong settings."""


def plan(words: Sequence[str]) -> int:
    """Run `fullshard plan` with these arguments; returns the exit code."""
    if not words or any(word in HELP for word in words):
        show_plan_help()
        return 0
    engines.require("plans", "fullshard plan")
    request, options = read_request(words)
    return (search if options.search else longest if options.longest else show)(request, options)


def show(request: PlanRequest, options: PlanOptions) -> int:
    """Print what the run needs and costs."""
    from fullshard.planner.changes import estimate_with_advice
    from fullshard.planner.tables import print_estimate

    estimate = estimate_with_advice(with_data(request))
    if options.json:
        print_text(json.dumps(estimate.to_json(), default=str))
    else:
        print_estimate(estimate)
    return EXIT_CODES[estimate.verdict.fits]


def search(request: PlanRequest, options: PlanOptions) -> int:
    """Print the settings that fit the machine, the fastest first."""
    from fullshard.distributed.console import Terminal
    from fullshard.planner.estimate import Estimator
    from fullshard.planner.search import check_allowed, search_settings
    from fullshard.planner.tables import print_search

    allowed = check_allowed(options.allow)
    with Terminal(stderr=True).status("searching") as status:
        result = search_settings(with_data(request), Estimator(), allowed, lambda what: status.update(f"trying {what}"))
    if options.json:
        print_text(json.dumps(result.to_json(), default=str))
    else:
        print_search(result)
    return EXIT_CODES[result.fits]


def longest(request: PlanRequest, options: PlanOptions) -> int:
    """Print the longest rows that fit the machine."""
    from fullshard.distributed.console import Terminal
    from fullshard.planner.estimate import Estimator
    from fullshard.planner.longest import find_longest
    from fullshard.planner.tables import print_longest

    with Terminal(stderr=True).status("searching") as status:
        result = find_longest(request, Estimator(), lambda what: status.update(f"trying {what}"))
    if options.json:
        print_text(json.dumps(result.to_json(), default=str))
    else:
        print_longest(result)
    return EXIT_CODES[result.fits]


def with_data(request: PlanRequest) -> PlanRequest:
    """The request with the lengths of the rows of its data, if they are known here."""
    from fullshard.planner.batch import lengths_of_data

    lengths, note = lengths_of_data(request.config, request.model, request.adapter)
    return dataclasses.replace(request, lengths=lengths, data=note)


def read_request(words: Sequence[str]) -> tuple[PlanRequest, PlanOptions]:
    """What is to be planned, from the words of the command line: checked, without importing torch."""
    refuse_unknown(words, (*plan_options(), *command_options(), *launch_options()), "plan")
    launchers_own = {"num_processes"}  # also a key of the launcher's file
    own = {name: one for one in plan_options() if one.name not in launchers_own for name in (one.key, *one.flags)}
    rest, mine = separate(words, own)
    options = PlanOptions(**parse_flags(mine, plan_options(), "plan").values)
    if options.allow and not options.search:
        raise ConfigError("allow is what the search may change; it needs search.")
    sft_words, launchers = split(_with_model_flag(rest))
    arguments = parse(sft_words, command="plan")
    config, notes = arguments.config, list(arguments.notes)
    launch = resolve(launchers, starts=False)
    notes += launch.notes
    model, adapter = starting_point(config.model_name_or_path, config.adapter_name_or_path)
    if model is None and adapter is None:
        raise ConfigError("plan: there is no model; expected fullshard plan MODEL, or model_name_or_path in RUN.YAML.")
    config.adapter_name_or_path = adapter  # it may have been given as the model
    engine = sharding_settings(config, launch.engine, notes)
    machine = _machine(options, launch.processes, engine.use_cpu)
    if not engine.use_cpu and (assumed := stand_in(options)) is not None:
        notes.append(f"there is no GPU here: speeds, links and host memory are those of {assumed.name} (machine)")
    engine = dataclasses.replace(engine, use_cpu=machine.shares_host_memory)
    engine.mesh_shape(machine.num_processes, machine.nodes)
    imbalance = options.routing_imbalance
    return PlanRequest(
        config, engine, model, adapter, machine, routing_imbalance=imbalance, notes=tuple(notes)
    ), options


def _with_model_flag(words: Sequence[str]) -> list[str]:
    """The words of `fullshard sft` for those of `fullshard plan`: what comes first may be a model, not only a file of
    settings."""
    if not words or words[0].startswith("-"):
        return list(words)
    first, *rest = words
    if Path(first).suffix in SUFFIXES and not _is_model_config(first):
        return [first, *rest]
    return ["--model_name_or_path", first, *rest]


def _is_model_config(name: str) -> bool:
    """Whether a file is the configuration of a model rather than that of a run."""
    return Path(name).suffix == ".json" and "model_type" in read_file(name).values


def _machine(options: PlanOptions, processes: ProcessSettings, use_cpu: bool) -> Machine:
    """The machine of the options, with as many devices and nodes as the launcher's settings name."""
    machines, per_node, total = processes.num_machines, options.gpus_per_node, processes.num_processes
    if machines > 1:
        if total is None and per_node is not None:
            total = per_node * machines
        if total is None:
            raise ConfigError(
                f"num_machines is {machines}, but not how many devices they have; give num_processes or gpus_per_node."
            )
        if per_node not in (None, total // machines):
            raise ConfigError(
                f"num_processes {total} on num_machines {machines} are {total // machines} devices in a node, but "
                f"gpus_per_node is {per_node}; leave one of them out."
            )
        per_node = total // machines
    if not names_one(options) and (use_cpu or os.environ.get("FULLSHARD_DEVICE") == "cpu"):
        options = dataclasses.replace(options, machine="cpu")
    machine = find_machine(dataclasses.replace(options, num_processes=total, gpus_per_node=per_node))
    if use_cpu and not machine.shares_host_memory:
        raise ConfigError(f"use_cpu is on, but --machine {options.machine} has GPUs; leave one of them out.")
    return machine


def show_plan_help() -> None:
    """The flags of `fullshard plan`."""
    show_help(
        "fullshard plan MODEL_OR_RUN.YAML [flags] [flags of fullshard sft] [flags of fullshard launch]",
        "Shows what a training run needs and costs before it runs: memory of each device by part and by moment, host "
        "memory, traffic, floating-point operations and time of a step; whether it fits, and if not, the smallest "
        "change that would make it fit. Nothing is started, only the model's configuration is downloaded, and no GPU, "
        "weights or data are needed.\n\n"
        "MODEL is a folder, a name on the hub, or a config.json. RUN.YAML is the file of fullshard sft. All flags of "
        "fullshard sft and fullshard launch are accepted and mean the same, for example:\n\n"
        "fullshard plan meta-llama/Llama-3.1-8B --use_peft_lora --bf16 --machine h100-80gb --num_processes 8\n\n"
        f"Machines: {', '.join(MACHINES)}.\n\n"
        "The exit code is 0 if the run fits, 1 if it does not, 2 for wrong settings, and 3 if it is unknown whether "
        "the run fits, because the model cannot be traced.",
        {"Flags": plan_options()},
    )
