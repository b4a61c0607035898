"""Follows the memory of tensors while operators run: from allocation to release, views counted with their base.

A tensor's memory is its storage. A mode of torch sees each operator's outputs; a weak reference to each new storage
tells when it is released. This works alike for real tensors and on the meta device, where nothing is computed.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.activations.slices import repeats
from fullshard.device.torch_private import (
    DispatchMode,
    operator_packet,
    saved_tensors_are_packed,
    schema_of,
    storage_id,
)
from fullshard.models.kernels_on_meta import FLOPS, KINDS, PLAIN, padded_operations

Workspaces = Mapping[Any, Callable[..., int]]
"""By operator, the bytes that it allocates while it runs besides its outputs, from its arguments."""
TENSORS = (torch.Tensor, nn.Parameter)
aten = torch.ops.aten
VIEWS = (aten._unsafe_view, aten.lift_fresh)
"""Operators whose result is a view, though they do not say so."""


@dataclass
class Work:
    """What operators compute and move."""

    flops: int = 0
    """Floating-point operations of products and attention."""
    read_write: int = 0
    """Bytes read and written."""
    kinds: Counter[str] = field(default_factory=Counter)
    """The operations by kind, with those of tiles that are not full."""
    recomputed: int = 0
    """Of the operations: those that repeat what forward has computed."""

    def count(self, operator: Any, args: Any, times: int = 1) -> None:
        """Add the operations of an operator that runs so many times with these arguments."""
        if operator in FLOPS:
            self.flops += times * FLOPS[operator](*args)
            self.kinds[KINDS.get(operator, PLAIN)] += times * padded_operations(operator, args)

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Mark:
    """A point in a trace."""

    events: int
    """Allocations and releases so far."""
    work: Work


class Change(NamedTuple):
    """An allocation, or with a negative size a release."""

    storage: int
    size: int


class Usage(NamedTuple):
    """Memory between two marks, relative to the first one."""

    peak: int
    kept: int


class _Operator(NamedTuple):
    """What is known of an operator."""

    is_view: bool
    packet: Any
    workspace: Callable[..., int] | None


class StorageTrace(DispatchMode):
    """Records allocations and releases of tensors' memory, matrix products, and bytes read and written.

    Sizes are rounded up to multiples of `rounding`, as the allocator does: 512 bytes on CUDA. `known` are tensors that
    exist already and are not counted.
    """

    def __init__(self, rounding: int = 1, known: Iterable[torch.Tensor] = (), workspaces: Workspaces | None = None):
        super().__init__()
        self.rounding = rounding
        self.changes: list[Change] = []
        self.work = Work()
        self._workspaces = workspaces or {}
        self.in_backward = False
        self._paused = False
        self._operators: dict[Any, _Operator] = {}
        self._numbers = itertools.count(1)
        self._known = {storage_id(t) for t in known}
        self._live: dict[int, tuple[int, int, Any]] = {}
        """By storage, its number, size and a weak reference."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if any(kind not in TENSORS for kind in types):
            return NotImplemented  # its own operators come here afterwards
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operator = self._operators.get(func) or self._look_up(func)
        if operator.is_view:
            return out
        outputs = [out] if isinstance(out, torch.Tensor) else [*_tensors(out)]
        if operator.workspace is not None:
            size = self.rounded(operator.workspace(*args, **kwargs))
            self.changes += [Change(0, size), Change(0, -size)]
        for t in outputs:
            self.add(t)
        before, times = self.work.flops, repeats()
        self.work.count(operator.packet, args, times)
        if self.in_backward and saved_tensors_are_packed():
            self.work.recomputed += self.work.flops - before
        read = sum(t.numel() * t.element_size() for t in _tensors((args, kwargs)))
        self.work.read_write += times * (read + sum(t.numel() * t.element_size() for t in outputs))
        return out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _look_up(self, func: Any) -> _Operator:
        schema, packet = schema_of(func), operator_packet(func)
        aliases = [a.alias_info for a in schema.returns if a.alias_info is not None]
        operator = self._operators[func] = _Operator(
            packet in VIEWS or any(not alias.is_write for alias in aliases),
            packet,
            self._workspaces.get(packet),
        )
        return operator

    def rounded(self, size: int) -> int:
        """A size as the allocator rounds it up."""
        return -(-size // self.rounding) * self.rounding

    def add(self, t: torch.Tensor) -> None:
        """Count a tensor's memory from now on, if it is not counted yet."""
        storage = t.untyped_storage()
        key = storage_id(t)
        if key in self._live or key in self._known:
            return
        number, size = next(self._numbers), self.rounded(storage.nbytes())
        self._live[key] = number, size, weakref.ref(storage, lambda _: self._release(key))
        self.changes.append(Change(number, size))

    def _release(self, key: int) -> None:
        number, size, _ = self._live.pop(key)
        self.changes.append(Change(number, -size))

    # --- results ------------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """This point in the trace."""
        return Mark(len(self.changes), self.work + Work())

    def size_of(self, t: torch.Tensor) -> int:
        """The counted size of a tensor's memory."""
        return self.rounded(t.untyped_storage().nbytes())

    def living(self) -> dict[int, int]:
        """The storages that are allocated now, and their sizes."""
        return {number: size for number, size, _ in self._live.values()}

    def number_of(self, t: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None if it is not counted."""
        entry = self._live.get(storage_id(t))
        return entry[0] if entry is not None else None

    def _settled(self, event: int) -> int:
        while event < len(self.changes) and self.changes[event].size < 0:
            event += 1
        return event

    def usage(self, start: Mark, end: Mark, without: Iterable[int] = ()) -> Usage:
        """The memory between two marks; some storages may be left out. What is released right after a mark, before
        anything else is allocated, belongs to what was before it: the last reference is that of a caller."""
        ignored, now, peak = set(without), 0, 0
        for storage, size in self.changes[self._settled(start.events) : self._settled(end.events)]:
            if storage not in ignored:
                now += size
                peak = max(peak, now)
        return Usage(peak, now)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
