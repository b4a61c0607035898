"""Combines the command line, the configuration file and the environment into `LaunchSettings`.

Flags override the file, the file overrides the environment. Wrong settings are reported here, before torch is imported
or a process is started. `agent.py` starts the processes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.configfile import OptionValues, read_file, sort_keys
from fullshard.config.errors import ConfigError
from fullshard.config.options import counting_number, options_of, parse_flags
from fullshard.config.redaction import hide_in, hide_words, learn
from fullshard.device.device_kinds import KINDS
from fullshard.distributed import engines
from fullshard.hf.patches import VARIABLE as INTEGRATIONS_VARIABLE
from fullshard.launch.config import (
    NOT_OFFERED,
    ProcessSettings,
    RunSettings,
    file_options,
    find_file,
    launch_options,
)
from fullshard.launch.slurm import SlurmPlace, read_slurm
from fullshard.launch.worker import COMMAND_VARIABLE
from fullshard.parallel.fsdp_flags import read_section, read_words
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.settings import RESOLVED_VARIABLE, XLA_DEVICES_VARIABLE, EngineSettings, overlay, values_in
from fullshard.version import __version__


@dataclass(frozen=True)
class LaunchSettings:
    """All settings of one `fullshard launch`."""

    engine: EngineSettings
    processes: ProcessSettings
    run: RunSettings
    command: tuple[str, ...]
    """The script and its arguments."""
    file: Path | None
    file_reason: str
    user_settings: dict[str, Any]
    """The values that were set, by key of the file; all others are defaults."""
    notes: tuple[str, ...]
    slurm: SlurmPlace | None = None
    device: str = "cpu"
    local_processes: int = 1
    """Processes on this machine."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further environment variables of every process."""

    @property
    def one_task_per_process(self) -> bool:
        """Whether `srun` has already started every process."""
        return self.slurm is not None and not self.slurm.one_task_per_node

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        if self.slurm is not None and self.one_task_per_process:
            return self.slurm.tasks
        return self.local_processes * self.processes.num_machines

    @property
    def shown_command(self) -> tuple[str, ...]:
        """The script and its arguments, without secrets."""
        return hide_words(self.command)

    def describe(self) -> dict[str, str]:
        """The effective settings as text, by name."""
        machines = self.processes.num_machines
        shown = {"settings from": f"{self.file} ({self.file_reason})" if self.file else "flags and defaults; no file"}
        shown["processes"] = f"{self.world_size} on {machines} machine(s)" if machines > 1 else str(self.world_size)
        if machines > 1:
            shown["processes"] += f"; this is machine {self.processes.machine_rank}"
            shown["rendezvous"] = f"{self.endpoint} ({self.processes.rdzv_backend})"
        shown |= self.engine.describe()
        shown["device"] = self.device
        devices = self.world_size
        if self.device == "xla":
            devices = self.processes.num_processes or 0
            shown["devices"] = str(devices or "all of this machine") + ", driven by one process"
        shape = self.engine.mesh_shape(devices, machines) if devices else {}
        if len(shape) > 1:
            shown["mesh"] = ", ".join(f"{axis}={size}" for axis, size in shape.items())
        if self.run.max_restarts:
            shown["restarts"] = f"up to {self.run.max_restarts} after a crash"
        return shown

    @property
    def endpoint(self) -> str:
        """Host and port of the rendezvous."""
        return f"{self.processes.main_process_ip}:{self.processes.main_process_port}"

    def without_effect(self) -> dict[str, str]:
        """The options that were set to another value than their default and have no effect, with the reason."""
        return {
            one.key: one.no_op
            for one in IGNORED_OPTIONS
            if one.key in self.user_settings and self.user_settings[one.key] not in (one.default, (), {})
        }

    def to_json(self) -> str:
        """The settings as a run stores them with its results, without secrets."""
        settings = {
            one.key: getattr(owner, one.name)
            for owner in (self.processes, self.engine)
            for one in options_of(type(owner))
            if getattr(owner, one.name) is not None
        }
        stored = {
            "fullshard": __version__,
            "config_file": str(self.file) if self.file else None,
            "given": self.user_settings,
            "settings": settings,
            "effective": self.describe(),
            "without_effect": self.without_effect(),
            "notes": self.notes,
            "command": self.shown_command,
        }
        return json.dumps(hide_in(stored))

    def environment(self, outer: Mapping[str, str]) -> dict[str, str]:
        """The environment of every process: `outer`, with the engine's variables replaced."""
        ours = {one.env for one in options_of(EngineSettings)} | {
            "ACCELERATE_USE_FSDP",
            "ACCELERATE_USE_PARALLELISM_CONFIG",
            RESOLVED_VARIABLE,
            COMMAND_VARIABLE,
        }
        ours |= {f"FSDP_{one.name.upper()}" for one in options_of(EngineSettings) if one.prefix == "fsdp_"}
        variables = {name: value for name, value in outer.items() if name not in ours}
        variables |= self.engine.to_environment()
        if self.engine.ranks_per_row > 1:  # Accelerate divides batches by these sizes
            shape = self.engine.mesh_shape(self.world_size, self.processes.num_machines)
            variables |= {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shape["fsdp"]),
            }
        variables[RESOLVED_VARIABLE] = self.to_json()
        variables |= self.variables
        if self.shown_command != self.command:
            variables[COMMAND_VARIABLE] = json.dumps(self.command)
        variables["OMP_NUM_THREADS"] = str(self._threads(outer))
        if self.device == "cpu":
            variables["FULLSHARD_DEVICE"] = "cpu"
            variables["ACCELERATE_USE_CPU"] = "true"  # else Accelerate takes such ranks for independent programs
        if self.device == "xla":
            variables |= self._xla_variables(outer)
        gpus = self.processes.gpu_ids
        if gpus not in (None, "all") and self.device in KINDS:
            variables[KINDS[self.device].visible] = gpus
        if self.run.no_integrations:
            variables[INTEGRATIONS_VARIABLE] = "off"
        if self.processes.enable_cpu_affinity:
            variables["ACCELERATE_CPU_AFFINITY"] = "1"
        return variables

    def _xla_variables(self, outer: Mapping[str, str]) -> dict[str, str]:
        """What tells PyTorch/XLA which devices to use; CPU devices are made, in the number that is asked for."""
        count = self.processes.num_processes
        devices_variable = {} if count is None else {XLA_DEVICES_VARIABLE: str(count)}
        if not self.engine.use_cpu and outer.get("PJRT_DEVICE") != "CPU":
            return devices_variable
        devices = count or outer.get("CPU_NUM_DEVICES") or 1
        return {**devices_variable, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}

    def _threads(self, outer: Mapping[str, str]) -> int:
        if self.run.num_cpu_threads_per_process is not None:
            return self.run.num_cpu_threads_per_process
        if (threads := counting_number(outer.get("OMP_NUM_THREADS", ""))) is not None:
            return threads
        return max(1, (os.cpu_count() or 1) // self.local_processes) if self.device == "cpu" else 1


def resolve(
    words: Sequence[str], environment: Mapping[str, str] = os.environ, *, starts: bool = True
) -> LaunchSettings:
    """The settings of `fullshard launch WORDS`; `settle` then adds what depends on this machine's devices.

    Without `starts` nothing will be started: the words need no script, and other machines no address.
    """
    parsed = parse_flags(words, launch_options(), "launch")
    run = RunSettings(**_of(RunSettings, parsed.values))
    notes: list[str] = []
    path, reason = find_file(run.config_file, environment)
    file = sort_keys(read_file(path), file_options(), notes) if path is not None else OptionValues()
    if path is not None and reason == "Accelerate's":
        notes.append(f"fullshard has no default file, so Accelerate's is used: {path}")
    slurm = read_slurm(environment)
    values: dict[str, Any] = {}
    for layer in (
        values_in(environment, IGNORED_OPTIONS),
        file.values,
        {"use_cpu": True} if starts and environment.get("FULLSHARD_DEVICE") == "cpu" else {},
        _slurm_values(slurm),
        read_section(run.fsdp_config, notes),
        read_words(run.fsdp),
        _typed(run),
        {k: v for k, v in parsed.values.items() if k not in _of(RunSettings, parsed.values)},
    ):
        values = overlay(values, layer)
    processes, engine = check_values(values, notes, starts=starts)
    _check_run(run)
    if starts:
        _check_command(run, parsed.rest)
    keys = {one.name: one.key for one in file_options()}
    user_settings = {keys[name]: value for name, value in values.items() if name in keys}
    learn(user_settings)
    return LaunchSettings(
        engine, processes, run, tuple(parsed.rest), path, reason, user_settings, tuple(dict.fromkeys(notes)), slurm
    )


def check_values(
    values: dict[str, Any], notes: list[str] | None = None, *, starts: bool = True
) -> tuple[ProcessSettings, EngineSettings]:
    """The two typed configurations for a file's values; raises if a value is wrong."""
    if values.pop("fp16", None) and "mixed_precision" not in values:
        values["mixed_precision"] = "fp16"
    processes = ProcessSettings(**_of(ProcessSettings, values))
    _check_processes(processes, starts)
    return processes, _engine(values, processes, notes if notes is not None else [])


def _of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in dataclasses.fields(config) if f.name in values}


def _slurm_values(slurm: SlurmPlace | None) -> dict[str, Any]:
    if slurm is None or slurm.tasks == 1:
        return {}
    return {
        "num_machines": slurm.nodes, "machine_rank": slurm.node, "main_process_ip": slurm.hosts[0],
        "main_process_port": slurm.port,
    }  # fmt: skip


def _typed(run: RunSettings) -> dict[str, Any]:
    kinds = {
        "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM",
        "tpu": "XLA",
    }  # fmt: skip
    chosen = [flag for flag in kinds if getattr(run, flag)]
    if len(chosen) > 1:
        raise ConfigError(f"--{' and --'.join(chosen)} exclude each other; use one of them")
    return {"distributed_type": kinds[chosen[0]]} if chosen else {}


def _engine(values: Mapping[str, Any], processes: ProcessSettings, notes: list[str]) -> EngineSettings:
    chosen = _of(EngineSettings, values)
    kind = processes.distributed_type
    if kind == "XLA":
        chosen["xla"] = True
    elif kind != "FSDP":
        if any(name in chosen for name in ("sharding_strategy", "reshard_after_forward")):
            notes.append(f"distributed_type: {kind} replicates the model on every rank; FSDP would shard it")
        chosen = overlay(chosen, {"sharding_strategy": "NO_SHARD"})
    if kind == "MULTI_CPU":
        chosen["use_cpu"] = True
    engine = EngineSettings(**chosen)
    notes.extend(engines.current().sharding_notes(engine))
    if engine.transformer_layer_cls_to_wrap and engine.wrap_policy != "TRANSFORMER_BASED_WRAP":
        notes.append(f"fsdp_transformer_layer_cls_to_wrap is not used by fsdp_auto_wrap_policy: {engine.wrap_policy}")
    if engine.min_num_params is not None and engine.wrap_policy != "SIZE_BASED_WRAP":
        notes.append(f"fsdp_min_num_params is not used by fsdp_auto_wrap_policy: {engine.wrap_policy}")
    return engine


def _check_processes(processes: ProcessSettings, starts: bool) -> None:
    kind, machines, total = processes.distributed_type, processes.num_machines, processes.num_processes
    for name in ("deepspeed_config", "megatron_lm_config", "mpirun_config", "fp8_config"):
        if getattr(processes, name):
            raise ConfigError(f"{name} is not supported; remove it from the file, or use accelerate launch")
    for wrong, text in (
        (processes.compute_environment != "LOCAL_MACHINE", "compute_environment: expected LOCAL_MACHINE"),
        (kind in NOT_OFFERED, f"distributed_type: {kind} is not supported; use FSDP, XLA, MULTI_GPU, MULTI_CPU or NO"),
        (total == -1, "num_processes: -1 in the file means that it must be set on the command line: --num_processes N"),
        (total is not None and total < 1, f"num_processes: expected 1 or more, got {total}"),
        (machines < 1, f"num_machines: expected 1 or more, got {machines}"),
        (
            not 0 <= processes.machine_rank < max(1, machines),
            f"machine_rank: expected 0 to {machines - 1} with {machines} machine(s), got {processes.machine_rank}",
        ),
        (
            kind == "NO" and (total or 1) > 1,
            f"distributed_type: NO is one process, but num_processes is {total}; add --use_fsdp or --num_processes 1",
        ),
        (
            total is not None and total % max(1, machines),
            f"num_processes {total} is not divisible by num_machines {machines}; it is the total on all machines",
        ),
        (
            starts and machines > 1 and not processes.main_process_ip,
            f"num_machines {machines} requires main_process_ip, the address of machine 0 (--main_process_ip HOST)",
        ),
        (
            processes.main_process_port is not None and not 0 <= processes.main_process_port < 65536,
            f"main_process_port: expected 0 to 65535, got {processes.main_process_port}",
        ),
        (
            machines > 1 and processes.main_process_port == 0,
            "main_process_port: 0 selects a free port, which other machines cannot know; set a port",
        ),
    ):
        if wrong:
            raise ConfigError(text)


def _check_run(run: RunSettings) -> None:
    for wrong, text in (
        (run.max_restarts < 0, f"--max_restarts: expected 0 or more, got {run.max_restarts}"),
        (run.grace < 0, f"--grace: expected 0 or more seconds, got {run.grace:g}"),
        (run.rdzv_timeout <= 0, f"--rdzv_timeout: expected more than 0 seconds, got {run.rdzv_timeout:g}"),
        (run.monitor_interval <= 0, f"--monitor_interval: expected more than 0 seconds, got {run.monitor_interval:g}"),
        (run.module and run.no_python, "--module and --no_python exclude each other"),
        (
            run.num_cpu_threads_per_process is not None and run.num_cpu_threads_per_process < 1,
            f"--num_cpu_threads_per_process: expected 1 or more, got {run.num_cpu_threads_per_process}",
        ),
    ):
        if wrong:
            raise ConfigError(text)


def _check_command(run: RunSettings, command: Sequence[str]) -> None:
    if not command:
        if run.dry_run:
            return
        raise ConfigError("no script given; expected fullshard launch [flags] script.py [arguments of the script]")
    script = command[0]
    if run.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"the program {script} was not found, or is not executable")
    elif run.module:
        if not _module_exists(script):
            raise ConfigError(f"the module {script} was not found")
    elif not Path(script).is_file():
        hint = " (to run a module, use -m)" if "/" not in script and not script.endswith(".py") else ""
        raise ConfigError(f"the script {script} does not exist{hint}")
    if run.log_dir is not None:
        folder = Path(run.log_dir)
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"--log_dir {run.log_dir}: {folder} is not a writable directory")


def _module_exists(name: str) -> bool:
    """Whether a package or module of this name exists, without importing it."""
    top = name.split(".")[0]
    here = (Path(top).is_dir(), Path(f"{top}.py").is_file())  # processes search the working directory as well
    try:
        return any(here) or importlib.util.find_spec(top) is not None
    except (ValueError, ImportError):
        return False


def settle(settings: LaunchSettings, gpus: int, gpu_type: str = "cuda") -> LaunchSettings:
    """The settings with the device and the number of processes, for a machine with this many GPUs of this type."""
    if engines.current().drives_machine:
        return _settle_one_process(settings)
    processes, engine, notes = settings.processes, settings.engine, list(settings.notes)
    machines = processes.num_machines
    named = processes.gpu_ids not in (None, "all") and not engine.use_cpu
    ids = [i.strip() for i in (processes.gpu_ids or "").split(",") if i.strip()] if named else []
    if any((number := counting_number(i)) is None or number >= gpus for i in ids):
        raise ConfigError(f"gpu_ids: {processes.gpu_ids}: this machine has {gpus} GPU(s); expected all, or ids from 0")
    available = len(ids) if named else gpus
    device = "cpu" if engine.use_cpu or available == 0 else gpu_type
    local = available if device != "cpu" and processes.distributed_type != "NO" else 1
    if processes.num_processes is not None:
        local = processes.num_processes // machines
    if settings.slurm is not None and settings.one_task_per_process:
        if processes.num_processes not in (None, settings.slurm.tasks):
            raise ConfigError(
                f"num_processes is {processes.num_processes}, but srun started {settings.slurm.tasks} tasks, more than "
                f"one per node, so each task is a process; use --num_processes {settings.slurm.tasks}, or srun "
                "--ntasks-per-node 1"
            )
        local = settings.slurm.tasks_here
    # A task of srun may see only its own GPU; whether ranks share one is checked at the rendezvous.
    if device != "cpu" and local > available and not settings.one_task_per_process:
        raise ConfigError(
            f"{local} processes on this machine, but only {available} GPU(s); use --num_processes "
            f"{available * machines}, or --use_cpu to train on CPUs"
        )
    if device == "cpu" and not engine.use_cpu and settings.user_settings.get("use_cpu") is False:
        notes.append("this machine has no GPU, so the model is sharded over CPU processes")
    port = processes.main_process_port if machines == 1 else processes.main_process_port or 29500
    processes = dataclasses.replace(processes, main_process_port=port)
    settled = dataclasses.replace(
        settings, processes=processes, device=device, local_processes=local, notes=tuple(dict.fromkeys(notes))
    )
    engine.mesh_shape(settled.world_size, machines)
    return settled


def _settle_one_process(settings: LaunchSettings) -> LaunchSettings:
    """One process drives all devices of this machine; `num_processes` is their number."""
    processes, slurm = settings.processes, settings.slurm
    if processes.num_machines > 1 or (slurm is not None and slurm.tasks > 1):
        count = max(processes.num_machines, slurm.tasks if slurm is not None else 1)
        raise ConfigError(
            f"num_machines is {count}: on the {engines.current().name} engine one process on one machine is supported"
        )
    if processes.num_processes is not None:
        settings.engine.mesh_shape(processes.num_processes, 1)
    return dataclasses.replace(settings, device="xla")
