"""A run as its folder tells it: one plain value, read from the files that the run has written so far.

Files may be missing, half-written or those of an older version: what cannot be read is named in `missing`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fullshard.checkpoint.manifest import published_steps
from fullshard.config.errors import ConfigError
from fullshard.report.records import (
    CHECKPOINTS,
    DATA_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    PLAN_FILE,
    SAMPLES_FILE,
    SETTINGS_FILE,
    STEP_FILE,
    finite_or_none,
    indices_to_keep,
    is_long,
    is_number,
)

Record = dict[str, Any]
ENDINGS = ("start", "resume", "end", "failed", "stopped")
"""The kinds of events by which training begins or ends."""
LARGEST_STEP = 2**53
"""Larger numbers are no steps, and cannot be told apart in charts."""


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
    """The lines of `metrics.jsonl`, or of very many those that stay (`records.thin`)."""
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
    line_count: int = 0
    """The number of lines of `metrics.jsonl`, those that are not kept among them."""
    value_counts: Mapping[str, int] = field(default_factory=dict)
    """In how many lines each metric is."""
    gap_counts: Mapping[str, int] = field(default_factory=dict)
    """In how many of them it is not finite."""
    seconds: tuple[float, ...] = ()
    """For each entry of `metrics` the time that was spent on steps until then."""
    speed: float | None = None
    """The median of tokens per second over all lines."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.about.get("name") or self.folder.name)

    @functools.cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The metrics by name, each as long as there are lines: None where a line does not have it."""
        names = dict.fromkeys(name for record in self.metrics for name in record)
        return {name: [_plain(record.get(name)) for record in self.metrics] for name in names}

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """(step, value) of a metric; the value is None where it is not finite."""
        values = ((record["step"], record[name]) for record in self.metrics if name in record)
        return [(step, finite_or_none(value)) for step, value in values if value is None or is_number(value)]

    def matching(self, pattern: str) -> list[str]:
        """The metrics whose names match a regular expression."""
        return [name for name in self.columns if re.fullmatch(pattern, name)]

    def last(self, name: str) -> float | None:
        """The last finite value of a metric."""
        return next((value for _, value in reversed(self.series(name)) if value is not None), None)

    def of_kind(self, *kinds: str) -> list[Record]:
        """The events of some kinds."""
        return [event for event in self.events if event.get("kind") in kinds]

    @property
    def has_finished(self) -> bool:
        """Whether the last training in the folder came to its end: by its events, or, from before there were any, by
        the totals that it logs after its last step."""
        if events := self.of_kind(*ENDINGS):
            return bool(events[-1]["kind"] == "end")
        lines = [one for one in self.metrics if {"train_runtime", "loss"} & one.keys()]
        return bool(lines) and "train_runtime" in lines[-1]

    @property
    def last_step(self) -> int:
        """The last step that was logged."""
        return int(max((record["step"] for record in self.metrics), default=0))

    @property
    def total_steps(self) -> int | None:
        """The number of steps to train; None if it is not known."""
        steps: Any = self.about.get("steps", self.settings.get("max_steps"))
        return int(steps) if is_number(steps) and steps > 0 else None

    @property
    def training_seconds(self) -> list[tuple[float, float]]:
        """(step, seconds of training until then), without evaluations and pauses: reckoned from tokens and speed."""
        points = [
            (float(record["step"]), seconds)
            for record, seconds in zip(self.metrics, self.seconds, strict=True)
            if is_number(record.get("num_tokens")) and is_number(record.get("tokens_per_second"))
        ]
        return [(0.0, 0.0), *points]


def _plain(value: Any) -> Any:
    return finite_or_none(value) if value is None or isinstance(value, int | float | str) else json.dumps(value)


# --- reading --------------------------------------------------------------------------------------------------------


def read_run(folder: str | Path) -> RunRecord:
    """The run in this folder, which may still be running. Raises only if there is no such folder."""
    return RunReader(folder).read()


class RunReader:
    """Reads a run again and again; of its metrics only what was added since."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._metrics = MetricsReader(self.folder / METRICS_FILE)

    def read(self) -> RunRecord:
        """The run as it is now."""
        place = self.folder
        if not place.is_dir():
            raise ConfigError(f"{place} is not a folder; expected the output_dir of a run.")
        missing: list[str] = []
        about = dict(_object(place / SETTINGS_FILE, missing) or {})
        settings, changed = about.pop("settings", None), about.pop("changed", None)
        metrics = self._metrics
        metrics.read(missing)
        samples = [
            one
            for one in _lines(place / SAMPLES_FILE)
            if all(isinstance(one.get(k), str) for k in ("prompt", "answer"))
        ]
        data = _object(place / DATA_FILE) or {}
        sets = data.get("data_sets")
        return RunRecord(
            folder=place.resolve(),
            settings=settings if isinstance(settings, dict) else {},
            changed=changed if isinstance(changed, dict) else None,
            about=about,
            metrics=tuple(metrics.records),
            samples=tuple(one for one in samples if all(isinstance(one.get(k), str) for k in ("prompt", "answer"))),
            events=tuple(_lines(place / EVENTS_FILE)),
            data=tuple(one for one in sets if isinstance(one, dict)) if isinstance(sets, list) else (),
            measured=_object(place / STEP_FILE),
            plan=_object(place / PLAN_FILE),
            checkpoints=tuple(_steps(place / CHECKPOINTS)),
            changed_at=_changed_at(place / METRICS_FILE),
            missing=tuple(missing),
            line_count=metrics.count,
            value_counts=dict(metrics.values),
            gap_counts=dict(metrics.gaps),
            seconds=tuple(metrics.seconds),
            speed=metrics.median_speed(),
        )


def _object(path: Path, missing: list[str] | None = None) -> Record | None:
    """The JSON object in a file; None if there is none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        if missing is not None:
            missing.append(f"{path.name} is not there.")
        return None
    except (OSError, ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        if missing is not None:
            missing.append(f"{path.name} cannot be read.")
        return None
    return parsed


class LineReader:
    """The objects with a step in a JSON lines file, in `records`; reading again adds those that were added to it. The
    last line may be half-written; others that cannot be read are counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin_again()

    def _begin_again(self) -> None:
        self.records: list[Record] = []
        self.bad = 0
        self._end, self._last, self._file = 0, b"", 0

    def read(self, missing: list[str] | None = None) -> None:
        """Read what was added. What is wrong is named in `missing`."""
        try:
            with self.path.open("rb") as file:
                self._read_new(file)
        except OSError:
            self._begin_again()
            if missing is not None:
                missing.append(f"{self.path.name} is not there.")
            return
        if missing is not None and self.bad:
            missing.append(f"{self.bad:,} lines of {self.path.name} cannot be read and are left out.")
        if missing is not None and not self.records:
            missing.append(f"{self.path.name} has no values yet.")

    def _read_new(self, file: BinaryIO) -> None:
        file.seek(max(0, self._end - len(self._last)))
        if os.fstat(file.fileno()).st_ino != self._file or file.read(len(self._last)) != self._last:
            self._begin_again()  # another file, or one that was written anew: a resumed run drops later lines
            self._file = os.fstat(file.fileno()).st_ino
            file.seek(0)
        for line in file:
            try:
                record = json.loads(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    break  # half of a line
                self.bad += bool(line.strip())
            else:
                if isinstance(record, dict) and is_number(record.get("step")) and abs(record["step"]) <= LARGEST_STEP:
                    self.add(record)
                else:
                    self.bad += 1
            self._end, self._last = self._end + len(line), line

    def add(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)


class MetricsReader(LineReader):
    """The lines of `metrics.jsonl`, thinned where they are very many, and what must be known of all of them."""

    def _begin_again(self) -> None:
        super()._begin_again()
        self.count = 0
        self.values: Counter[str] = Counter()
        self.gaps: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._speeds = array("d")
        self._tokens = 0.0

    def add(self, record: Record) -> None:
        """Add one record."""
        self.count += 1
        for name, value in record.items():
            self.values[name] += 1
            if value is None or (type(value) is float and not math.isfinite(value)):
                self.gaps[name] += 1
        self.records.append(record)
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + self._seconds_of(record))
        if is_long(self.records):
            indices = indices_to_keep(self.records)
            self.records, self.seconds = [self.records[i] for i in indices], [self.seconds[i] for i in indices]

    def _seconds_of(self, record: Record) -> float:
        """The time that was spent on steps since the record before, reckoned from tokens and speed."""
        speed, tokens = _number(record.get("tokens_per_second")), _number(record.get("num_tokens"))
        if speed is not None:
            self._speeds.append(speed)
        if speed is None or tokens is None or speed <= 0:
            return 0.0
        trained, self._tokens = max(0.0, tokens - self._tokens), tokens
        return trained / speed

    def median_speed(self) -> float | None:
        """The median of tokens per second."""
        return sorted(self._speeds)[len(self._speeds) // 2] if self._speeds else None


def _number(value: Any) -> float | None:
    try:
        return finite_or_none(float(value)) if is_number(value) else None
    except OverflowError:
        return None


def _lines(path: Path) -> list[Record]:
    """The objects with a step in a JSON lines file."""
    reader = LineReader(path)
    reader.read()
    return reader.records


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
