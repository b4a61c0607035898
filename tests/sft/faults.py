"""Ways and places to lose a rank of a `fullshard sft` job, put into the rank itself; see `lose_ranks.py`."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fullshard

# isort: split
import torch
import torch.distributed as dist

import fullshard.distributed.torch_devices
from fullshard.checkpoint import manager
from fullshard.distributed.watchdog import collectives
from fullshard.fsdp import grad_clip
from fullshard.launch import worker
from fullshard.launch.worker import EXIT_RANK_LOST
from fullshard.sft import assemble, evaluation, results, training_step

PLACES: dict[str, tuple[Any, str]] = {
    "script": (worker, "_run"),
    "connecting": (fullshard.distributed.torch_devices, "_open_store"),
    "meeting": (fullshard.distributed.torch_devices, "meet"),
    "joining": (dist, "init_process_group"),
    "sharing": (fullshard.distributed.torch_devices, "_share_generator"),
    "comparing": (assemble, "require_equal"),
    "data": (assemble, "gather_parts"),
    "loading": (assemble, "build_loop"),
    "forward": (training_step.TrainingStep, "training_step"),
    "backward": (torch.Tensor, "backward"),
    "metrics": (collectives, "finish"),
    "exchange": (dist, "all_reduce"),
    "norm": (grad_clip, "_sum_along"),
    "update": (torch.optim.AdamW, "step"),
    "evaluation": (evaluation.Evaluation, "_evaluate"),
    "saving": (manager.CheckpointManager, "save"),
    "export": (results.ResultWriter, "export"),
    "end": (results, "show_results"),
}
"""Where a rank can be lost: before the n-th call of a function."""
START = ("script", "connecting", "meeting", "joining", "sharing", "comparing")
"""The places of the start, in their order."""
REPEATED = ("forward", "backward", "metrics", "exchange", "norm", "update")
AFTER = ("evaluation", "saving")
"""What takes part in steps again and again, and what does so now and then."""


PROCESS = r"rank {rank} \(process \d+ on [^ ]+\)"
LATE = rf"{PROCESS} is stopped|(not entered by|waiting for \d+ s for) rank\(s\) [\d, ]*\b{{rank}}\b"


@dataclass(frozen=True)
class How:
    """A way to lose a rank."""

    act: Callable[[], Any]
    code: int
    """The exit code that docs/launch.md promises."""
    told: str
    """What names the rank."""
    tracebacks: int = 0


def by(number: signal.Signals) -> How:
    return How(lambda: os.kill(os.getpid(), number), 128 + number, f"{PROCESS} was ended by {number.name}")


def fail() -> None:
    raise ValueError("an error of this rank's own")


STOP = How(lambda: os.kill(os.getpid(), signal.SIGSTOP), EXIT_RANK_LOST, LATE)
HOWS = {
    "stop": STOP,
    "continue": STOP,
    "kill": by(signal.SIGKILL),
    "abort": by(signal.SIGABRT),
    "raise": How(fail, 1, f"{PROCESS} ended with exit code 1", tracebacks=1),
    "exit": How(lambda: sys.exit(3), 3, f"{PROCESS} ended with exit code 3"),
    "leave": How(lambda: sys.exit(0), EXIT_RANK_LOST, r"rank {rank} has exited|\d+ s for rank\(s\) {rank} to start"),
}


@dataclass
class Fault:
    """What happens to which ranks, where."""

    how: str
    ranks: tuple[int, ...]
    place: str
    """One of `PLACES`, or "" for a moment after the job began to train."""
    turn: int = 1
    seconds: float = 0.0

    def __str__(self) -> str:
        where = f"{self.place} {self.turn}" if self.place else f"{self.seconds:.2f} s"
        return f"{self.how} rank {','.join(map(str, self.ranks))} at {where}"


def lose_at(fault: Fault, folder: Path) -> None:
    """Arrange, in a rank, that it is lost at the fault's place."""
    rank = int(os.environ["RANK"])
    if rank not in fault.ranks or not fault.place:
        return
    owner, name = PLACES[fault.place]
    original, calls = getattr(owner, name), 0

    def called(*words: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.turn:
            (folder / f"lost-{rank}").write_text(str(os.getpid()))
            HOWS[fault.how].act()
        return original(*words, **named)

    setattr(owner, name, called)


def draw_place(chance: random.Random, how: str, places: str) -> tuple[str, int]:
    """Where a rank is lost, and at which call; among `places`, separated by commas, if there are any."""
    moments = [""] * 4 if how in ("stop", "continue", "kill", "abort") else []
    here = [
        place for place in PLACES if how != "raise" or place not in START[:-1]
    ]  # there it is an error of the rendezvous
    place = chance.choice(places.split(",") if places else [*here, *moments])
    return place, chance.randint(1, 9) if place in REPEATED else chance.randint(1, 2) if place in AFTER else 1
