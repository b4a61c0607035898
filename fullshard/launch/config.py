"""The launcher's options, and the locations of its configuration file.

`ProcessSettings` are the keys of Accelerate's file that are not about the engine (those are in
`fullshard.parallel.settings.EngineSettings`); `RunSettings` are flags only. The file format, the flags, `--help` and
`docs/options.md` all come from these three classes. `resolve.py` combines the values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullshard.config.options import Option, option, options_of
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.settings import EngineSettings

OFFERED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "XLA")
NOT_OFFERED = (
    "DEEPSPEED", "MEGATRON_LM", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU",
    "MULTI_NEURON",
)  # fmt: skip
"""Values of `distributed_type` that Accelerate accepts and fullshard refuses."""


@dataclass(frozen=True)
class ProcessSettings:
    """Which processes run where."""

    compute_environment: Literal["LOCAL_MACHINE", "AMAZON_SAGEMAKER"] = "LOCAL_MACHINE"
    """Where the processes run. Only LOCAL_MACHINE is supported; it includes Slurm."""
    distributed_type: Literal[(*OFFERED, *NOT_OFFERED)] = "FSDP"  # type: ignore[valid-type]
    """FSDP shards the model. MULTI_GPU and MULTI_CPU replicate it on every rank (NO_SHARD). NO is one process. XLA is
    FSDP on the XLA engine, as with `xla: true`."""
    num_processes: int | None = option(None, flags=("n",), elsewhere=("nproc_per_node", "nproc", "gpus", "num_gpus"))
    """Total number of processes on all machines. Unset: one per GPU, or one on CPUs. On the XLA engine the number of
    devices, which one process drives; unset: all."""
    num_machines: int = option(1, elsewhere=("nnodes", "nodes", "num_nodes"))
    """Number of machines (nodes)."""
    machine_rank: int = option(0, elsewhere=("node_rank",))
    """The rank of this machine, from 0."""
    gpu_ids: str | None = option(None, metavar="all, or ids such as 0,1")
    """The GPUs to use on this machine. Unset: all."""
    main_process_ip: str | None = option(None, metavar="HOST", elsewhere=("master_addr",))
    """Address of machine 0. Required with several machines, except under Slurm."""
    main_process_port: int | None = option(None, elsewhere=("master_port",))
    """Port of the rendezvous on machine 0. On one machine: 0 or unset selects a free port, and a busy port is replaced
    by a free one. On several machines a busy port is an error; unset means 29500."""
    rdzv_backend: str = option("static", metavar="static, c10d or another of torchrun's")
    """How machines find each other."""
    job_secret_file: str | None = option(None, metavar="PATH")
    """A file with the secret of a job on several machines, the same on all. It signs what machines and ranks write for
    each other. Unset: the variable FULLSHARD_JOB_SECRET; on one machine a new secret for every run."""
    enable_cpu_affinity: bool = False
    """Bind each process to its own share of the machine's CPU cores."""
    fp16: bool | None = None
    """Old name of `mixed_precision: fp16`."""
    deepspeed_config: dict[str, Any] | None = option(None)  # noqa: RUF009 - a field, not a shared dict
    """Accelerate: DeepSpeed. Refused unless empty."""
    megatron_lm_config: dict[str, Any] | None = option(None)  # noqa: RUF009
    """Accelerate: Megatron-LM. Refused unless empty."""
    mpirun_config: dict[str, Any] | None = option(None)  # noqa: RUF009
    """Accelerate: starting through mpirun. Refused unless empty."""
    fp8_config: dict[str, Any] | None = option(None)  # noqa: RUF009
    """Accelerate: fp8. Refused unless empty."""


_flag = functools.partial(option, in_file=False)


@dataclass(frozen=True)
class RunSettings:
    """Flags of `fullshard launch` that cannot be set in the file."""

    config_file: str | None = _flag(None, metavar="PATH")
    """The configuration file. Unset: fullshard's own default file, else Accelerate's."""
    use_fsdp: bool = _flag(False)
    """Same as `--distributed_type FSDP`."""
    multi_gpu: bool = _flag(False)
    """Same as `--distributed_type MULTI_GPU`."""
    use_deepspeed: bool = _flag(False)
    """Same as `--distributed_type DEEPSPEED`, which is refused."""
    use_megatron_lm: bool = _flag(False)
    """Same as `--distributed_type MEGATRON_LM`, which is refused."""
    tpu: bool = _flag(False)
    """Same as `--distributed_type XLA`."""
    fsdp: str | None = _flag(None, metavar='"full_shard auto_wrap offload"')
    """The strategy, written as for `--fsdp` of transformers' Trainer."""
    fsdp_config: str | None = _flag(None, metavar="PATH")
    """A YAML or JSON file with only the keys of `fsdp_config`."""
    module: bool = _flag(False, flags=("m",))
    """The script is a Python module, as in `python -m`."""
    no_python: bool = _flag(False)
    """The script is an executable; run it without Python."""
    no_integrations: bool = _flag(False)
    """Run Accelerate, transformers' Trainer and TRL on their own engine instead of fullshard's."""
    num_cpu_threads_per_process: int | None = _flag(None)
    """Threads per process (OMP_NUM_THREADS). Unset: the environment variable; else an equal share of the cores on CPUs,
    1 on GPUs."""
    max_restarts: int = _flag(0)
    """How often all processes are restarted after one has crashed. A preempted run is not restarted."""
    grace: float = _flag(30.0)
    """Seconds that processes have to save and end after the first Ctrl-C or SIGTERM."""
    rdzv_timeout: float = _flag(300.0)
    """Seconds to wait for the other machines."""
    rdzv_conf: str = _flag("", metavar="KEY=VALUE,…")
    """Additional settings of the rendezvous backend."""
    rdzv_id: str = _flag("fullshard")
    """The name of the run at the rendezvous."""
    monitor_interval: float = _flag(0.1)
    """Seconds between two checks of the processes."""
    log_dir: str | None = _flag(None, metavar="PATH")
    """Directory for a log file of each rank's output, which is also printed."""
    tee: Literal["0", "1", "2", "3"] | None = _flag(None, flags=("t",))
    """What is written to the logs: 0 nothing, 1 stdout, 2 stderr, 3 both. Unset: 3 with `--log_dir`."""
    role: str = _flag("default")
    """The role of the processes, as in torchrun."""
    quiet: bool = _flag(False, flags=("q",))
    """Do not print the settings."""
    dry_run: bool = _flag(False)
    """Print the settings and stop."""


def launch_options() -> tuple[Option, ...]:
    """Every option of `fullshard launch`."""
    return (*options_of(RunSettings), *file_options())


def file_options() -> tuple[Option, ...]:
    """Every option of the configuration file, and the options that are ignored."""
    return (*options_of(ProcessSettings), *options_of(EngineSettings), *IGNORED_OPTIONS)


def own_file(environment: Mapping[str, str] = os.environ) -> Path:
    """fullshard's default file: `$FULLSHARD_CONFIG`, else a file in the user's configuration directory."""
    if environment.get("FULLSHARD_CONFIG"):
        return Path(environment["FULLSHARD_CONFIG"]).expanduser()
    home = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "fullshard" / "config.yaml"


def accelerate_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Accelerate's default file, which fullshard reads but never writes."""
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environment.get("HF_HOME") or cache).expanduser() / "accelerate" / "default_config.yaml"


def find_file(flag: str | None, environment: Mapping[str, str] = os.environ) -> tuple[Path | None, str]:
    """The file to use, and why this one."""
    if flag is not None:
        return Path(flag).expanduser(), "--config_file"
    for path, why in ((own_file(environment), "the default file"), (accelerate_file(environment), "Accelerate's")):
        if path.is_file():
            return path, why
    return None, "no file"
