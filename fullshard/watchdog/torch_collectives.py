"""Waits outside the engine: threads of the program that stand in a collective of torch.distributed.

A metric's sum, a barrier of the script, what torch's checkpoint library exchanges: the watch did not issue them, so it
knows neither their number nor which ranks belong to them. It sees that a thread is in the same place at every look, and
where. Such a wait may be long for good reasons (one rank prepares data, say) and is not reported by itself; but if a
rank is lost meanwhile it ends like any other.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

TORCH = os.path.dirname(torch.__file__) + os.sep
DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
COLLECTIVES = dist.distributed_c10d.__file__


@dataclass(frozen=True)
class Standing:
    """A thread that stands in a collective."""

    place: tuple[CodeType, int]
    since: float
    what: str


class Outside:
    """The threads of this process, look by look."""

    def __init__(self) -> None:
        self.standing: dict[int, Standing] = {}

    def look(self, now: float) -> None:
        """Note which threads stand where they stood at the last look. Frames are not kept: they hold tensors."""
        found = {}
        for thread, frame in sys._current_frames().items():
            if frame.f_code.co_filename.startswith(DISTRIBUTED) and thread != threading.get_ident():
                place = (frame.f_code, frame.f_lasti)
                before = self.standing.get(thread)
                found[thread] = before if before and before.place == place else Standing(place, now, _in_words(frame))
        self.standing = found

    def longest(self, but: int | None = None) -> Standing | None:
        """The thread that has stood for longest; `but` is one that the watch knows to wait."""
        return min((s for t, s in self.standing.items() if t != but), key=lambda one: one.since, default=None)


def raised_in(error: BaseException) -> str:
    """The collective that an error came from; empty if it came from none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    inside = trace is not None and trace.tb_frame.f_code.co_filename.startswith(DISTRIBUTED)
    return _in_words(trace.tb_frame) if trace is not None and inside else ""


def _in_words(frame: FrameType) -> str:
    """The collective that was called, and from where."""
    name, at = frame.f_code.co_name, ""
    here: Any = frame
    while here is not None:
        file = here.f_code.co_filename
        if file == COLLECTIVES:
            name = here.f_code.co_name
        elif not file.startswith(TORCH) and not file.startswith("<"):
            at = f" at {os.path.basename(file)}:{here.f_lineno}"
            break
        here = here.f_back
    return f"{name}{at}"
