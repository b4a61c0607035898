"""Work that runs beside compute, and the one rule for memory that crosses streams.

**A tensor that a stream other than its own reads or writes is kept until its own stream has waited for that work.**

torch gives the memory of a tensor that nobody holds any more to the next tensor of the same stream, at once: a stream
runs in order, so whatever it still had to do with the old tensor comes first. Another stream knows nothing of that
order and would read the next tensor's values, or write over them. `Beside` is the only place where what was kept is let
go. The other way round needs no care: a side stream begins every piece of work by waiting for compute (`Lane.run`), so
memory that it allocates was last used before that.

Without streams (on CPUs) work runs where it is called, and a lane keeps nothing.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from fullshard import accelerator


class Beside(ABC):
    """Work beside compute, and what it needs until compute has waited for it."""

    def __init__(self, *kept: Any) -> None:
        self._kept: list[Any] = [*kept]

    def keep(self, *tensors: Any) -> None:
        """Hold tensors, or whatever holds them, until the work has been waited for."""
        self._kept += tensors

    def join(self) -> None:
        """Let the current stream wait for the work; then what was kept may go."""
        self._wait()
        self._kept = []

    @abstractmethod
    def _wait(self) -> None:
        """Let the current stream wait for the work."""


class Aside(Beside):
    """Work on a lane."""

    def __init__(self, device: torch.device, streams: bool):
        super().__init__()
        self._device, self._streams = device, streams
        self._end: torch.Event | None = None

    def keep(self, *tensors: Any) -> None:
        if self._streams:
            super().keep(*tensors)

    def ended(self, event: torch.Event) -> None:
        """Take note of the end of the work."""
        self._end = event

    def _wait(self) -> None:
        if self._end is not None:
            accelerator.current_stream(self._device).wait_event(self._end)

    def join_host(self) -> None:
        """Let the host wait for the work: it may then read what was copied, and write over what was copied from."""
        if self._end is not None:
            self._end.synchronize()
        self._kept = []


class Lane:
    """A stream beside compute for one purpose."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = accelerator.new_stream(device)

    def join_host(self) -> None:
        """Let the host wait for everything given to the lane so far."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def run(self) -> Iterator[Aside]:
        """Run what follows beside compute, after everything compute was given so far; whoever needs it joins it."""
        work = Aside(self.device, self._stream is not None)
        if self._stream is None:
            yield work
            return
        compute = accelerator.current_stream(self.device)
        self._stream.wait_stream(compute)
        try:
            with self._stream:
                yield work
        except BaseException:
            compute.wait_stream(self._stream)  # nobody will join it, and what it kept goes now
            raise
        work.ended(self._stream.record_event())
