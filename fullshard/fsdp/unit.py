"""One unit: parameters that are gathered, freed and reduced together.

A unit executes its part of the plan and nothing else; when to do what is decided by `engine.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard import runtime
from fullshard.errors import FSDPError
from fullshard.fsdp.comm import Link, Pending
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.offload import HostTraffic
from fullshard.fsdp.parameter import ShardedParameter, carry_out
from fullshard.fsdp.plan import Bucket, UnitPlan
from fullshard.fsdp.strategy import MixedPrecision, dtype_of
from fullshard.fsdp.streams import Aside, Lane


@dataclass
class Means:
    """What units work with; one for all units of an engine."""

    gather_link: Link
    reduce_link: Link
    replica_link: Link
    meter: Meter
    gather_lane: Lane
    reduce_lane: Lane
    host: HostTraffic


class State(enum.Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """A module's own parameters (those no unit below it has taken), sharded."""

    def __init__(
        self,
        plan: UnitPlan,
        module: nn.Module,
        parameters: Sequence[ShardedParameter],
        means: Means,
        keeps: bool,
        precision: MixedPrecision,
    ):
        self.plan, self.module, self.parameters, self.means = plan, module, list(parameters), means
        self.keeps_after_forward = keeps
        self.precision = precision
        self.output_dtype: torch.dtype | None = None
        """What its outputs are cast to. Only modules that the user wrapped cast theirs, not the units of a policy."""
        self.casts = 0
        """How often its parameters were cast to another dtype, which ends graphs made before."""
        self.holds_units = False
        """Whether there are units inside its module."""
        self.state = State.SHARDED
        self.shown = False
        self._pending: Pending | None = None
        self._aside: Aside | None = None
        self._bucket: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    def __repr__(self) -> str:
        return f"Unit({self.name or '(root)'}, {self.state.value})"

    # --- gathering ----------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather; `finish_gather` must follow before the values are used or freed."""
        assert self.state is State.SHARDED
        missing = [p.plan.name for p in self.parameters if p.local.is_meta]
        if missing:
            raise FSDPError(
                f"{len(missing)} parameter(s) have no values yet (meta device): {', '.join(missing[:4])}"
                f"{', …' if len(missing) > 4 else ''}. Load them (load_state_dict, fullshard.weights), or wrap with "
                f"param_init_fn=…"
            )
        means = self.means
        for p in self.parameters:
            p.note_writes()
        means.meter.allocated(sum(p.allocate() for p in self.parameters))
        self.state = State.GATHERING
        if not any(p.plan.gathers or not p.shares for p in self.parameters):
            return
        bucket = self.plan.gather_bucket
        device = runtime.device()
        with means.gather_lane.run() as aside, torch.no_grad():
            self._aside = aside
            aside.keep([p.local for p in self.parameters])
            for p in self.parameters:
                if not p.plan.gathers and not p.shares:
                    assert p.full is not None
                    p.full.data.copy_(p.on_device())
            pairs = [
                (p.full.data, p.source(means.gather_link.from_host))
                for p in self.parameters
                if p.full is not None and p.plan.gathers and p.plan.direct
            ]
            if bucket is not None:
                packed = torch.zeros(bucket.length, dtype=torch.uint8, device=device)
                carry_out([copy for p, slot in self._in_slots(bucket) for copy in p.pack(packed[slot])])
                self._bucket = torch.empty((means.gather_link.size, bucket.length), dtype=torch.uint8, device=device)
                pairs.append((self._bucket, packed))
            if pairs:
                means.meter.gathers[self.name] += 1
                means.meter.bytes_gathered += sum(whole.numel() * whole.element_size() for whole, _ in pairs)
                self._pending = means.gather_link.gather(pairs)
        if any(p.offloaded for p in self.parameters):
            means.host.reads(aside)

    def finish_gather(self) -> None:
        """Wait for the gathered values."""
        if self.state is not State.GATHERING:
            return
        pending, self._pending = self._pending, None
        aside, self._aside = self._aside, None
        if pending is not None:
            pending.wait()
        if aside is not None:
            aside.join()
        rows, self._bucket = self._bucket, None
        if rows is not None:
            assert self.plan.gather_bucket is not None
            with torch.no_grad():
                slots = self._in_slots(self.plan.gather_bucket)
                carry_out([copy for p, slot in slots for copy in p.unpack(rows[:, slot])])
        self.state = State.GATHERED
        self._views()

    def _views(self) -> None:
        """Modules that see their gathered values in their own way (packed weights) say how, once."""
        for module in dict.fromkeys(module for p in self.parameters for module, _ in p.sites):
            see = getattr(module, "see_gathered", None)
            mine = {name: p for p in self.parameters for owner, name in p.sites if owner is module}
            if see is None or any(p.view is not None for p in mine.values()):
                continue
            for name, seen in see({name: p.full for name, p in mine.items()}).items():
                mine[name].view = seen

    def is_fresh(self) -> bool:
        """Whether the shards are as they were when the unit was gathered."""
        return all(p.is_fresh() for p in self.parameters)

    def free(self) -> None:
        """Give the memory of gathered values back."""
        if self.state is State.SHARDED:
            return
        self.finish_gather()
        self.show_shards()
        self.means.meter.freed(sum(p.free() for p in self.parameters))
        self.state = State.SHARDED

    def follow(self, plan: UnitPlan) -> None:
        """Follow another plan for the same parameters: some are frozen now, or train, or have another dtype."""
        if any(
            p.plan.compute_dtype != new.compute_dtype for p, new in zip(self.parameters, plan.parameters, strict=True)
        ):
            self.free()
            self.casts += 1
        self.plan = plan
        for p, new in zip(self.parameters, plan.parameters, strict=True):
            p.follow(new)

    # --- what modules see ---------------------------------------------------------------------------------------------

    def show_gathered(self, as_global: bool) -> None:
        for p in self.parameters:
            p.show_gathered(as_global)
        self.shown = True

    def show_shards(self) -> None:
        if self.shown:
            for p in self.parameters:
                p.show_shard()
            self.shown = False

    # --- reducing -----------------------------------------------------------------------------------------------------

    def hold_gradients(self) -> None:
        """Under `no_sync`: keep this rank's gradients back, in the dtype they will be summed in."""
        for p in self.parameters:
            if p.plan.trainable:
                p.hold_gradient()

    def _in_slots(self, bucket: Bucket) -> list[tuple[ShardedParameter, slice]]:
        by_name = {p.plan.name: p for p in self.parameters}
        return [(by_name[s.name], slice(s.offset, s.offset + s.size)) for s in bucket.slots]


class Reduction:
    """One unit's gradients on their way to the shards.

    Every rank sends a term for every trainable parameter, zeros where backward gave it none, so that ranks that took
    different branches stay in step. A flag per parameter travels along: where no rank had a gradient the shard gets
    none
    either, as on one device. Only a rank without one of its own has to look at the flags.
    """

    def __init__(self, unit: Unit, average: bool):
        self.unit, self.average = unit, average
        means = unit.means
        trained = [p for p in unit.parameters if p.plan.trainable]
        grads = {p.plan.name: p.take_gradient() for p in trained}
        self._absent = {name: i for i, (name, grad) in enumerate(grads.items()) if grad is None}
        self._alone = means.reduce_link.size == 1 and means.replica_link.size == 1 or not trained
        if self._alone:
            self._own = [(p, grads[p.plan.name]) for p in trained]
            return
        device = runtime.device()
        with means.reduce_lane.run() as self._aside, torch.no_grad():
            self._aside.keep(list(grads.values()))
            flags = torch.ones(len(trained), dtype=dtype_of(trained[0].plan.reduce_dtype), device=device)
            for place in self._absent.values():
                flags[place].zero_()
            terms = {
                p.plan.name: torch.zeros(p.whole, dtype=dtype_of(p.plan.reduce_dtype), device=device)
                if grad is None
                else grad
                for p, grad in zip(trained, grads.values(), strict=True)
            }
            del grads
            means.meter.reduces[unit.name] += 1
            means.meter.reduced_parameters.update(terms.keys())
            means.meter.bytes_reduced += sum(g.numel() * g.element_size() for g in terms.values())
            self._scattered = [p for p in trained if p.plan.gathers and p.plan.direct]
            self._copied = [p for p in trained if not p.plan.gathers and p.plan.direct]
            scatter = [terms[p.plan.name] for p in self._scattered]
            scatter += [self._packed(b, terms) for b in unit.plan.scatter_buckets]
            copies = [terms[p.plan.name] for p in self._copied]
            copies += [self._flat(b, terms) for b in unit.plan.copy_buckets]
            link = means.reduce_link
            # No collective of their own: with values summed whole where there are any, else to every rank in a scatter.
            if copies or not scatter:
                self._flags = len(scatter)
                copies.insert(0, flags)
            else:
                self._flags = 0
                scatter.insert(0, flags.repeat(link.size))
            self._scatter = link.scatter_sum(scatter, average) if scatter else None
            self._copies = link.sum(copies, average) if copies and link.size > 1 else None
            self._uncombined = copies if self._copies is None else []
            self._replicas: Pending | None = None
            if means.replica_link.size > 1 and not (link.size > 1 and link.holds_host):
                self._sum_replicas()

    def _sum_replicas(self) -> None:
        """Begin to add up what the replicas have, once this replica's own sums are there."""
        self._replicas = self.unit.means.replica_link.sum(self._own_sums(), self.average)

    def _own_sums(self) -> list[torch.Tensor]:
        """The sums inside this replica, in the same order."""
        pieces = self._scatter.wait() if self._scatter is not None else []
        copies = self._copies.wait() if self._copies is not None else self._uncombined
        self._scatter, self._copies, self._uncombined = None, None, []
        return [*pieces, *copies]

    def finish(self) -> None:
        """Wait for the sums and add them to the shards' gradients."""
        if self._alone:
            self._land([(p, p.trim(grad)) for p, grad in self._own if grad is not None])
            self._own = []
            return
        sums = self.wait()
        flags = sums.pop(self._flags)
        if self._absent:
            came = flags.tolist()
            self._absent = {name: i for name, i in self._absent.items() if not came[i]}
        plan = self.unit.plan
        count = len(self._scattered) + len(plan.scatter_buckets)
        self._land(self._cut(self._scattered, plan.scatter_buckets, sums[:count]))
        self._land(self._cut(self._copied, plan.copy_buckets, sums[count:]))

    def wait(self) -> list[torch.Tensor]:
        """The sums: this rank's pieces, then the values summed whole; the flags at place `_flags` among them."""
        if self._alone:
            return []
        if self.unit.means.replica_link.size > 1:
            if self._replicas is None:
                self._aside.join()
                self._sum_replicas()
            assert self._replicas is not None
            results = self._replicas.wait()
        else:
            results = self._own_sums()
        self._aside.join()
        return results

    def _cut(
        self, direct: list[ShardedParameter], buckets: Sequence[Bucket], results: list[torch.Tensor]
    ) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Which part of the results belongs to which parameter, without those that no rank had a gradient for."""
        found = [(p, piece, False) for p, piece in zip(direct, results[: len(direct)], strict=True)]
        for bucket, flat in zip(buckets, results[len(direct) :], strict=True):
            found += [(p, flat.view(-1)[slot], True) for p, slot in self.unit._in_slots(bucket)]
        with torch.no_grad():
            return [
                (p, p.trim(piece).contiguous() if shared else p.trim(piece))
                for p, piece, shared in found
                if p.plan.name not in self._absent
            ]

    def _land(self, pieces: list[tuple[ShardedParameter, torch.Tensor]]) -> None:
        """Add pieces to the shards' gradients, where those lie."""
        host = self.unit.means.host
        for p, piece in pieces:
            if not p.offloaded:
                p.land(piece, host)
                p.landed()
        offloaded = [(p, piece) for p, piece in pieces if p.offloaded]
        if offloaded:
            with host.landing(offloaded):
                for p, piece in offloaded:
                    p.land(piece, host)
            if any(p.hooks for p, _ in offloaded):
                host.settle()
                for p, _ in offloaded:
                    p.landed()

    def _packed(self, bucket: Bucket, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        shape = (self.unit.means.reduce_link.size, bucket.length)
        rows = torch.zeros(shape, dtype=dtype_of(bucket.dtype), device=runtime.device())
        slots = self.unit._in_slots(bucket)
        carry_out([copy for p, slot in slots for copy in p.pack_gradient(terms[p.plan.name], rows[:, slot])])
        return rows

    def _flat(self, bucket: Bucket, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.zeros(bucket.length, dtype=dtype_of(bucket.dtype), device=runtime.device())
        found = [(flat[slot], terms[p.plan.name].reshape(-1)) for p, slot in self.unit._in_slots(bucket)]
        carry_out([(target[: term.numel()], term) for target, term in found])
        return flat
