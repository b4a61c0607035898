"""Analyzes a profiler trace: how much kinds of GPU work overlap, and where the host waits.

It only reads the events of a Chrome trace exported by `torch.profiler`, so it can be tested without a GPU. Times are in
microseconds. The phases of a step are marked with `record_function(PHASE + name)`.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PHASE = "bench:"
WAITS = {
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize",
    "cuEventSynchronize", "cuCtxSynchronize", "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero",
    "aten::nonzero",
}  # fmt: skip
"""Calls in which the host waits for the GPU."""
ALLOCATIONS = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister"}
"""Calls that may make the host wait, and that a step after the first should not need."""
PAGEABLE = "copy from or to pageable memory"

Interval = tuple[float, float]

# --- intervals --------------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points that lie in both."""
    left, right = union(a), union(b)
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The time covered, counted once where intervals overlap."""
    return sum(end - start for start, end in union(intervals))


# --- what the events say ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A kernel or a copy on the GPU."""

    kind: str
    """"nccl", "kernel", "htod", "dtoh", "dtod" or "memset"."""
    name: str
    span: Interval
    stream: Any
    phase: str
    """The phase in which the host gave it to the GPU; "" outside of all."""


@dataclass(frozen=True)
class Wait:
    """A call in which the host waits, or may wait, for the GPU."""

    call: str
    phase: str
    where: str
    """The innermost Python function around it if the trace has stacks, else the operator or annotation."""
    microseconds: float


@dataclass
class Trace:
    """What happened in the marked phases of a trace."""

    work: list[Work]
    waits: list[Wait]
    steps: int
    unplaced: int = 0
    """Pieces of GPU work whose launch is not in the trace; they were given to a phase by their own time."""
    phases: dict[str, list[Interval]] = field(default_factory=dict)

    def spans(self, kind: str, phase: str | None = None) -> list[Interval]:
        return [w.span for w in self.work if w.kind == kind and phase in (None, w.phase)]

    def compute(self) -> list[Interval]:
        """The kernels, but for NCCL's, of the stream that computes: the one with the most kernel time."""
        by_stream: dict[Any, list[Interval]] = defaultdict(list)
        for w in self.work:
            if w.kind == "kernel":
                by_stream[w.stream].append(w.span)
        return max(by_stream.values(), key=length, default=[])

    def beside_compute(self, kind: str, phase: str) -> dict[str, float | None]:
        """Milliseconds per step of one kind of work given in a phase, how many of them beside compute, their share."""
        spans = self.spans(kind, phase)
        total, beside = length(spans), length(intersection(spans, self.compute()))
        each = 1e3 * max(1, self.steps)
        return {
            "ms": round(total / each, 3),
            "beside_ms": round(beside / each, 3),
            "share": round(beside / total, 3) if total else None,
        }

    def waits_per_step(self) -> list[dict[str, Any]]:
        """Host waits by place, most time first."""
        count: Counter[tuple[str, str, str]] = Counter()
        time: Counter[tuple[str, str, str]] = Counter()
        for w in self.waits:
            count[w.phase, w.call, w.where] += 1
            time[w.phase, w.call, w.where] += w.microseconds  # type: ignore[assignment]
        steps = max(1, self.steps)
        return [
            {
                "phase": phase,
                "call": call,
                "where": where,
                "per_step": round(count[phase, call, where] / steps, 2),
                "ms_per_step": round(time[phase, call, where] / steps / 1e3, 3),
            }
            for phase, call, where in sorted(count, key=lambda key: -time[key])
        ]


def read(events: Sequence[dict[str, Any]]) -> Trace:
    """The GPU work and the host's waits of the marked phases."""
    timed = [e for e in events if e.get("ph") == "X" and "ts" in e]
    phases: dict[str, list[Interval]] = defaultdict(list)
    for e in timed:
        if e.get("cat") == "user_annotation" and str(e["name"]).startswith(PHASE):
            phases[str(e["name"]).removeprefix(PHASE)].append(_span(e))
    at = _Phases(phases)
    launches = {
        e["args"]["correlation"]: e
        for e in timed
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and e.get("args", {}).get("correlation") is not None
    }
    work, waits, unplaced = [], [], 0
    around = _Around(timed)
    for e in timed:
        kind, name, arguments = kind_of(e), str(e["name"]), e.get("args", {})
        if kind is not None:
            launch = launches.get(arguments.get("correlation"))
            unplaced += launch is None
            phase = at.phase(float((launch or e)["ts"]))
            work.append(Work(kind, name, _span(e), arguments.get("stream"), phase))
            if "Pageable" in name and phase and launch is not None:
                waits.append(Wait(PAGEABLE, phase, around.place(launch), float(launch.get("dur", 0))))
    for e in _outermost(timed):
        phase = at.phase(float(e["ts"]))
        if phase:
            waits.append(Wait(str(e["name"]), phase, around.place(e), float(e.get("dur", 0))))
    steps = max((len(spans) for spans in phases.values()), default=0)
    return Trace(work, waits, steps, unplaced, dict(phases))


def kind_of(event: dict[str, Any]) -> str | None:
    """What kind of GPU work an event is; None for everything else."""
    name = str(event["name"]).lower()
    if event.get("cat") == "kernel":
        return "nccl" if "nccl" in name else "kernel"
    if event.get("cat") == "gpu_memcpy":
        return next((kind for kind in ("htod", "dtoh") if kind in name), "dtod")
    return "memset" if event.get("cat") == "gpu_memset" else None


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that wait, without those inside another one: `item` copies and synchronises. An operator counts only
    if it calls CUDA at all, where anything does: the same `item` of a CPU tensor waits for nobody."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e.get("cat") in ("cuda_runtime", "cuda_driver") or e["name"] in WAITS:
            threads[e.get("tid")].append(e)
    any_cuda = any(e["cat"] != "cpu_op" for calls in threads.values() for e in calls)
    found = []
    for calls in threads.values():
        calls.sort(key=lambda e: (float(e["ts"]), -float(e.get("dur", 0))))
        end = float("-inf")  # of the last call that counted
        for i, e in enumerate(calls):
            if float(e["ts"]) < end or e["name"] not in WAITS | ALLOCATIONS:
                continue
            inside = itertools.takewhile(lambda c, e=e: float(c["ts"]) < _span(e)[1], calls[i + 1 :])  # type: ignore[misc]
            if e["cat"] == "cpu_op" and any_cuda and all(c["cat"] == "cpu_op" for c in inside):
                continue
            end = _span(e)[1]
            found.append(e)
    return found


def _span(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))


class _Phases:
    """Finds the phase of a moment. Backward runs on a thread of its own while the one that called it waits, so the
    moment decides, not the thread."""

    def __init__(self, phases: dict[str, list[Interval]]) -> None:
        self.spans = sorted((span, name) for name, spans in phases.items() for span in spans)

    def phase(self, moment: float) -> str:
        place = bisect.bisect_right(self.spans, ((moment, float("inf")), "")) - 1
        if place >= 0 and self.spans[place][0][0] <= moment <= self.spans[place][0][1]:
            return self.spans[place][1]
        return ""


class _Around:
    """Finds what a call on the host happened in."""

    KINDS = ("python_function", "user_annotation", "cpu_op")
    INNER = ("torch/", "nn.Module:", "<built-in", "threading.py", "contextlib.py", "/site-packages/torch/")
    """Python functions that say nothing about who called."""
    ASYNCHRONOUS = ("gloo:", "nccl:", "c10d::")
    """Marks that last until the communication ends, whatever the host does in the meantime."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for e in events:
            if e.get("cat") in self.KINDS:
                self.threads[e.get("tid")].append(e)
        self.spans = {tid: np.array([_span(e) for e in on]) for tid, on in self.threads.items()}

    def place(self, call: dict[str, Any]) -> str:
        start, end = _span(call)
        on, spans = self.threads.get(call.get("tid"), []), self.spans.get(call.get("tid"), np.empty((0, 2)))
        around = np.nonzero((spans[:, 0] <= start) & (spans[:, 1] >= end))[0]
        inside = [on[i] for i in around if on[i] is not call]
        inside.sort(key=lambda e: (_span(e)[1] - _span(e)[0], -float(e["ts"])))  # innermost first
        frames = [str(e["name"]) for e in inside if e["cat"] == "python_function"]
        told = [frame for frame in frames if not any(word in frame for word in self.INNER)]
        others = [str(e["name"]) for e in inside if e["cat"] != "python_function"]
        others = [name for name in others if not name.startswith(self.ASYNCHRONOUS)]
        first = (told or [o for o in others if not o.startswith(PHASE)] or frames or others or ["unknown"])[0]
        return first if not (told and others) or others[0].startswith(PHASE) else f"{first} in {others[0]}"
