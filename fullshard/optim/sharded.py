"""Optimizers that need more than their element of a parameter, made to work on shards, or refused.

Parameters are sharded tensors, on which torch's operators compute as on whole ones, so most optimizers need nothing.
`prepare_step` helps those that make their state as plain tensors (Adafactor of transformers) or update it with kernels
of their own (bitsandbytes). `muon.py` handles Muon.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from fullshard.config.errors import FSDPError
from fullshard.optim.bnb import is_bnb, work_on_shards
from fullshard.spmd.redistribute import without_partial
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
