"""One unit: parameters that are gathered and freed together.

A unit executes its part of the plan; `engine.py` decides when. `reduction.py` reduces its gradients.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.device.streams import SideStream, StreamWork
from fullshard.distributed import runtime
from fullshard.fsdp.comm import Link, Pending
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.offload import HostTraffic
from fullshard.fsdp.parameter import ShardedParameter, copy_together, show_gathered, show_shards, writes_of_all
from fullshard.fsdp.plan import Bucket, UnitPlan
from fullshard.fsdp.strategy import MixedPrecision


@dataclass
class EngineContext:
    """The communicators, streams and counters that all units of an engine share."""

    gather_link: Link
    reduce_link: Link
    replica_link: Link
    meter: Meter
    grad_factor: float
    """What reduced gradients are multiplied by, where a rank's parameters meet the rows of other ranks (experts)."""
    term_links: Mapping[tuple[str, ...], Link]
    """By local axes along which ranks have terms of gradients."""
    gather_stream: SideStream
    reduce_stream: SideStream
    host: HostTraffic


class UnitState(enum.Enum):
    """Whether a unit has gathered values."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """The parameters of a module that no unit inside it has, sharded."""

    def __init__(
        self,
        plan: UnitPlan,
        index: int,
        context: EngineContext,
        holds_units: bool,
        module: nn.Module,
        parameters: Sequence[ShardedParameter],
        precision: MixedPrecision,
        keeps: bool,
        output_dtype: torch.dtype | None,
    ):
        self.join(plan, index, context, holds_units)
        self.module, self.parameters, self.precision = module, list(parameters), precision
        self.keeps_after_forward = keeps
        """Whether gathered values are kept between forward and backward."""
        self.output_dtype = output_dtype
        """The dtype its outputs are cast to. Only modules that the user wrapped cast theirs, not units of a policy."""
        self.casts = 0
        """How often its parameters were cast to another dtype, which invalidates graphs made before."""
        self.state = UnitState.SHARDED
        self.shown = False
        """Whether modules hold the gathered values."""
        self.keeps_memory = False
        """Whether gathered values are kept until backward, and their memory after it: `Engine.keep_copies`."""
        self._pending: Pending | None = None
        self._work: StreamWork | None = None
        self._bucket: torch.Tensor | None = None

    def join(self, plan: UnitPlan, index: int, context: EngineContext, holds_units: bool) -> None:
        """Become a unit of a model; again when a module around that model is wrapped."""
        self.plan, self.context, self.name = plan, context, plan.name
        self.index = index
        """Its place in the model's plan, the same on every rank."""
        self.holds_units = holds_units
        """Whether there are units inside its module."""
        self._has_views = False
        self._gathered_at: list[tuple[int, int, int]] | None = None
        """The shards and their write counts at the last gather."""

    def __repr__(self) -> str:
        return f"Unit({self.name or '(root)'}, {self.state.value})"

    # --- gathering ----------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start to gather; `finish_gather` must follow before the values are used or freed."""
        assert self.state is UnitState.SHARDED
        missing = [p.plan.name for p in self.parameters if p.local.is_meta]
        if missing:
            raise FSDPError(
                f"{len(missing)} parameter(s) have no values yet (meta device): {', '.join(missing[:4])}"
                f"{', …' if len(missing) > 4 else ''}. Load them (load_state_dict, fullshard.weights), or wrap with "
                f"param_init_fn=…"
            )
        context = self.context
        self._note_writes()
        context.meter.allocated(sum([p.allocate() for p in self.parameters]))
        self.state = UnitState.GATHERING
        copies = [p for p in self.parameters if p.is_copy]
        if self.only_casts:  # nothing to overlap with compute, so compute does it
            self._copy(copies)
            return
        bucket = self.plan.gather_bucket
        device = runtime.device()
        with context.gather_stream.run() as work, torch.no_grad():
            self._work = work
            work.keep([p.local for p in self.parameters])
            for p in copies:  # one at a time: a shard in host memory is not cast before it is on the device
                self._copy([p])
            pairs = [
                (p.full.data, p.source(context.gather_link.from_host))
                for p in self.parameters
                if p.full is not None and p.plan.gathers and p.plan.direct
            ]
            if bucket is not None:
                packed = torch.zeros(bucket.length, dtype=torch.uint8, device=device)
                copy_together([copy for p, slot in self.in_slots(bucket) for copy in p.pack(packed[slot])])
                self._bucket = torch.empty((context.gather_link.size, bucket.length), dtype=torch.uint8, device=device)
                pairs.append((self._bucket, packed))
            if pairs:
                context.meter.gathers[self.name] += 1
                context.meter.bytes_gathered += sum(whole.numel() * whole.element_size() for whole, _ in pairs)
                with context.meter.sending(context.meter.gather_sent, self.name):
                    self._pending = context.gather_link.gather(pairs, self.index)
        if any(p.plan.offloaded for p in self.parameters):
            context.host.reads(work)

    @property
    def only_casts(self) -> bool:
        """Whether gathered values are at most copies, in another dtype, of shards on the same device."""
        return not any(p.plan.gathers or p.plan.offloaded for p in self.parameters)

    @torch.no_grad()
    def _copy(self, parameters: Sequence[ShardedParameter]) -> None:
        """Fill the gathered values of parameters that this rank holds whole."""
        copy_together([(p.full.data, p.on_device()) for p in parameters if p.full is not None])

    def finish_gather(self) -> None:
        """Wait for the gathered values."""
        if self.state is not UnitState.GATHERING:
            return
        pending, self._pending = self._pending, None
        work, self._work = self._work, None
        if pending is not None:
            pending.wait()
        if work is not None:
            work.join()
        rows, self._bucket = self._bucket, None
        if rows is not None:
            assert self.plan.gather_bucket is not None
            with torch.no_grad():
                slots = self.in_slots(self.plan.gather_bucket)
                copy_together([copy for p, slot in slots for copy in p.unpack(rows[:, slot])])
        self.state = UnitState.GATHERED
        if not self._has_views:
            self._make_views()

    def _make_views(self) -> None:
        """Ask modules with a `see_gathered` method (packed weights), once, what their attributes should show."""
        self._has_views = True
        for module in dict.fromkeys(module for p in self.parameters for module, _ in p.sites):
            see = getattr(module, "see_gathered", None)
            if see is None:
                continue
            by_name = {name: p for p in self.parameters for owner, name in p.sites if owner is module}
            if all(p.view is None for p in by_name.values()):
                for name, view in see({name: p.full for name, p in by_name.items()}).items():
                    by_name[name].view = view

    def is_fresh(self) -> bool:
        """Whether the shards are unchanged since the unit was gathered."""
        return self._gathered_at == self._writes()

    def _writes(self) -> list[tuple[int, int, int]]:
        return writes_of_all([p.shard for p in self.parameters])

    def _note_writes(self) -> None:
        """Before a gather: count writes to shards as writes to the gathered values.

        Autograd checks these counts and refuses a backward through a value that has changed since it was saved.
        """
        before, now = self._gathered_at, self._writes()
        if before is not None and before != now:
            written = [p for p, then, count in zip(self.parameters, before, now, strict=True) if then != count]
            leaves = [leaf for p in written for leaf in (p.full, p.full_global) if leaf is not None]
            torch.autograd.graph.increment_version(leaves)
            now = self._writes()  # a gathered value may be the shard itself
        self._gathered_at = now

    def free(self) -> None:
        """Release the memory of the gathered values, unless it is kept for the next gather."""
        if self.state is UnitState.SHARDED:
            return
        self.finish_gather()
        self.show_shards()
        self.state = UnitState.SHARDED
        if not self.keeps_memory:
            self._release()

    def keep_memory(self, keep: bool) -> None:
        """Keep gathered values until backward, and their memory after it, from the next gather on; or no longer."""
        self.keeps_memory = keep
        if not keep and self.state is UnitState.SHARDED:
            self._release()

    def _release(self) -> None:
        self.context.meter.freed(sum(p.free() for p in self.parameters))

    def follow(self, plan: UnitPlan) -> None:
        """Apply a new plan for the same parameters: some were frozen, unfrozen or cast."""
        if any(
            p.plan.compute_dtype != new.compute_dtype for p, new in zip(self.parameters, plan.parameters, strict=True)
        ):
            self.free()
            self.keep_memory(False)
            self.casts += 1
        self.plan, self._has_views = plan, False
        for p, new in zip(self.parameters, plan.parameters, strict=True):
            p.follow(new)

    # --- what modules hold --------------------------------------------------------------------------------------------

    def show_gathered(self, as_global: bool) -> None:
        """Put the gathered values in the modules, for the computation."""
        show_gathered(self.parameters, as_global)
        self.shown = True

    def show_shards(self) -> None:
        """Put the shards back in the modules."""
        if self.shown:
            show_shards(self.parameters)
            self.shown = False

    def in_slots(self, bucket: Bucket) -> list[tuple[ShardedParameter, slice]]:
        """The parameters of a bucket and where each is in it."""
        by_name = {p.plan.name: p for p in self.parameters}
        return [(by_name[s.name], slice(s.offset, s.offset + s.size)) for s in bucket.slots]
