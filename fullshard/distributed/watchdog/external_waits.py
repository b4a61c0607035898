"""Waits outside the engine: threads of the program that are blocked in a collective of torch.distributed.

Examples are a metric's all-reduce, a barrier in the user's script, and what torch's checkpoint library exchanges. The
watchdog did not issue these collectives, so it knows neither their number nor their ranks. It only sees that a thread
is at the same instruction in each scan. Such a wait can be long for good reasons (one rank prepares data) and is not
reported by itself; if a rank is lost meanwhile, it ends like any other wait.
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
class ExternalWait:
    """A thread that is blocked in a collective."""

    instruction: tuple[CodeType, int]
    since: float
    what: str


class ExternalWaits:
    """The blocked threads of this process, updated by each scan."""

    def __init__(self) -> None:
        self.by_thread: dict[int, ExternalWait] = {}

    def scan(self, now: float) -> None:
        """Find the threads that are blocked, and since when. Frames are not kept: they hold tensors."""
        waits = {}
        for thread, frame in sys._current_frames().items():
            if frame.f_code.co_filename.startswith(DISTRIBUTED) and thread != threading.get_ident():
                instruction = (frame.f_code, frame.f_lasti)
                before = self.by_thread.get(thread)
                same = before is not None and before.instruction == instruction
                waits[thread] = before if before and same else ExternalWait(instruction, now, _describe(frame))
        self.by_thread = waits

    def longest(self, excluding: int | None = None) -> ExternalWait | None:
        """The longest wait, without that of the thread `excluding`, whose wait the watchdog records itself."""
        waits = (wait for thread, wait in self.by_thread.items() if thread != excluding)
        return min(waits, key=lambda wait: wait.since, default=None)


def collective_of(error: BaseException) -> str:
    """The collective that raised an error; empty if none did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    inside = trace is not None and trace.tb_frame.f_code.co_filename.startswith(DISTRIBUTED)
    return _describe(trace.tb_frame) if trace is not None and inside else ""


def _describe(frame: FrameType) -> str:
    """The collective that was called, and the line of the program that called it."""
    name, line = frame.f_code.co_name, ""
    caller: Any = frame
    while caller is not None:
        file = caller.f_code.co_filename
        if file == COLLECTIVES:
            name = caller.f_code.co_name
        elif not file.startswith(TORCH) and not file.startswith("<"):
            line = f" at {os.path.basename(file)}:{caller.f_lineno}"
            break
        caller = caller.f_back
    return f"{name}{line}"
