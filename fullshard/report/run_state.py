"""Whether the run in a folder is going on, has finished, or has ended before its last step.

A run that is going on holds the lock of its folder; the system releases it however the process ends. What a run that
has ended wrote last says how it ended.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from fullshard.report.records import is_number
from fullshard.report.run_record import RunRecord
from fullshard.sft.output_dir import lock_owner

ENDINGS = ("start", "resume", "end", "failed", "stopped")


class RunState(Enum):
    """What a run is doing."""

    RUNNING = "running"
    FINISHED = "finished"
    ENDED = "ended early"


def state_of(run: RunRecord) -> RunState:
    """The state of a run. Where the file system has no locks, a run that is going on seems to have ended early."""
    if lock_owner(run.folder) is not None:
        return RunState.RUNNING
    return RunState.FINISHED if has_finished(run) else RunState.ENDED


def has_finished(run: RunRecord) -> bool:
    """Whether the last training in the folder came to its end: by its events, or, from before there were any, by the
    totals that it logs after its last step."""
    if events := run.of_kind(*ENDINGS):
        return events[-1]["kind"] == "end"
    kinds = [
        "end" if "train_runtime" in one else "step" for one in run.metrics if {"train_runtime", "loss"} & one.keys()
    ]
    return bool(kinds) and kinds[-1] == "end"


def last_step(run: RunRecord) -> int:
    """The last step that was logged."""
    return int(max((record["step"] for record in run.metrics), default=0))


def total_steps(run: RunRecord) -> int | None:
    """The steps to train; None if it is not known."""
    steps: Any = run.about.get("steps", run.settings.get("max_steps"))
    return int(steps) if is_number(steps) and steps > 0 else None


def training_seconds(run: RunRecord) -> list[tuple[float, float]]:
    """(step, seconds of training until then), without evaluations and pauses: reckoned from tokens and speed."""
    known = [
        (float(record["step"]), seconds)
        for record, seconds in zip(run.metrics, run.seconds, strict=True)
        if is_number(record.get("num_tokens")) and is_number(record.get("tokens_per_second"))
    ]
    return [(0.0, 0.0), *known]
