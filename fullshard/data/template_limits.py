"""Limits on the processor time and the memory of chat templates, which are programs that come with a model.

A thread of its own looks at calls that are running, and ends one that is over a limit by raising an exception in its
thread, which Python does between two operations of the program. So single operations have limits too: products and
powers, of numbers and of texts.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import ConfigError

T = TypeVar("T")

SECONDS = 10.0
"""Processor time that a call may use; the work of other processes does not count."""
BYTES = 2**31
"""Memory by which this process may grow during a call that lasts."""
CHARACTERS = 2**26
"""The longest text that a call may make, and the longest text or list that is a product."""
BITS = 2**12
"""The size of the largest number that is a product or a power."""
INTERVAL = 0.5
"""Seconds between looks at the calls."""


class _Interrupted(BaseException):
    """Raised in a call that is over a limit. No `except Exception` of the program stops it."""


@dataclass(eq=False)
class _Call:
    """A call that is running."""

    thread: int
    end: float
    """The processor time of its thread at which it is over its limit."""
    memory: int | None = None
    """The memory of the process when the call was first looked at."""
    excess: str = ""
    """What it used too much of, once it is interrupted."""


_calls: set[_Call] = set()
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def run_limited(job: Callable[[], T]) -> T:
    """The result of `job`, which renders a chat template; raises `ConfigError` if it uses too much time or memory."""
    limit_operators()
    call = None
    try:
        call = _begin()
        try:
            return job()
        finally:
            _end(call)
    except _Interrupted:
        raise _over(call.excess if call is not None else "") from None
    except MemoryError:
        raise _over("was stopped for want of memory") from None


def check_length(text: str) -> None:
    """Raise `ConfigError` for a text that no conversation makes."""
    if len(text) > CHARACTERS:
        raise _over(f"made a text of {len(text):,} characters")


def _over(what: str) -> ConfigError:
    return ConfigError(
        f"the chat template {what} for one conversation: a loop in it may never end. Choose another template "
        f"(chat_template_format, chat_template_path)."
    )


def _begin() -> _Call:
    global _watcher
    thread = threading.get_ident()
    call = _Call(thread, _processor_time(thread) + SECONDS)
    with _lock:
        _calls.add(call)
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="fullshard-template-limits", daemon=True)
            _watcher.start()
    return call


def _end(call: _Call) -> None:
    with _lock:
        _calls.discard(call)
        if call.excess:  # should the exception still be on its way, it would be raised after the call
            _raise_in(call.thread, None)


def _watch() -> None:
    """Interrupt calls that are over their limit, until there are none."""
    global _watcher
    while True:
        time.sleep(INTERVAL)
        with _lock:
            memory = _resident()
            for call in list(_calls):
                call.memory = memory if call.memory is None else call.memory
                if _processor_time(call.thread) > call.end:
                    call.excess = f"was stopped after {SECONDS:g} s of processor time"
                elif memory - call.memory > BYTES:
                    call.excess = f"was stopped when it used more than {memory_size(BYTES)} of memory"
                else:
                    continue
                _calls.discard(call)
                _raise_in(call.thread, _Interrupted)
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


def _resident() -> int:
    """The memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# --- single operations ----------------------------------------------------------------------------------------------


@functools.cache
def limit_operators() -> None:
    """Limit products and powers in all sandboxes of Jinja: Python cannot interrupt one. Once per process."""
    from jinja2.sandbox import SandboxedEnvironment

    SandboxedEnvironment.intercepted_binops |= {"*", "**"}
    table = SandboxedEnvironment.default_binop_table
    SandboxedEnvironment.default_binop_table = {**table, "*": _product, "**": _power}


def _product(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(other, int):
            size = one.bit_length() + other.bit_length() if isinstance(one, int) else 0
            length = len(one) * other if isinstance(one, str | list | tuple) else 0
            _check_result(size, length)
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_result(left.bit_length() * right, 0)
    return operator.pow(left, right)


def _check_result(bits: int, length: int) -> None:
    if bits > BITS or length > CHARACTERS:
        raise OverflowError(f"a result of {f'{bits:,} bits' if bits > BITS else f'{length:,} elements'}")
