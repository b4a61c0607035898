"""Counts every byte that torch holds on the CPU, from the log of its allocator: the oracle for planned memory.

torch's profiler records each allocation and release where it happens, whoever asks for it: operators, their internal
workspaces, autograd, optimizers, and storages that are resized in place, as the engine does with gathered values.
Nothing is derived from shapes, and a tensor that is kept too long counts for as long as it is kept. Memory that torch
does not allocate is not seen: buffers of Gloo and of numpy. Files that torch maps into memory count while they are.

    with MemoryTracker() as tracker:
        tracker.mark("forward")
        …
    tracker.peaks["forward"], tracker.peak, tracker.end

What was allocated before is not counted, and neither is its release. A release by a thread that Python does not know is
not recorded: Gloo's threads may drop the last reference to a tensor of a collective. Such a block counts until its
address is used again; the engine's own messages are not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "moment: "


@dataclass(frozen=True)
class Change:
    """An allocation, or a release (negative)."""

    time: int
    address: int
    bytes: int
    event: Any
    """The profiler's event."""

    @property
    def where(self) -> str:
        """The operators that were running, outermost first."""
        names, event = [], self.event.parent
        while event is not None:
            names.append(event.name)
            event = event.parent
        return " › ".join(reversed(names))


class MemoryTracker:
    """Follows torch's CPU memory inside a `with` block."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self.changes: list[Change] = []
        self.marks: list[tuple[int, str]] = []

    def mark(self, moment: str) -> None:
        """From here on, memory belongs to this moment."""
        with record_function(MARK + moment):
            pass

    def __enter__(self) -> MemoryTracker:
        self._profile.__enter__()
        self.mark("begin")
        return self

    def __exit__(self, *error: Any) -> None:
        self.mark("end")
        self._profile.__exit__(*error)
        results: Any = self._profile.profiler
        waiting = list(results.kineto_results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.typed[0].name == "Allocation":
                found = event.extra_fields
                if found.device.type == "cpu":
                    self.changes.append(Change(event.start_time_ns, found.ptr, found.alloc_size, event))
            elif event.name.startswith(MARK):
                self.marks.append((event.start_time_ns, event.name.removeprefix(MARK)))
        self.changes.sort(key=lambda change: change.time)
        self.marks.sort()

    # --- results ------------------------------------------------------------------------------------------------------

    def timeline(self) -> Iterator[tuple[str, int, Change]]:
        """Every change with its moment and the bytes held after it."""
        total, marks, moment = 0, iter(self.marks), ""
        following = next(marks, None)
        held: dict[int, int] = {}
        for change in self.changes:
            while following is not None and following[0] <= change.time:
                moment, following = following[1], next(marks, None)
            total += change.bytes - (held.pop(change.address, 0) if change.bytes > 0 else 0)
            if change.bytes > 0:
                held[change.address] = change.bytes
            else:
                held.pop(change.address, None)
            yield moment, total, change

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes held during each moment, those held at its start included."""
        found: dict[str, int] = dict.fromkeys((name for _, name in self.marks), 0)
        before, last = 0, ""
        for moment, total, _ in self.timeline():
            if moment != last:
                found[moment] = max(found.get(moment, 0), before)
            found[moment] = max(found.get(moment, 0), total)
            before, last = total, moment
        return found

    @property
    def peak(self) -> int:
        return max((total for _, total, _ in self.timeline()), default=0)

    @property
    def end(self) -> int:
        """Bytes still held at the end."""
        return next((total for _, total, _ in reversed(list(self.timeline()))), 0)

    def held_at_peak(self, moment: str | None = None) -> Counter[str]:
        """What was held when the most was (during one moment), by the operators that allocated it."""
        held: dict[int, Change] = {}
        most, found, snapshot = -1, Counter[str](), list[Change]()
        for now, total, change in self.timeline():
            if change.bytes > 0:
                held[change.address] = change
            else:
                held.pop(change.address, None)
            if total > most and moment in (None, now):
                most = total
                snapshot = list(held.values())
        for each in snapshot:
            found[each.where] += each.bytes
        return found
