"""Reducing the gradients of a unit: summed over the ranks, each rank's piece added to the gradient of its shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.distributed import runtime
from fullshard.fsdp import gradients
from fullshard.fsdp.comm import Pending
from fullshard.fsdp.parameter import ShardedParameter, copy_together
from fullshard.fsdp.plan import Bucket
from fullshard.fsdp.strategy import dtype_of
from fullshard.fsdp.unit import Unit


class Reduction:
    """The reduction of one unit's gradients, in progress.

    Every rank sends a term for every trainable parameter, zeros where backward produced none, so that ranks that took
    different branches stay in step. A flag per parameter is summed as well: where no rank had a gradient, the shard
    gets none either, as on one device. Only a rank that lacks a gradient itself has to read the flags.
    """

    def __init__(self, unit: Unit, average: bool):
        self.unit, self.average = unit, average
        context = unit.context
        trained = [p for p in unit.parameters if p.plan.trainable]
        grads = {p.plan.name: grad for p, grad in zip(trained, gradients.take(trained), strict=True)}
        self._absent = {name: i for i, (name, grad) in enumerate(grads.items()) if grad is None}
        self._alone = context.reduce_link.size == 1 and context.replica_link.size == 1 or not trained
        if self._alone:
            self._own = [(p, grads[p.plan.name]) for p in trained]
            return
        device = runtime.device()
        with context.reduce_stream.run() as self._work, torch.no_grad():
            self._work.keep(list(grads.values()))
            flags = torch.ones(len(trained), dtype=dtype_of(trained[0].plan.reduce_dtype), device=device)
            for index in self._absent.values():
                flags[index].zero_()
            terms = {
                p.plan.name: torch.zeros(p.whole, dtype=dtype_of(p.plan.reduce_dtype), device=device)
                if grad is None
                else grad
                for p, grad in zip(trained, grads.values(), strict=True)
            }
            del grads
            context.meter.reduces[unit.name] += 1
            context.meter.reduced_parameters.update(terms.keys())
            context.meter.bytes_reduced += sum(g.numel() * g.element_size() for g in terms.values())
            self._scattered = [p for p in trained if p.plan.gathers and p.plan.direct]
            self._copied = [p for p in trained if not p.plan.gathers and p.plan.direct]
            scatter = [terms[p.plan.name] for p in self._scattered]
            scatter += [self._packed(b, terms) for b in unit.plan.scatter_buckets]
            copies = [terms[p.plan.name] for p in self._copied]
            copies += [self._flat(b, terms) for b in unit.plan.copy_buckets]
            link = context.reduce_link
            # The flags need no collective of their own: they join the values summed whole, or else the scatter, in
            # which every rank then gets a copy.
            if copies or not scatter:
                self._flags = len(scatter)
                copies.insert(0, flags)
            else:
                self._flags = 0
                scatter.insert(0, flags.repeat(link.size))
            with context.meter.sending(context.meter.reduce_sent, unit.name):
                self._scatter = link.scatter_sum(scatter, average, unit.index) if scatter else None
                self._copies = link.sum(copies, average, unit.index) if copies and link.size > 1 else None
                self._uncombined = copies if self._copies is None else []
                self._replicas: Pending | None = None
                if context.replica_link.size > 1 and not (link.size > 1 and link.holds_host):
                    self._sum_replicas()

    def _sum_replicas(self) -> None:
        """Start the sum over the replicas; it waits for the sums inside this replica."""
        self._replicas = self.unit.context.replica_link.sum(self._own_sums(), self.average, self.unit.index)

    def _own_sums(self) -> list[torch.Tensor]:
        """The sums inside this replica: scattered pieces, then values summed whole."""
        pieces = self._scatter.wait() if self._scatter is not None else []
        copies = self._copies.wait() if self._copies is not None else self._uncombined
        self._scatter, self._copies, self._uncombined = None, None, []
        return [*pieces, *copies]

    def finish(self) -> None:
        """Wait for the sums and add them to the shards' gradients."""
        if self._alone:
            own = [(p, gradients.trim(p, grad)) for p, grad in self._own if grad is not None]
            self._accumulate(self._summed_locally(own))
            self._own = []
            return
        sums = self.wait()
        flags = sums.pop(self._flags)
        if self._absent:
            present = flags.tolist()
            self._absent = {name: i for name, i in self._absent.items() if not present[i]}
        plan = self.unit.plan
        count = len(self._scattered) + len(plan.scatter_buckets)
        pieces = self._split(self._scattered, plan.scatter_buckets, sums[:count])
        pieces += self._split(self._copied, plan.copy_buckets, sums[count:])
        self._accumulate(self._summed_locally(pieces))

    def wait(self) -> list[torch.Tensor]:
        """The sums: this rank's pieces, then the values summed whole; the flags are at index `_flags`."""
        if self._alone:
            return []
        context = self.unit.context
        with context.meter.sending(context.meter.reduce_sent, self.unit.name):  # a second half may be sent only now
            if context.replica_link.size > 1:
                if self._replicas is None:
                    self._work.join()
                    self._sum_replicas()
                assert self._replicas is not None
                results = self._replicas.wait()
            else:
                results = self._own_sums()
        self._work.join()
        return results

    def _split(
        self, direct: list[ShardedParameter], buckets: Sequence[Bucket], results: list[torch.Tensor]
    ) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Each parameter's part of the results, without the parameters that have a gradient on no rank."""
        pieces = [(p, piece, False) for p, piece in zip(direct, results[: len(direct)], strict=True)]
        for bucket, flat in zip(buckets, results[len(direct) :], strict=True):
            pieces += [(p, flat.view(-1)[slot], True) for p, slot in self.unit.in_slots(bucket)]
        with torch.no_grad():
            return [
                (p, gradients.trim(p, piece).contiguous() if shared else gradients.trim(p, piece))
                for p, piece, shared in pieces
                if p.plan.name not in self._absent
            ]

    def _summed_locally(
        self, pieces: list[tuple[ShardedParameter, torch.Tensor]]
    ) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """The pieces, after those of which each rank along a local axis has a term were summed there."""
        context = self.unit.context
        terms: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = {}
        for index, (p, piece) in enumerate(pieces):
            if p.plan.summed_axes and context.term_links[p.plan.summed_axes].size > 1:
                terms.setdefault((p.plan.summed_axes, piece.dtype), []).append(index)
        for (axes, _), indices in terms.items():
            flat = torch.cat([pieces[index][1].reshape(-1) for index in indices])
            with context.meter.sending(context.meter.reduce_sent, self.unit.name):
                (total,) = context.term_links[axes].sum([flat], False, self.unit.index).wait()
            sizes = [pieces[index][1].numel() for index in indices]
            for index, part in zip(indices, total.split(sizes), strict=True):
                p, piece = pieces[index]
                pieces[index] = p, part.view(piece.shape)
        return pieces

    def _accumulate(self, pieces: list[tuple[ShardedParameter, torch.Tensor]]) -> None:
        """Add pieces to the gradients of the shards, on the device or in host memory."""
        host, factor = self.unit.context.host, self.unit.context.grad_factor
        if factor != 1.0 and self.average and pieces:
            torch._foreach_mul_([piece for _, piece in pieces], factor)
        for p, piece in pieces:
            if not p.plan.offloaded:
                gradients.accumulate(p, piece, host)
                gradients.run_post_hooks(p)
        offloaded = [(p, piece) for p, piece in pieces if p.plan.offloaded]
        if offloaded:
            with host.landing(offloaded):
                for p, piece in offloaded:
                    gradients.accumulate(p, piece, host)
            if any(gradients.hooks_on(p) for p, _ in offloaded):
                host.settle()
                for p, _ in offloaded:
                    gradients.run_post_hooks(p)

    def _packed(self, bucket: Bucket, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        """A bucket of gradients to scatter: one row of pieces per rank."""
        shape = (self.unit.context.reduce_link.size, bucket.length)
        rows = torch.zeros(shape, dtype=dtype_of(bucket.dtype), device=runtime.device())
        slots = self.unit.in_slots(bucket)
        copy_together([copy for p, slot in slots for copy in gradients.pack(p, terms[p.plan.name], rows[:, slot])])
        return rows

    def _flat(self, bucket: Bucket, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        """A bucket of gradients to sum whole."""
        flat = torch.zeros(bucket.length, dtype=dtype_of(bucket.dtype), device=runtime.device())
        targets = [(flat[slot], terms[p.plan.name].reshape(-1)) for p, slot in self.unit.in_slots(bucket)]
        copy_together([(target[: term.numel()], term) for target, term in targets])
        return flat
