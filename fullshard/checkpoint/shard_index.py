"""The shards of each tensor that this process holds: their position in the whole tensor, and who else holds them.

Nothing here communicates. If several ranks hold the same shard, each of them writes a part of it, so that every tensor
is written once and the ranks share the work. On the torch engine a process holds at most one shard of a tensor, in
memory that the host or the GPU can address. Where one process drives all devices of a machine it holds one for each,
which the engine copies to host memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard import spmd
from fullshard.checkpoint.manifest import Manifest
from fullshard.config.errors import CheckpointError
from fullshard.device.torch_private import DTensorSpec, TensorMeta, local_of, spec_of
from fullshard.distributed import engines, runtime
from fullshard.distributed.engines import HostShards
from fullshard.spmd.redistribute import layout_of, torch_layout
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import ShardedTensor, is_sharded, unmarked
from fullshard.weights.safetensors_files import DTYPE_NAMES, DTYPES

SMALL = 4096
"""Bytes: a replicated shard is not split into parts smaller than this."""


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of a tensor in the state."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local: torch.Tensor
    """This rank's shard."""
    offsets: tuple[int, ...]
    """Where the shard begins in the whole tensor."""
    copies: int = 1
    """How many ranks hold this same shard by the tensor's layout; 0 for a plain tensor, whose layout is unknown."""
    copy: int = 0
    """This rank's index among them."""
    own: bool = False
    """Whether `local` is a copy made for this save, which nothing else writes to."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain tensor, whose layout is unknown."""
        return self.copies == 0


def host_shards(tensor: torch.Tensor) -> HostShards | None:
    """The access to the shards of a tensor through host memory, where a process may hold several of them; None where
    it holds at most one, in memory that the host or the GPU can address."""
    shards = engines.current().host_shards
    return shards if shards is not None and tensor.device.type == runtime.device().type else None


def offset_of(cuts: tuple[slice, ...]) -> tuple[int, ...]:
    """Where a part begins in the whole tensor."""
    return tuple(cut.start for cut in cuts)


def shards_of(name: str, tensor: torch.Tensor) -> list[TensorShard]:
    """The shards of a tensor that this process holds, with their values. Those of XLA devices are copied."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors files cannot hold")
    if (on_host := host_shards(tensor)) is not None:
        return [
            TensorShard(name, tuple(tensor.shape), part.value, offset_of(part.cuts), part.copies, part.copy, own=True)
            for part in on_host.read(tensor)
        ]
    shard = shard_of(name, tensor)
    return [] if shard is None else [shard]


def shard_of(name: str, tensor: torch.Tensor) -> TensorShard | None:
    """This rank's shard of a tensor of the torch engine; None if it holds no part of it."""
    tensor = unmarked(tensor.detach() if type(tensor) is torch.nn.Parameter else tensor)
    if not is_sharded(tensor):
        if tensor.is_meta:
            raise CheckpointError(f"{name} has no values yet (it is on the meta device); load or initialize it first")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{name} is a {tensor.layout} tensor; checkpoints hold dense tensors")
        return TensorShard(name, tuple(tensor.shape), tensor.detach(), (0,) * tensor.dim(), copies=0)
    local: torch.Tensor = local_of(tensor)
    if local.is_meta:
        raise CheckpointError(f"{name} has no values yet (it is on the meta device); load or initialize it first")
    if any(p.is_partial() for p in tensor.placements):
        raise CheckpointError(f"{name} is a partial sum over ranks ({tensor.placements}); mark_sharding it first")
    if any(type(p).__name__ == "_StridedShard" for p in tensor.placements):
        raise CheckpointError(f"{name} has strided shards ({tensor.placements}), which fullshard cannot save")
    layout, me = layout_of(spec_of(tensor)), runtime.rank()
    if layout.mesh.coordinate(me) is None:
        return None
    cuts = layout.slices(tensor.shape, me)
    if tuple(local.shape) != tuple(cut.stop - cut.start for cut in cuts):
        raise CheckpointError(
            f"{name}: this rank's shard has shape {tuple(local.shape)}, but a tensor of shape {tuple(tensor.shape)} "
            f"with layout {layout} has {cuts} here; shard it with mark_sharding"
        )
    pieces = math.prod(layout.parts(dim) for dim in range(tensor.dim()))
    copies = layout.mesh.size() // pieces
    offsets = tuple(cut.start for cut in cuts)
    return TensorShard(name, tuple(tensor.shape), local.detach(), offsets, copies, layout.replica_id(me))


def layout_to_save(tensor: torch.Tensor) -> Layout | None:
    """The layout that a checkpoint records for a tensor; None for a plain one."""
    layout = spmd.sharding_of(tensor) if spmd.is_sharded(tensor) else None
    # A compiler gives every computed value a layout, most often copies on all devices: that is a plain tensor there.
    return None if layout is not None and host_shards(tensor) is not None and not any(layout.dims) else layout


def has_layout(tensor: torch.Tensor, layout: Layout | None) -> bool:
    """Whether values for a tensor with this layout (None: a plain one) can be read into `tensor`."""
    if host_shards(tensor) is not None and layout is not None:  # otherwise it would keep what the compiler chose
        return spmd.sharding_of(tensor) == layout
    return spmd.is_sharded(tensor) == (layout is not None)


def empty_sharded(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None) -> Any:
    """A sharded tensor with uninitialized values, on the device and of the class of `like` if that is sharded."""
    if (on_host := engines.current().host_shards) is not None:
        return on_host.empty(shape, dtype, layout)
    like = like if like is not None and is_sharded(like) else None
    device = local_of(like).device if like is not None else runtime.device()
    device_mesh, placements = torch_layout(layout, shape)
    if layout.mesh.coordinate(runtime.rank()) is None:
        local = torch.empty(0, dtype=dtype, device=device)
    else:
        cuts = layout.slices(shape, runtime.rank())
        local = torch.empty([cut.stop - cut.start for cut in cuts], dtype=dtype, device=device)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    kind: Any = DTensor if like is not None and type(like.detach()) is DTensor else ShardedTensor
    return kind(local, DTensorSpec(device_mesh, placements, tensor_meta=meta), requires_grad=False)


def part_to_write(piece: TensorShard) -> TensorShard | None:
    """The part of its shard that this rank writes; None if it writes nothing."""
    local = piece.local
    if local.numel() == 0 and math.prod(piece.shape) > 0:
        return None
    if piece.copies <= 1:
        return piece
    rows = local.shape[0] if local.dim() else 0
    if rows < piece.copies or local.numel() * local.element_size() < SMALL * piece.copies:
        return piece if zlib.crc32(piece.name.encode()) % piece.copies == piece.copy else None
    each = -(-rows // piece.copies)
    start, stop = min(each * piece.copy, rows), min(each * (piece.copy + 1), rows)
    if start == stop:
        return None
    offsets = (piece.offsets[0] + start, *piece.offsets[1:])
    return replace(piece, local=local[start:stop], offsets=offsets)


def as_bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without copying."""
    return memoryview(_flat(t).numpy()) if t.numel() else memoryview(b"")


def _flat(t: torch.Tensor) -> torch.Tensor:
    # A dim of size 1 may have any stride, which `view` would keep.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def host_blocks(t: torch.Tensor, scratch: Any, limit: int) -> Iterator[memoryview]:
    """The bytes of a tensor in order, in blocks of at most `limit` bytes.

    Contiguous CPU memory is yielded without copying. GPU blocks are copied through `scratch()`, a pinned buffer of
    `limit` bytes, so that nothing is allocated on the GPU.
    """
    if t.numel() == 0:
        return
    if not t.is_contiguous():
        if t.dim() == 1 or t.numel() * t.element_size() <= limit:
            t = t.contiguous() if t.device.type == "cpu" else _across(t)
        else:
            for row in t.unbind(0):
                yield from host_blocks(row, scratch, limit)
            return
    flat = _flat(t)
    for start in range(0, flat.numel(), limit):
        block = flat[start : start + limit]
        if block.device.type != "cpu":
            target = scratch()[: block.numel()]
            target.copy_(block)  # synchronizes with the GPU
            block = target
        yield memoryview(block.numpy())


def _across(t: torch.Tensor) -> torch.Tensor:
    """A non-contiguous GPU tensor on the CPU: its whole span is copied, so that the GPU allocates nothing."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    flat = t.as_strided((span,), (1,)).cpu()
    return flat.as_strided(t.shape, t.stride()).contiguous()


STAGED_BYTES = 2**30
"""Restored tensors that are staged are together in host memory up to this size."""


@dataclass(frozen=True)
class LoadTarget:
    """Memory to read into: a shard of a stored tensor."""

    name: str
    """Name of the stored tensor."""
    local: torch.Tensor
    offsets: tuple[int, ...]


class TensorToLoad:
    """A tensor that a stored one is read into."""

    staged_bytes = 0
    """Host memory that `targets` takes: at most the whole tensor, so that all ranks read the same ones together."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.tensor = name, tensor

    def targets(self) -> list[LoadTarget]:
        """The memory of the shards that this process holds."""
        shard = shard_of(self.name, self.tensor)
        return [] if shard is None else [LoadTarget(self.name, shard.local, shard.offsets)]

    def finish(self) -> None:
        """Called once the targets are filled."""


class StagedTensor(TensorToLoad):
    """A tensor whose targets are in host memory; `finish` loads them into the devices of this process."""

    def __init__(self, name: str, tensor: torch.Tensor, shards: HostShards):
        super().__init__(name, tensor)
        self._shards = shards
        self.staged_bytes = tensor.numel() * tensor.element_size()

    def targets(self) -> list[LoadTarget]:
        """The memory that the tensor's pieces are read into."""
        self._staging = self._shards.stage(self.tensor)
        return [LoadTarget(self.name, memory, offset_of(cuts)) for cuts, memory in self._staging.parts()]

    def finish(self) -> None:
        """Copy what was read to the tensor."""
        self._staging.commit()


def to_load(name: str, tensor: torch.Tensor) -> TensorToLoad:
    """The tensor as what a stored one called `name` is read into."""
    if (on_host := host_shards(tensor)) is not None:
        return StagedTensor(name, tensor, on_host)
    shard_of(name, tensor)  # raises for a tensor that nothing can be read into
    return TensorToLoad(name, tensor)


def read_groups(tensors: Iterable[TensorToLoad]) -> Iterator[list[TensorToLoad]]:
    """The tensors in groups that are read together: at least one group, the same ones on every rank."""
    group: list[TensorToLoad] = []
    for tensor in tensors:
        if group and sum(t.staged_bytes for t in group) + tensor.staged_bytes > STAGED_BYTES:
            yield group
            group = []
        group.append(tensor)
    yield group


def mismatch(name: str, tensor: torch.Tensor, manifest: Manifest) -> str:
    """Why a stored tensor cannot be read into `tensor`; empty if it can."""
    stored = manifest.tensors.get(name)
    if stored is None:
        return f"{name} is not in the checkpoint"
    if tuple(stored.shape) != tuple(tensor.shape):
        return f"{name} has shape {tuple(stored.shape)} in the checkpoint and {tuple(tensor.shape)} here"
    dtype = DTYPES[stored.dtype]
    if dtype.is_floating_point != tensor.dtype.is_floating_point or (
        not dtype.is_floating_point and dtype != tensor.dtype
    ):
        return f"{name} is {stored.dtype} in the checkpoint and {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} here"
    return ""
