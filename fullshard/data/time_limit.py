"""A limit on the processor time of chat templates, which are programs that come with a model.

A thread of its own looks at calls that are running, and ends one that is over its limit by raising an exception in its
thread, which Python does between two operations of the program.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fullshard.config.errors import ConfigError

T = TypeVar("T")

SECONDS = 10.0
"""Processor time that a call may use; the work of other processes does not count."""
INTERVAL = 0.5
"""Seconds between looks at the calls."""


class _OutOfTime(BaseException):
    """Raised in a call that is over its limit. No `except Exception` of the program stops it."""


@dataclass(eq=False)
class _Call:
    """A call that is running."""

    thread: int
    end: float
    """The processor time of its thread at which it is over its limit."""
    interrupted: bool = False


_calls: set[_Call] = set()
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def run_limited(job: Callable[[], T]) -> T:
    """The result of `job`, which renders a chat template; raises `ConfigError` if it uses too much processor time."""
    try:
        call = _begin()
        try:
            return job()
        finally:
            _end(call)
    except _OutOfTime:
        raise ConfigError(
            f"the chat template was stopped after {SECONDS:g} s of processor time for one conversation: a loop in it "
            f"may never end. Choose another template (chat_template_format, chat_template_path)."
        ) from None


def _begin() -> _Call:
    global _watcher
    thread = threading.get_ident()
    call = _Call(thread, _processor_time(thread) + SECONDS)
    with _lock:
        _calls.add(call)
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="fullshard-time-limit", daemon=True)
            _watcher.start()
    return call


def _end(call: _Call) -> None:
    with _lock:
        _calls.discard(call)
        if call.interrupted:  # should the exception still be on its way, it would be raised after the call
            _raise_in(call.thread, None)


def _watch() -> None:
    """Interrupt calls that are over their limit, until there are none."""
    global _watcher
    while True:
        time.sleep(INTERVAL)
        with _lock:
            for call in [call for call in _calls if _processor_time(call.thread) > call.end]:
                _calls.discard(call)
                call.interrupted = True
                _raise_in(call.thread, _OutOfTime)
            if not _calls:
                _watcher = None
                return


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread; None withdraws one that has not been raised yet."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _processor_time(thread: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
