"""The GPUs of this machine. torch is imported only if there may be one: importing it takes seconds."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What this machine has to train on."""

    gpus: tuple[str, ...] = ()
    """Their names."""
    bf16: bool = True
    """Whether they support bf16. CPUs do."""
    slurm: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return "This machine has no GPU."
        counts = {name: self.gpus.count(name) for name in self.gpus}
        found = ", ".join(f"{count} × {name}" for name, count in counts.items())
        return f"This machine has {found}{'' if self.bf16 else ', which cannot compute in bf16'}."


def count_gpus() -> int:
    """The number of GPUs that processes on this machine can use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    device_files: Iterable[Path] = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    if sys.platform.startswith("linux") and not any(device_files):
        return 0
    from fullshard.rank_env import gpu_count

    return gpu_count()


def detect_machine() -> Machine:
    """What this machine has."""
    slurm = shutil.which("srun") is not None
    if not count_gpus():
        return Machine(slurm=slurm)
    from fullshard import accelerator

    return Machine(tuple(accelerator.names()), accelerator.computes_bf16(), slurm)
