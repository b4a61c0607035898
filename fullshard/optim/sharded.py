"""Optimizers that need more than their element of a parameter, made to work on shards, or refused.

Parameters are sharded tensors, on which torch's operators compute as on whole ones, so most optimizers need nothing.
`prepare_step` helps those that make their state as plain tensors (Adafactor of transformers) or update it with kernels
of their own (bitsandbytes).

`torch.optim.Muon` orthogonalizes each sharded matrix whole, by one rank. Momentum and weights stay sharded. The ranks
that share a matrix take turns: of as many matrices as there are ranks, each rank receives the pieces of one (in bf16,
in which Muon computes anyway), orthogonalizes it and sends the pieces back. So a rank holds one whole matrix at a time,
no rank repeats another one's work, and the result has the bits of one device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from fullshard.config.errors import FSDPError
from fullshard.device import accelerator
from fullshard.device.torch_private import (
    local_of,
    muon_function,
    muon_learning_rate,
    orthogonalized,
    replace_muon_function,
    spec_of,
)
from fullshard.distributed import groups, runtime
from fullshard.distributed.watchdog import collectives
from fullshard.optim.bnb import is_bnb, work_on_shards
from fullshard.spmd.redistribute import layout_of, redistribute, replicated, spec_with, without_partial
from fullshard.spmd.tensor import is_sharded

NOT_BY_ELEMENT = {"Adafactor": "needs means over rows, columns and the whole of a parameter", "Rprop": "uses masks"}
"""Optimizers of torch that cannot update pieces of a parameter, and why."""


def prepare_step(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer what it needs to update its sharded parameters. Called before each step."""
    if not (is_bnb(optimizer) or is_adafactor(optimizer)):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                initial_state(optimizer, p)


def initial_state(optimizer: Any, p: torch.Tensor) -> dict[str, Any]:
    """The state of a parameter as it is, or as a first step would make it where that needs help: a checkpoint is read
    into it."""
    if not optimizer.state.get(p) and is_sharded(p):
        at = [(g, i) for g, group in enumerate(optimizer.param_groups) for i, q in enumerate(group["params"]) if q is p]
        group = optimizer.param_groups[at[0][0]]
        if is_bnb(optimizer):
            work_on_shards(optimizer)
            optimizer.init_state(group, p, *at[0])
        elif is_adafactor(optimizer):
            optimizer.state[p] = _factored_state(p, group)
    state: dict[str, Any] = optimizer.state.get(p, {})
    return state


def is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the Adafactor of transformers."""
    return any(
        kind.__name__ == "Adafactor" and kind.__module__.startswith("transformers.") for kind in type(optimizer).__mro__
    )


@torch.no_grad()
def _factored_state(p: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Adafactor's first state. It would make plain tensors; of a sharded parameter, row statistics are sharded like its
    rows, and column statistics are the same on every rank."""
    zeros = torch.zeros_like(p, dtype=torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype)
    state: dict[str, Any] = {"step": 0}
    if group["beta1"] is not None:
        state["exp_avg"] = zeros.clone()
    if p.dim() >= 2:
        for name, dim in (("exp_avg_sq_row", -1), ("exp_avg_sq_col", -2)):
            mean: Any = zeros.mean(dim=dim)
            state[name] = mean.redistribute(placements=without_partial(mean.placements))
    else:
        state["exp_avg_sq"] = zeros
    return {**state, "RMS": 0}


def refuse_unable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot update sharded parameters."""
    kind = type(optimizer)
    if is_bnb(optimizer) and any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        work_on_shards(optimizer)
    if kind.__name__ not in NOT_BY_ELEMENT or is_adafactor(optimizer):
        return
    sharded = [p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)]
    if any(isinstance(placement, Shard) for p in sharded for placement in p.placements):
        raise FSDPError(
            f"{kind.__name__} {NOT_BY_ELEMENT[kind.__name__]}, but each rank holds only a piece of each parameter; use "
            f"an optimizer that works element by element (AdamW, SGD), transformers' Adafactor, or "
            f"strategy='NO_SHARD', where every rank holds whole parameters"
        )


@functools.cache
def share_muon() -> None:
    """Let `torch.optim.Muon` update sharded matrices as described above. Once per process."""
    replace_muon_function(functools.partial(_muon, muon_function()))


@torch.no_grad()
def _muon(
    original: Any, params: list[torch.Tensor], grads: list[torch.Tensor], buffers: list[torch.Tensor], **options: Any
) -> None:
    """torch's `muon`, with sharded matrices handled here."""
    theirs = [i for i, p in enumerate(params) if not is_sharded(p)]
    if theirs:
        original(*([of[i] for i in theirs] for of in (params, grads, buffers)), **options)
    ours = [i for i, p in enumerate(params) if is_sharded(p)]
    lr, decay, momentum = float(options["lr"]), options["weight_decay"], options["momentum"]
    # Of similar size together: the ranks that share them finish at about the same time.
    order = sorted(ours, key=lambda i: -params[i].numel())
    matrices = [params[i] for i in order]
    updates = (_update(grads[i], buffers[i], momentum, options["nesterov"]) for i in order)
    for p, update in _orthogonalized(matrices, updates, options):
        local = local_of(p)
        local.mul_(1 - lr * decay)
        local.add_(update.to(local.device), alpha=-muon_learning_rate(lr, options["adjust_lr_fn"], p.shape))


def _update(grad: torch.Tensor, buffer: torch.Tensor, momentum: float, nesterov: bool) -> torch.Tensor:
    """This rank's piece of the matrix to orthogonalize, in bf16 on the computing device."""
    piece, average = local_of(grad), local_of(buffer)
    average.lerp_(piece, 1 - momentum)
    return (piece.lerp(average, momentum) if nesterov else average).bfloat16().to(runtime.device())


def _orthogonalized(
    matrices: Sequence[torch.Tensor], updates: Iterator[torch.Tensor], options: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each matrix with this rank's piece of its orthogonalized update."""
    whole = functools.partial(
        orthogonalized, coefficients=options["ns_coefficients"], steps=options["ns_steps"], eps=options["eps"]
    )
    waiting: dict[dist.ProcessGroup, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for p, update in zip(matrices, updates, strict=True):
        splits = [dim for dim, at in enumerate(p.placements) if isinstance(at, Shard) and p.device_mesh.size(dim) > 1]
        if not splits:
            yield p, whole(update)
        elif len(splits) > 1:
            yield p, _on_every_rank(p, update, whole)
        else:
            group = p.device_mesh.get_group(splits[0])
            waiting.setdefault(group, []).append((p, update))
            if len(waiting[group]) == group.size():
                yield from _shared(waiting.pop(group), group, whole)
    for group, rest in waiting.items():
        yield from _shared(rest, group, whole)


def _on_every_rank(p: torch.Tensor, update: torch.Tensor, whole: Any) -> torch.Tensor:
    """For a matrix that several axes split: every rank gathers and orthogonalizes it."""
    spec = spec_of(p)
    full = redistribute(update, spec, spec_with(spec, spec.mesh, replicated(spec.mesh)))
    return whole(full)[layout_of(spec).slices(p.shape, runtime.rank())]


def _shared(
    batch: list[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup, whole: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Orthogonalize at most as many matrices as the group has ranks, one per rank."""
    ranks, mine, updates = dist.get_process_group_ranks(group), group.rank(), [update for _, update in batch]
    nothing = updates[0].new_empty(0)
    idle = [nothing] * (len(ranks) - len(batch))
    cuts: list[tuple[slice, ...]] = []
    if mine < len(batch):
        p = batch[mine][0]
        layout = layout_of(spec_of(p))
        cuts = [layout.slices(p.shape, rank) for rank in ranks]
    shapes = [tuple(s.stop - s.start for s in cut) for cut in cuts] or [(0,)] * len(ranks)
    received = _exchange([*updates, *idle], shapes, group)
    back = [nothing] * len(ranks)
    if cuts:
        matrix = nothing.new_empty(batch[mine][0].shape)
        for cut, piece in zip(cuts, received, strict=True):
            matrix[cut] = piece
        del received
        result = whole(matrix)
        back = [result[cut] for cut in cuts]
    results = _exchange(back, [tuple(update.shape) for update in (*updates, *idle)], group)
    return [(p, result) for (p, _), result in zip(batch, results[: len(batch)], strict=True)]


def _exchange(
    pieces: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send piece r to rank r of the group; returns what each rank has sent here, of the given shapes."""
    device, dtype, size = pieces[0].device, pieces[0].dtype, pieces[0].element_size()
    through_host = groups.backend_of(group, device) == "gloo" and accelerator.is_accelerator(device)
    sent = torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8)  # bytes: every backend sends them
    sent = sent.cpu() if through_host else sent
    counts = [math.prod(shape) for shape in shapes]
    received = sent.new_empty(sum(counts) * size)
    issue = functools.partial(
        dist.all_to_all_single, received, sent, [n * size for n in counts], [p.numel() * size for p in pieces], group,
        async_op=True,
    )  # fmt: skip
    collectives.finish("matrices of Muon", issue, group)
    flat = received.to(device).view(dtype)
    return [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
