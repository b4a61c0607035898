"""The records that a run writes: names of its files, a sample generation, which values are numbers, and how a long
series of records stays within bounded memory.

Records are dictionaries with a `step`, such as the lines of `metrics.jsonl`. Of a long series the extreme values of
each of many equal stretches stay, and the newest records. Thinning again, after more records were added, loses nothing
that is extreme in the longer stretches.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

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


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite_or_none(value: Any) -> Any:
    """The value; None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- long series ----------------------------------------------------------------------------------------------------

Record = Mapping[str, Any]
TARGET = 10_000
"""About as many records stay of a longer series."""
LONG = 2 * TARGET
"""A series of fewer records is not thinned."""
RECENT = 1_000
"""The newest records, which always stay."""
ABSENT = object()
"""Stands for the value of a record without that name."""


def is_long(records: Sequence[Record]) -> bool:
    """Whether it is time to thin records that are added one by one."""
    return len(records) >= LONG and len(records) % RECENT == 0  # seldom, even if thinning leaves nearly all of them


def add_thinned(records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Append a record to a list, which is thinned in place when it is long."""
    records.append(record)
    if is_long(records):
        records[:] = [records[i] for i in indices_to_keep(records)]


def indices_to_keep(records: Sequence[Record]) -> list[int]:
    """The indices of the records that stay: of each stretch of steps those with the lowest, the highest, the first, the
    last and the first non-finite value of each name; and the newest."""
    old = max(0, len(records) - RECENT)
    steps = list(itertools.accumulate((records[i]["step"] for i in range(old)), max))
    names = {name for record in records for name in record}
    # Most names come with every record, and share its first and its last.
    stretches = max(1, TARGET // (2 * len(names) + 3))
    while True:
        indices = [i for part in _stretches(steps, stretches) for i in _extremes(records, part)]
        if len(indices) <= TARGET or stretches == 1:
            return [*indices, *range(old, len(records))]
        stretches = max(1, stretches * TARGET // len(indices))


def _stretches(steps: Sequence[float], number: int) -> Iterator[range]:
    """About so many stretches of equally many steps, as ranges of indices."""
    begin = 0
    for n in range(1, number + 1):
        end = bisect.bisect_right(steps, steps[0] + (steps[-1] - steps[0]) * n / number) if steps else 0
        end = len(steps) if n == number else end
        if end > begin:
            yield range(begin, end)
            begin = end


def _extremes(records: Sequence[Record], part: range) -> list[int]:
    indices = {part[0], part[-1]}
    if len(part) > 2:
        for name in {name for i in part for name in records[i]}:
            indices |= {part[i] for i in _extremes_of([records[i].get(name, ABSENT) for i in part])}
    return sorted(indices)


def _extremes_of(column: list[Any]) -> set[int]:
    """The indices to keep for one name."""
    try:
        if math.isfinite(sum(column)):
            return {0, len(column) - 1, column.index(min(column)), column.index(max(column))}
    except (TypeError, OverflowError):
        pass  # not all of them are numbers
    there = [i for i, value in enumerate(column) if value is not ABSENT]
    numbers = [i for i in there if is_number(column[i]) and finite_or_none(column[i]) is not None]
    gaps = [i for i in there if finite_or_none(column[i]) is None]
    indices = {there[0], there[-1], *gaps[:1]}
    if numbers:
        indices |= {min(numbers, key=column.__getitem__), max(numbers, key=column.__getitem__)}
    return indices
