"""The events of a run, in `events.jsonl`: it starts, is resumed, saves a checkpoint, warns, fails, ends."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from fullshard import runtime
from fullshard.errors import first_line
from fullshard.redaction import hide
from fullshard.reporting.records import EVENTS_FILE

MOST = 500
"""The most warnings of a run that are recorded."""


class EventLog:
    """Appends events to a file, the warnings of fullshard's logger among them. A callback of the run, on the first rank
    only. Until training begins, and the folder is the run's, events are kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.path, self.step = folder / EVENTS_FILE, 0
        self._early: list[dict[str, Any]] | None = []
        self._warnings = 0
        handler, logger = _Warnings(self), runtime.get_logger()
        for earlier in [one for one in logger.handlers if isinstance(one, _Warnings)]:
            logger.removeHandler(earlier)  # of a trainer that a script still holds
        logger.addHandler(handler)
        weakref.finalize(self, logger.removeHandler, handler)

    def add(self, kind: str, text: str = "") -> None:
        """Record an event of the current step."""
        event = {"time": time.time(), "step": self.step, "kind": kind, "text": hide(text)}
        if self._early is not None:
            self._early.append(event)
            return
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def warn(self, text: str) -> None:
        """Record a warning."""
        self._warnings += 1
        if self._warnings <= MOST:
            self.add("warning", text)

    def close(self) -> None:
        """Record the exception that ends training, if there is one."""
        error = sys.exception()
        if error is not None and self._early is None:
            stopped = isinstance(error, SystemExit | KeyboardInterrupt)
            self.add("stopped" if stopped else "failed", f"{type(error).__name__}: {first_line(error)}")

    # --- events of the run ------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.step, early = state.global_step, self._early or []
        if not self.step:
            self.path.unlink(missing_ok=True)  # of a training that starts again
        self._early = None
        self.add(*(("resume", f"resumed at step {self.step}") if self.step else ("start",)))
        for event in early:
            self.add(event["kind"], event["text"])

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.add("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.add("end")


class _Warnings(logging.Handler):
    """Hands warnings to a log that is still in use."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._log = weakref.ref(log)

    def emit(self, record: logging.LogRecord) -> None:
        if (log := self._log()) is not None:
            log.warn(record.getMessage())
