"""The GPUs of this machine. torch is imported only if there may be one: importing it takes seconds."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fullshard.device.device_kinds import KINDS


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
        devices = ", ".join(f"{count} × {name}" for name, count in counts.items())
        return f"This machine has {devices}{'' if self.bf16 else ', which cannot compute in bf16'}."


def count_gpus() -> int:
    """The number of GPUs that processes on this machine can use."""
    open_kinds = [kind for kind in KINDS.values() if os.environ.get(kind.visible) != ""]
    device_files = (file for kind in open_kinds for pattern in kind.files for file in Path("/dev").glob(pattern))
    if not open_kinds or (sys.platform.startswith("linux") and not any(device_files)):
        return 0
    from fullshard.distributed.rank_env import gpu_count

    return gpu_count()


def gpu_type() -> str:
    """The device type of this machine's GPUs, as torch calls it."""
    from fullshard.device import accelerator

    return accelerator.kind()


def detect_machine() -> Machine:
    """What this machine has."""
    slurm = shutil.which("srun") is not None
    if not count_gpus():
        return Machine(slurm=slurm)
    from fullshard.device import accelerator

    return Machine(tuple(accelerator.names()), accelerator.computes_bf16(), slurm)
