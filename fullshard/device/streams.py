"""Side streams: work that runs beside compute, and the rule for tensors that two streams use.

**A tensor that a stream other than its own reads or writes is kept alive until its own stream has waited for that
work.**

torch reuses the memory of a released tensor at once for the next tensor of the same stream. That is safe inside one
stream, which runs in order. Another stream is not ordered with it and would read or overwrite the next tensor's values.
`AsyncWork` is the only place that releases what was kept. The opposite direction needs no care: a side stream starts
each piece of work by waiting for compute (`SideStream.run`), so compute has finished with the memory that it allocates.

Without streams (on CPUs) the work runs where it is called, and nothing is kept.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from fullshard.device import accelerator


class AsyncWork(ABC):
    """Work beside compute, with the tensors it needs until compute has waited for it."""

    def __init__(self, *kept: Any) -> None:
        self._kept: list[Any] = [*kept]

    def keep(self, *tensors: Any) -> None:
        """Keep tensors, or objects that hold them, until the work has been waited for."""
        self._kept += tensors

    def join(self) -> None:
        """Make the current stream wait for the work, then release what was kept."""
        self._wait()
        self._kept = []

    @abstractmethod
    def _wait(self) -> None:
        """Make the current stream wait for the work."""


class StreamWork(AsyncWork):
    """Work on a side stream."""

    def __init__(self, device: torch.device, streams: bool):
        super().__init__()
        self._device, self._streams = device, streams
        self._end: torch.Event | None = None

    def keep(self, *tensors: Any) -> None:
        """Keep tensors alive until the work is joined, where there are side streams."""
        if self._streams:
            super().keep(*tensors)

    def ended(self, event: torch.Event) -> None:
        """Record the event that marks the end of the work."""
        self._end = event

    def _wait(self) -> None:
        if self._end is not None:
            accelerator.current_stream(self._device).wait_event(self._end)

    def join_host(self) -> None:
        """Make the host wait for the work; it may then read the copies and overwrite their sources."""
        if self._end is not None:
            self._end.synchronize()
        self._kept = []


class SideStream:
    """A stream beside compute, for one purpose."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = accelerator.new_stream(device)

    def join_host(self) -> None:
        """Make the host wait for everything queued on the stream so far."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def run(self) -> Iterator[StreamWork]:
        """Run the body on the side stream, after all compute queued so far; whoever needs the result joins the work."""
        work = StreamWork(self.device, self._stream is not None)
        if self._stream is None:
            yield work
            return
        compute = accelerator.current_stream(self.device)
        self._stream.wait_stream(compute)
        try:
            with self._stream:
                yield work
        except BaseException:
            compute.wait_stream(self._stream)  # nobody will join the work, and what it kept is released now
            raise
        work.ended(self._stream.record_event())
