"""The questionnaire of `fullshard config`: one question at a time, typed answers, any terminal.

It only collects option values. The options are defined by the typed configuration classes; `command.py` writes the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fullshard.config.errors import ConfigError
from fullshard.config.options import FALSE, TRUE, Option, convert, counting_number, options_of
from fullshard.distributed.console import Terminal
from fullshard.launch.config import ProcessSettings
from fullshard.launch.machine import Machine
from fullshard.parallel.settings import STRATEGIES, EngineSettings

T = TypeVar("T")
CPU_PROCESSES = 2
"""Default number of processes on CPUs."""
OPTIONS: dict[str, Option] = {one.name: one for one in (*options_of(ProcessSettings), *options_of(EngineSettings))}


class Asker:
    """Asks at the terminal until an answer is valid. An empty answer selects the default."""

    def __init__(self, out: Terminal):
        self.out = out

    def ask(self, question: str, read: Callable[[str], T], default: str | None = None) -> T:
        """The answer to a question; asked again until it can be read."""
        shown = f"{question} [{default}]: " if default is not None else f"{question}: "
        while True:
            answer = self._line(shown).strip()
            if not answer and default is None:
                self.out.print("  please answer")
                continue
            try:
                return read(answer or str(default))
            except (ConfigError, ValueError) as error:
                self.out.print(f"  {error}")

    def _line(self, shown: str) -> str:
        try:
            return self.out.input(shown, markup=False)
        except EOFError:
            raise ConfigError(
                "the input ended before the last question, and nothing was written; answer the questions at a "
                "terminal, or use fullshard config --default"
            ) from None

    def value(self, name: str, question: str, default: Any = None) -> Any:
        """An option's value, parsed as in the file."""
        text = None if default is None else str(default)
        return self.ask(question, lambda answer: convert(OPTIONS[name], answer, name), text)

    def yes(self, question: str, default: bool) -> bool:
        """The answer to a yes-or-no question."""

        def read(answer: str) -> bool:
            if answer.lower() not in (*TRUE, *FALSE):
                raise ValueError("please answer yes or no")
            return answer.lower() in TRUE

        return self.ask(question, read, "yes" if default else "no")

    def choice(self, question: str, choices: Sequence[str], default: int = 0) -> int:
        """The index of the choice; the answer may be the number or the name."""
        self.out.print(question)
        for number, text in enumerate(choices):
            self.out.print(f"  {number}  {text}")

        def read(answer: str) -> int:
            names = [c.lower() for c in choices]
            if answer.lower() in names:
                return names.index(answer.lower())
            if (number := counting_number(answer)) is not None and number < len(choices):
                return number
            raise ValueError(f"please answer 0 to {len(choices) - 1}, or a name from the list")

        return self.ask("Your choice", read, str(default))

    def pick(self, question: str, name: str, default: int = 0, leave_out: Sequence[str] = ()) -> str:
        """One of an option's choices."""
        choices = [c for c in OPTIONS[name].choices if c not in leave_out]
        return choices[self.choice(question, choices, default)]


def ask_all(out: Terminal, machine: Machine) -> dict[str, Any]:
    """Ask every question, in Accelerate's order; returns option values by name. Defaults fit the machine."""
    ask, gpus = Asker(out), len(machine.gpus)
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    out.print(str(machine))
    on_slurm = ask.choice("Where do you run?", ["This machine", "Slurm, through srun"], int(machine.slurm)) == 1
    kinds = ["No distributed training", "multi-CPU", "multi-GPU"]
    usual = 2 if gpus > 1 or on_slurm else 0 if gpus else 1
    kind = ask.choice("Which machines do you use?", kinds, usual)
    values["distributed_type"] = ("NO", "MULTI_CPU", "MULTI_GPU")[kind]
    values["use_cpu"] = kind == 1 or (kind == 0 and not gpus and not on_slurm)
    if kind == 0 and not values["use_cpu"]:
        values["use_cpu"] = ask.yes("Train on the CPU even if there is a GPU?", False)
    elif kind and not on_slurm:
        _ask_machines(ask, values)
    if kind:
        values["debug"] = ask.yes("Check at run time that ranks agree (slower)?", False)
    if ask.yes("Compile the model with torch.compile?", False):
        values["backend"] = ask.value("backend", "Which backend", "inductor")
        values["mode"] = ask.pick("Which mode?", "mode")
    if kind and ask.yes("Shard the model over the processes (FSDP)?", True):
        values["distributed_type"] = "FSDP"
        _ask_engine(ask, values)
    values["num_processes"] = _ask_processes(ask, machine, kind, values.get("num_machines", 0)) if kind else 1
    gpus_compute = bool(gpus) and not values["use_cpu"]  # which GPUs will compute
    leave_out = ["fp8", "bf16"] if gpus_compute and not machine.bf16 else ["fp8"]
    offered = [c for c in OPTIONS["mixed_precision"].choices if c not in leave_out]
    default = offered.index("bf16") if gpus_compute and machine.bf16 else 0
    values["mixed_precision"] = ask.pick("Which mixed precision?", "mixed_precision", default, leave_out)
    return values


def _ask_processes(ask: Asker, machine: Machine, kind: int, machines: int) -> int:
    """The number of processes; `machines` is 0 under Slurm, which sets it."""
    if kind == 1:
        default = str(CPU_PROCESSES * max(1, machines))
        return ask.ask("How many processes, over all machines", _positive("num_processes"), default)
    here = len(machine.gpus)

    def read(answer: str) -> int:
        number = _positive("num_processes")(answer)
        if here and machines == 1 and number > here:
            raise ValueError(f"this machine has {here} GPU(s), and each process needs one")
        return number

    return ask.ask("How many GPUs, over all machines", read, str(max(1, here * max(1, machines))))


def _positive(name: str) -> Callable[[str], int]:
    def read(answer: str) -> int:
        number: int = convert(OPTIONS[name], answer, name)
        if number < 1:
            raise ValueError(f"{name}: expected 1 or more, got {number}")
        return number

    return read


def _ask_machines(ask: Asker, values: dict[str, Any]) -> None:
    values["num_machines"] = ask.ask("How many machines", _positive("num_machines"), "1")
    if values["num_machines"] == 1:
        return
    ranks = [str(rank) for rank in range(values["num_machines"])]
    values["machine_rank"] = ask.choice("Which of them is this one?", ranks)
    values["main_process_ip"] = ask.value("main_process_ip", "Address of machine 0")
    values["main_process_port"] = ask.ask("Port on machine 0", _positive("main_process_port"), "29500")
    values["same_network"] = ask.yes("Are all machines on one local network?", True)
    if not values["same_network"]:
        values["rdzv_backend"] = ask.value("rdzv_backend", "Rendezvous backend (static, c10d, …)", "static")


def _ask_engine(ask: Asker, values: dict[str, Any]) -> None:
    versions = ["FSDP version 1", "FSDP version 2"]
    values["version"] = ask.choice("Which version's options do you want to set?", versions, 1) + 1
    first = values["version"] == 1
    if first:
        values["sharding_strategy"] = STRATEGIES[ask.choice("Which sharding strategy?", STRATEGIES)]
    else:
        reshard = ask.yes("Free gathered parameters after forward (reshard)?", True)
        values["reshard_after_forward"] = reshard
    values["offload_params"] = ask.yes("Keep sharded parameters, gradients and optimizer state in CPU memory?", False)
    policy = ask.pick("Which wrap policy?", "auto_wrap_policy")
    values["auto_wrap_policy"] = policy
    if policy == "TRANSFORMER_BASED_WRAP":
        if not ask.yes("Wrap the model's own layer classes (_no_split_modules)?", True):
            values["transformer_layer_cls_to_wrap"] = ask.value(
                "transformer_layer_cls_to_wrap", "Layer classes, separated by commas (such as BertLayer)"
            )
    elif policy == "SIZE_BASED_WRAP":
        values["min_num_params"] = ask.ask("Parameters per wrapped module", _positive("min_num_params"), "1e8")
    if first:
        values["backward_prefetch"] = ask.pick("Which backward prefetch policy?", "backward_prefetch")
    leave_out = () if first else ("LOCAL_STATE_DICT",)
    default = 0 if first else 1
    values["state_dict_type"] = ask.pick("Which state dict type?", "state_dict_type", default, leave_out)
    if first:
        values["forward_prefetch"] = ask.yes("Prefetch the next layer in forward?", False)
        values["use_orig_params"] = ask.yes("use_orig_params (for Accelerate; no effect here)?", True)
    values["cpu_ram_efficient_loading"] = ask.yes("RAM-efficient loading (for Accelerate; always on here)?", True)
    if first:
        efficient = values["cpu_ram_efficient_loading"]
        values["sync_module_states"] = efficient or ask.yes("Broadcast rank 0's parameters to all ranks?", True)
    values["activation_checkpointing"] = ask.yes("Use activation checkpointing?", False)
    if not first and ask.yes("Replicate the model across groups of ranks (HYBRID_SHARD)?", False):
        values["dp_replicate_size"] = ask.ask("How many replicas", _positive("dp_replicate_size"), "2")
        values["dp_shard_size"] = ask.ask("How many ranks per replica", _positive("dp_shard_size"), "1")
    if not first and ask.yes("Split each layer over neighboring ranks (tensor parallelism)?", False):
        values["tp_size"] = ask.ask("Over how many ranks", _positive("tp_size"), "2")
    if not first and ask.yes("Divide the experts of a mixture among ranks (expert parallelism)?", False):
        values["ep_size"] = ask.ask("Among how many ranks", _positive("ep_size"), "2")
