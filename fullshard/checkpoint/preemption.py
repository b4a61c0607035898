"""Signals that ask a job to stop: the first one is recorded, a second one ends the process at once.

Python's C-level signal handler writes each signal to a pipe, even while the training thread is inside a collective, and
a separate thread reads the pipe. So a second signal works even if training hangs. `CheckpointManager` acts on the
first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

EXIT_PREEMPTED = 75
"""The exit code of a job that saved and stopped on request: EX_TEMPFAIL of sysexits.h."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO = 0.5
"""Seconds in which repeats of a signal count once: schedulers and terminals send it to every process of a job, and the
launcher forwards its own."""


def _runtime() -> Any:
    from fullshard.distributed import runtime  # imports torch, which the launcher should not wait for

    return runtime


class SignalListener:
    """Records the signals of this process while installed."""

    def __init__(self, signals: Sequence[int]):
        self.signals = tuple(signals)
        self.seen: int | None = None
        """The first signal received."""
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def install(self) -> bool:
        """Install the handlers. Returns False outside the main thread, where Python does not allow it."""
        if self._pipe is not None:
            return True
        if threading.current_thread() is not threading.main_thread():
            _runtime().warn_once(
                "signals off the main thread",
                f"signals ({', '.join(signal.Signals(s).name for s in self.signals)}) cannot be handled outside the "
                f"main thread; call manager.preempt() when your program should stop",
            )
            return False
        _runtime()  # takes seconds, which the listener must not spend between two signals
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        for number in self.signals:
            if signal.getsignal(number) is None:
                continue  # installed outside Python (by faulthandler.register, for example): leave it in place
            self._before[number] = signal.signal(number, lambda *_: None)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(self._pipe[0],), name="fullshard-signals", daemon=True).start()
        return True

    def _listen(self, source: int) -> None:
        while True:
            try:
                numbers = os.read(source, 64)
            except OSError:
                return
            for number in numbers:
                if number == 0:  # from `remove`
                    os.close(source)
                    return
                if number not in self._before:
                    if self._wakeup_before >= 0:
                        with contextlib.suppress(OSError):
                            os.write(self._wakeup_before, bytes([number]))
                    continue
                name = signal.Signals(number).name
                if number == self.seen and time.monotonic() - self._since < ECHO:
                    continue
                if self.seen is not None:
                    _runtime().get_logger(all_ranks=True).warning("%s again: ending at once", name)
                    os._exit(128 + number)
                self.seen, self._since = number, time.monotonic()
                _runtime().get_logger(all_ranks=True).warning(
                    "%s: saving at the end of this step, then exiting; another signal ends at once", name
                )

    def remove(self) -> None:
        """Remove the handlers and restore the previous ones."""
        if self._pipe is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        os.write(self._pipe[1], b"\0")
        os.close(self._pipe[1])
        self._pipe = None
