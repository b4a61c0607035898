"""Gathers per-row results from all ranks, each row once, for metrics and for logging the loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.errors import ConfigError
from fullshard.distributed import data_ranks, runtime
from fullshard.distributed.watchdog import collectives
from fullshard.fsdp import uneven_batches
from fullshard.spmd.tensor_tree import tensors_in


def gather_for_metrics(value: Any, use_gather_object: bool = False) -> Any:
    """Concatenate the rows of all ranks in the order of the loader: each row of the dataset once, on every rank.

    Tensors, also inside tuples, lists and dicts, are concatenated along dim 0; a scalar tensor becomes one entry per
    rank. Lists without tensors are concatenated; any other object becomes a list with one entry per rank. With
    `use_gather_object`, everything is treated as an object. Placeholder batches contribute nothing. All ranks must
    call this before they draw the next batch.
    """
    leaves: list[Any] = []
    structure = "objects" if use_gather_object else _flatten(value, leaves)
    if use_gather_object:
        leaves.append(_rows(value))
    if uneven_batches.current_rows().rows == 0:
        leaves = [leaf[:0] for leaf in leaves]
    if runtime.world_size() > 1:
        leaves = _exchange(leaves, structure)
    return leaves[0] if use_gather_object else _rebuild(value, iter(leaves))


def mean_over_rows(value: torch.Tensor | float) -> torch.Tensor:
    """The mean over all rows of the step, given each rank's mean over its own rows (for example a loss).

    All ranks must call this before they draw the next batch. Outside a prepared loader, ranks have equal weight.
    """
    share = uneven_batches.current_rows()
    own = torch.as_tensor(value, device=runtime.device()).detach()
    part = (share.rows or 0) / share.total if share.total else 1 / data_ranks.data_size()
    mean = own.double() * part if part else torch.zeros_like(own, dtype=torch.float64)  # a placeholder may be NaN
    data_ranks.sum_over_rows("mean over rows", mean)
    return mean.to(own.dtype) if own.is_floating_point() else mean


# --- containers -------------------------------------------------------------------------------------------------------


def _flatten(value: Any, leaves: list[Any]) -> str:
    """Append tensors and lists of objects to `leaves`; returns a description of the containers."""
    if isinstance(value, torch.Tensor):
        leaves.append(value.detach().reshape(1) if value.ndim == 0 else value.detach())
        return "a tensor"
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flatten(inner, leaves)}" for key, inner in value.items()) + "}"
    if _holds_tensors(value):
        return "[" + ", ".join(_flatten(inner, leaves) for inner in value) + "]"
    leaves.append(_rows(value))
    return "objects"


def _rebuild(value: Any, joined: Iterator[Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        items = {key: _rebuild(inner, joined) for key, inner in value.items()}
        if hasattr(value, "to_tuple"):  # an output of transformers
            return type(value)(**items)
        return items
    if not isinstance(value, torch.Tensor) and _holds_tensors(value):
        inner = [_rebuild(one, joined) for one in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return next(joined)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(True for _ in tensors_in(value))


def _rows(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- communication ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LeafDescription:
    """What a rank sends about its leaves before the tensors."""

    structure: str
    leaves: list[Any]
    """A `_Form` for each tensor; objects themselves."""


@dataclass(frozen=True)
class _Form:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} in {str(self.dtype).removeprefix('torch.')}"


def _exchange(leaves: list[Any], structure: str) -> list[Any]:
    """Each leaf of all ranks, concatenated: one message with forms and objects, one with the bytes of all tensors."""
    described: list[Any] = [None] * runtime.world_size()
    mine = [_Form(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
    dist.all_gather_object(described, _LeafDescription(structure, mine))
    _check(described)
    described = data_ranks.of_each_row(described)
    tensors = iter(_exchange_tensors([x for x in leaves if isinstance(x, torch.Tensor)], described))
    columns = zip(*(one.leaves for one in described), strict=True)
    objects = (list(itertools.chain.from_iterable(c)) for c in columns if not isinstance(c[0], _Form))
    return [next(tensors) if isinstance(leaf, torch.Tensor) else next(objects) for leaf in leaves]


def _exchange_tensors(tensors: list[torch.Tensor], described: list[_LeafDescription]) -> list[torch.Tensor]:
    forms = [[form for form in one.leaves if isinstance(form, _Form)] for one in described]
    sizes = [sum(form.bytes for form in its) for its in forms]
    device = runtime.device()
    packed = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    offset = 0
    for t in tensors:
        if t.numel():
            flat = t.to(device).contiguous().view(-1).view(torch.uint8)
            packed[offset : offset + flat.numel()] = flat
            offset += flat.numel()
    received = [torch.empty_like(packed) for _ in range(runtime.world_size())]
    if max(sizes):
        collectives.finish("gather for metrics", lambda: dist.all_gather(received, packed, async_op=True))
    pieces: list[list[torch.Tensor]] = [[] for _ in tensors]
    for its, flat in zip(forms, data_ranks.of_each_row(received), strict=True):
        offset = 0
        for index, form in enumerate(its):
            piece = torch.empty(form.shape, dtype=form.dtype, device=device)
            if form.bytes:
                piece.view(-1).view(torch.uint8).copy_(flat[offset : offset + form.bytes])
            pieces[index].append(piece)
            offset += form.bytes
    return [torch.cat(parts).to(t.device) for parts, t in zip(pieces, tensors, strict=True)]


def _check(described: list[_LeafDescription]) -> None:
    """Raise if ranks differ. All ranks check the same data, so all of them raise."""
    first = described[0]
    for rank, one in enumerate(described):
        if one.structure != first.structure:
            raise ConfigError(
                f"gather_for_metrics: rank 0 has {first.structure}, rank {rank} has {one.structure}; expected the "
                f"same containers on all ranks. For a list with one entry per row, set use_gather_object=True"
            )
        for its, theirs in zip(one.leaves, first.leaves, strict=True):
            if isinstance(its, _Form) and (its.shape[1:], its.dtype) != (theirs.shape[1:], theirs.dtype):
                raise ConfigError(
                    f"gather_for_metrics: rank 0 has a tensor of {theirs}, rank {rank} one of {its}; expected the "
                    f"same shape except for dim 0. Pad to a common length first, or set use_gather_object=True"
                )
