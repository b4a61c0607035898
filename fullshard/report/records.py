"""The records that a run writes: names of its files, a sample generation, and which values are numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

SETTINGS_FILE = "settings.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"
DATA_FILE = "data.json"
STEP_FILE = "step.json"
PLAN_FILE = "plan.json"
REPORT_FILE = "report.html"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Sample:
    """The model's answer to one prompt at one evaluation."""

    step: int
    prompt: str
    answer: str
    reference: str | None
    """The answer in the data, if there is one."""

    def record(self) -> dict[str, Any]:
        """The sample as a line of `samples.jsonl`."""
        return asdict(self)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> Any:
    """The value; None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
