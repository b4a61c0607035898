"""Slurm's environment variables for a task started by `srun`: the machines of the job, and this task's place.

Everything is a function of environment variables, so every case can be tested without Slurm.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fullshard.config.errors import ConfigError


@dataclass(frozen=True)
class SlurmPlace:
    """This task's place in its Slurm step."""

    nodes: int
    node: int
    tasks: int
    task: int
    local_task: int
    tasks_here: int
    hosts: tuple[str, ...]
    job: int

    @property
    def one_task_per_node(self) -> bool:
        """Whether Slurm starts one launcher on each node."""
        return self.tasks == self.nodes

    @property
    def port(self) -> int:
        """A port that is the same for every task of a job, and differs between concurrent jobs."""
        return 20_000 + self.job % 20_000


def read_slurm(environment: Mapping[str, str]) -> SlurmPlace | None:
    """This process's place among the tasks of `srun`; None outside a Slurm step."""
    if not environment.get("SLURM_STEP_ID") or not environment.get("SLURM_PROCID"):
        return None
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    node = _number(environment, "SLURM_NODEID")
    names = (
        environment.get("SLURM_STEP_NODELIST")
        or environment.get("SLURM_JOB_NODELIST")
        or environment.get("SLURM_NODELIST")
    )
    if not names:
        raise ConfigError("SLURM_PROCID is set but no SLURM_JOB_NODELIST; start the tasks with srun")
    hosts = expand_hosts(names)
    per_node = expand_counts(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(tasks)
    )
    if node >= nodes or len(hosts) < nodes:
        raise ConfigError(f"SLURM_NODEID={node}, {nodes} nodes, hosts {', '.join(hosts)}: inconsistent values")
    return SlurmPlace(
        nodes, node, tasks, _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID"),
        per_node[node] if node < len(per_node) else tasks // nodes, tuple(hosts),
        _number(environment, "SLURM_JOB_ID", "SLURM_JOBID"),
    )  # fmt: skip


def _number(environment: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environment.get(name):
            try:
                return int(environment[name])
            except ValueError:
                raise ConfigError(f"{name}={environment[name]!r} is not a whole number") from None
    raise ConfigError(f"{names[0]} is not set, but SLURM_PROCID is; start the tasks with srun")


def expand_hosts(text: str) -> list[str]:
    """`gpu2,node[01-03,07]` → gpu2, node01, node02, node03, node07."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces: list[list[str]] = []
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", entry):
            pieces.append([literal] if literal else _numbers(ranges, text))
        hosts += ["".join(parts) for parts in itertools.product(*pieces)]
    if not hosts or text.count("[") != text.count("]"):
        raise ConfigError(f"Slurm's list of hosts cannot be read: {text!r}; expected such as node[01-03,07],gpu2")
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ConfigError(f"Slurm's list of hosts cannot be read: {text!r}; expected such as node[01-03,07],gpu2")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"Slurm's tasks per node cannot be read: {text!r}; expected such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
