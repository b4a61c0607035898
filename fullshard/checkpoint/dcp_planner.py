"""Planners for `torch.distributed.checkpoint`: what each rank writes and reads.

Every shard carries its offsets in the whole tensor, so that a checkpoint of one sharding can be loaded into any other.
Rank 0 compares plain tensors by digest: those with the same value on all ranks are written once, others once per rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fullshard.checkpoint.manifest import BLOCK
from fullshard.checkpoint.shard_index import TensorShard, TensorToLoad, host_blocks, part_to_write
from fullshard.config.errors import CheckpointError
from fullshard.device import accelerator


class WritePlanner(SavePlanner):
    """Plans what this rank writes. `entries` are its JSON entries. On rank 0, `all_entries` then holds those of every
    rank, and `per_rank` the tensors that differ between ranks."""

    def __init__(self, pieces: Iterable[TensorShard], entries: Any):
        self.entries = entries
        self.all_entries: list[Any] = []
        self.per_rank: list[str] = []
        self._pieces = [part for piece in pieces if (part := part_to_write(piece)) is not None]
        self._by_key = {(part.name, part.offsets): part.local for part in self._pieces}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the planner was made with the values of this rank."""

    def create_local_plan(self) -> SavePlan:
        """This rank's part of the plan: its pieces, and digests of plain tensors."""
        digests = {part.name: _digest(part.local) for part in self._pieces if part.is_plain}
        return SavePlan([_write_item(part) for part in self._pieces], planner_data=(self.entries, digests))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The final plans of all ranks: a plain tensor that is the same on all is written by one."""
        digests = [plan.planner_data[1] for plan in all_plans]
        self.all_entries = [plan.planner_data[0] for plan in all_plans]
        entries: dict[str, TensorStorageMetadata] = {}
        loads = [0] * len(all_plans)
        kept: list[list[WriteItem]] = [[] for _ in all_plans]
        plain: dict[str, dict[int, WriteItem]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                if item.index.fqn in digests[rank]:
                    plain.setdefault(item.index.fqn, {})[rank] = item
                else:
                    kept[rank].append(item)
                    loads[rank] += _bytes(item)
        for name, holders in plain.items():
            if len(holders) == len(all_plans) and len({digests[rank][name] for rank in holders}) == 1:
                lightest = min(holders, key=lambda rank: loads[rank])
                kept[lightest].append(holders[lightest])
                loads[lightest] += _bytes(holders[lightest])
                continue
            self.per_rank.append(name)
            for rank, item in holders.items():
                index = MetadataIndex(f"{name}@rank-{rank}", item.index.offset)
                kept[rank].append(replace(item, index=index))
        for item in (item for items in kept for item in items):
            _add_chunk(item, entries)
        plans = [replace(plan, items=items, planner_data=None) for plan, items in zip(all_plans, kept, strict=True)]
        return plans, Metadata(state_dict_metadata=dict(entries))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The final plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of a piece."""
        assert write_item.index.offset is not None
        offsets = tuple(write_item.index.offset)
        piece = self._by_key.get((write_item.index.fqn, offsets))
        return piece if piece is not None else self._by_key[write_item.index.fqn.rpartition("@rank-")[0], offsets]


def _write_item(part: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), part.local.shape)
    properties = TensorProperties(dtype=part.local.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(part.shape))
    return WriteItem(MetadataIndex(part.name, part.offsets), WriteItemType.SHARD, tensor_data=data)


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _digest(t: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
    for block in host_blocks(t, lambda: accelerator.pinned((BLOCK,), torch.uint8), BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _add_chunk(item: WriteItem, entries: dict[str, TensorStorageMetadata]) -> None:
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    entry = entries.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
    if entry.size != data.size or entry.properties.dtype != data.properties.dtype:
        raise CheckpointError(
            f"ranks disagree about {name}: {tuple(entry.size)} {entry.properties.dtype} on one, "
            f"{tuple(data.size)} {data.properties.dtype} on another"
        )
    entry.chunks.append(data.chunk)


# --- reading --------------------------------------------------------------------------------------------------------


class ReadPlanner(LoadPlanner):
    """Plans what this rank reads: for every target exactly the stored values of its shard."""

    def __init__(self, tensors: Sequence[TensorToLoad]):
        self._tensors = tensors

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the metadata of the checkpoint."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The pieces that this rank reads."""
        assert self._metadata is not None
        targets = (target for tensor in self._tensors for target in tensor.targets())
        self._targets = {(t.name, i): t for i, t in enumerate(targets)}
        items = []
        for (name, i), target in self._targets.items():
            if target.local.numel() == 0:
                continue
            stored: Any = self._metadata.state_dict_metadata[name]
            chunk = ChunkStorageMetadata(torch.Size(target.offsets), target.local.shape)
            reads = create_read_items_for_chunk_list(name, stored, [chunk])
            if sum(math.prod(item.lengths) for item in reads) != target.local.numel():
                raise CheckpointError(f"the checkpoint does not hold all of {name}{list(target.offsets)}")
            items += [replace(item, dest_index=MetadataIndex(name, target.offsets, i)) for item in reads]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks, as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The final plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refused: checkpoints hold tensors only."""
        raise AssertionError("checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory that a piece is read into."""
        assert read_item.dest_index.index is not None
        target = self._targets[read_item.dest_index.fqn, read_item.dest_index.index].local
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the piece was read into its own memory."""
