"""Random numbers of a module that runs in slices: each slice draws what the whole module would have drawn.

Masks that are a function of a seed and of the row (`lora/fused_dropout.py`) are the same as without slices: the first
slice draws the seeds, the others repeat them, each with its own first row.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from fullshard.device import accelerator

_current = threading.local()


class SliceSeeds:
    """The seeds of one run of a module over its slices, in the order in which they are drawn."""

    def __init__(self) -> None:
        self.seeds: list[torch.Tensor] = []
        self.next = self.first_row = 0

    @contextlib.contextmanager
    def rows_from(self, first_row: int) -> Iterator[None]:
        """Inside, seeds are those of the slice that begins with this row."""
        before = getattr(_current, "seeds", None)
        self.next, self.first_row = 0, first_row
        _current.seeds = self
        try:
            yield
        finally:
            _current.seeds = before

    def take(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The next seeds [count, 2], each with the slice's first row."""
        if self.next == len(self.seeds):
            self.seeds.append(draw())
        seed = self.seeds[self.next]
        self.next += 1
        return torch.stack([seed, torch.full_like(seed, self.first_row)], dim=1)


def seeds_of_slice(draw: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `draw` gives [count]; inside a slice, the module's seeds with the slice's first row [count, 2]."""
    seeds: SliceSeeds | None = getattr(_current, "seeds", None)
    return draw() if seeds is None else seeds.take(draw)


class RandomState:
    """The states of torch's generators at one moment, on the host and on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = torch.get_rng_state()
        self.own = None if device.type == "meta" else accelerator.rng_state(device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers are those that followed this moment; the generators are not changed outside."""
        now = RandomState(self.device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self.host)
        if self.own is not None:
            accelerator.set_rng_state(self.device, self.own)
