"""A run as its folder tells it: one plain value, read from the files that the run has written so far.

Files may be missing, half-written or those of an older version: what cannot be read is named in `missing`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest import published_steps
from fullshard.errors import ConfigError
from fullshard.reporting.records import (
    CHECKPOINTS,
    DATA_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    PLAN_FILE,
    SAMPLES_FILE,
    SETTINGS_FILE,
    STEP_FILE,
)

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """Everything that is known of a run."""

    folder: Path
    settings: Record
    """All settings, as `settings.json` has them."""
    changed: Record | None
    """Those that differ from their defaults; None if it is not known which."""
    about: Record
    """What else `settings.json` says: `name`, `base`, `data`, `method`, `hardware`, `ranks`, `engine`, `notes`,
    `versions`, `steps` to train."""
    metrics: tuple[Record, ...]
    """The lines of `metrics.jsonl`."""
    samples: tuple[Record, ...]
    """The lines of `samples.jsonl`."""
    events: tuple[Record, ...]
    """The lines of `events.jsonl`: `time`, `step`, `kind`, `text`."""
    data: tuple[Record, ...]
    """Statistics of each data set."""
    measured: Record | None
    """Memory and communication of one step, by `step.json`."""
    plan: Record | None
    """What was planned, by `plan.json`."""
    checkpoints: tuple[int, ...]
    """The steps of the checkpoints that are there."""
    changed_at: float | None = None
    """When `metrics.jsonl` was written last."""
    missing: tuple[str, ...] = ()
    """Sentences: what is not there, or cannot be read."""

    @property
    def name(self) -> str:
        return str(self.about.get("name") or self.folder.name)

    @functools.cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The metrics by name, each as long as there are lines: None where a line does not have it."""
        names = dict.fromkeys(name for record in self.metrics for name in record)
        return {name: [_plain(record.get(name)) for record in self.metrics] for name in names}

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """(step, value) of a metric; the value is None where it is not finite."""
        found = ((record["step"], record[name]) for record in self.metrics if name in record)
        return [(step, finite(value)) for step, value in found if value is None or is_number(value)]

    def matching(self, pattern: str) -> list[str]:
        """The metrics whose names match a regular expression."""
        return [name for name in self.columns if re.fullmatch(pattern, name)]

    def last(self, name: str) -> float | None:
        """The last finite value of a metric."""
        return next((value for _, value in reversed(self.series(name)) if value is not None), None)

    def of_kind(self, *kinds: str) -> list[Record]:
        """The events of some kinds."""
        return [event for event in self.events if event.get("kind") in kinds]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> Any:
    """The value; None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return finite(value) if value is None or isinstance(value, int | float | str) else json.dumps(value)


# --- reading --------------------------------------------------------------------------------------------------------


def read_run(folder: str | Path) -> RunRecord:
    """The run in this folder, which may still be running. Raises only if there is no such folder."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise ConfigError(f"{place} is not a folder; expected the output_dir of a run.")
    missing: list[str] = []
    about = dict(_object(place / SETTINGS_FILE, missing) or {})
    settings, changed = about.pop("settings", None), about.pop("changed", None)
    metrics = _lines(place / METRICS_FILE, missing)
    samples = [
        one for one in _lines(place / SAMPLES_FILE) if all(isinstance(one.get(k), str) for k in ("prompt", "answer"))
    ]
    data = _object(place / DATA_FILE) or {}
    sets = data.get("data_sets")
    return RunRecord(
        folder=place.resolve(),
        settings=settings if isinstance(settings, dict) else {},
        changed=changed if isinstance(changed, dict) else None,
        about=about,
        metrics=tuple(metrics),
        samples=tuple(samples),
        events=tuple(_lines(place / EVENTS_FILE)),
        data=tuple(one for one in sets if isinstance(one, dict)) if isinstance(sets, list) else (),
        measured=_object(place / STEP_FILE),
        plan=_object(place / PLAN_FILE),
        checkpoints=tuple(_steps(place / CHECKPOINTS)),
        changed_at=_changed_at(place / METRICS_FILE),
        missing=tuple(missing),
    )


def _object(path: Path, missing: list[str] | None = None) -> Record | None:
    """The JSON object in a file; None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        if missing is not None:
            missing.append(f"{path.name} is not there.")
        return None
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        if missing is not None:
            missing.append(f"{path.name} cannot be read.")
        return None
    return found


def _lines(path: Path, missing: list[str] | None = None) -> list[Record]:
    """The objects with a step in a JSON lines file. The last line may be half-written; others that cannot be read are
    counted in `missing`."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        if missing is not None:
            missing.append(f"{path.name} is not there.")
        return []
    found, bad = [], 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            bad += number < len(lines) and bool(line.strip())
            continue
        if isinstance(record, dict) and is_number(record.get("step")) and finite(record["step"]) is not None:
            found.append(record)
        else:
            bad += 1
    if missing is not None and bad:
        missing.append(f"{bad:,} lines of {path.name} cannot be read and are left out.")
    if missing is not None and not found:
        missing.append(f"{path.name} has no values yet.")
    return found


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _steps(folder: Path) -> Sequence[int]:
    try:
        return sorted(published_steps(folder))
    except (OSError, ValueError):
        return ()
