"""The shards of an XLA tensor: reading them into host memory, and loading values into them.

One process drives several devices, so it holds several shards of a tensor, some of them copies of each other. Host
memory holds one tensor at a time, and of it only what the devices of this process hold. Implements
`engines.HostShards`, through which `checkpoint/` and `weights/` move values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fullshard.device.torch_private import parameters_of
from fullshard.distributed import runtime
from fullshard.distributed.engines import HostPiece
from fullshard.fsdp.strategy import dtype_of
from fullshard.spmd.spec import Layout
from fullshard.xla.tensor import _compiler, annotate, padded, sharding_of

Cuts = tuple[slice, ...]
"""A part of a tensor: start and stop for each dim."""
Key = tuple[tuple[int, int], ...]
"""The same, hashable."""


def _parts(layout: Layout) -> int:
    return math.prod(layout.parts(dim) for dim in range(len(layout.dims)))


def key(cuts: Cuts) -> Key:
    """A part as a key of a dict."""
    return tuple((cut.start, cut.stop) for cut in cuts)


def _device_id(name: str) -> int:
    """The id in a mesh of a device that torch_xla calls `TPU:3`."""
    return int(name.rpartition(":")[2])


# --- reading ----------------------------------------------------------------------------------------------------------


def read(t: torch.Tensor) -> list[HostPiece]:
    """The parts of a tensor on the devices of this process, each once. Waits for the devices."""
    layout = sharding_of(t)
    if layout is None or _parts(layout) == 1:
        copies, copy = (0, 0) if layout is None else (runtime.world_size(), runtime.rank())
        return [HostPiece(tuple(slice(0, size) for size in t.shape), t.detach().cpu(), copies, copy)]
    by_cuts: dict[Key, list[HostPiece]] = {}
    copies = layout.mesh.size() // _parts(layout)
    for value_padded, name in _compiler._get_local_shards([t])[0]:
        cuts = layout.slices(t.shape, _device_id(name))
        inside = value_padded[tuple(slice(0, cut.stop - cut.start) for cut in cuts)].contiguous()
        value = inside.view(t.dtype)  # uint16 arrives as int16
        by_cuts.setdefault(key(cuts), []).append(HostPiece(cuts, value, copies, layout.replica_id(_device_id(name))))
    pieces = []
    for same in by_cuts.values():
        alone = len({piece.copy for piece in same}) == copies  # no other process holds this part
        pieces += [HostPiece(same[0].cuts, same[0].value, 1, 0)] if alone else same
    return pieces


# --- loading ----------------------------------------------------------------------------------------------------------


def empty(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout | None) -> torch.Tensor:
    """A tensor with a layout, to load values into; it takes no memory until then."""
    t = torch.empty(shape, dtype=dtype, device=runtime.device())
    return t if layout is None else annotate(t, layout)


def whole(t: torch.Tensor) -> torch.Tensor:
    """The whole value in host memory. On the devices it takes no memory if this process holds all of it; otherwise all
    processes take part."""
    pieces = read(t)
    if len(pieces) == 1 and pieces[0].value.shape == t.shape:
        return pieces[0].value
    if sum(piece.value.numel() for piece in pieces if piece.copies == 1) < t.numel():
        return t.detach().cpu()
    out = torch.empty(t.shape, dtype=t.dtype)
    for piece in pieces:
        out[piece.cuts] = piece.value
    return out


class Staging:
    """Host memory for the values of one tensor; `commit` moves them to the devices of this process."""

    def __init__(self, t: torch.Tensor):
        self._tensor, self._layout = t, sharding_of(t)
        self._devices: list[str] = list(_compiler._xla_get_runtime_devices())
        self._cuts = [self._cuts_on(_device_id(name)) for name in self._devices]
        self._memory: dict[Key, torch.Tensor] = {}

    @property
    def numel(self) -> int:
        """The number of values."""
        return sum(math.prod(stop - start for start, stop in part) for part in {key(cuts) for cuts in self._cuts})

    def _cuts_on(self, device: int) -> Cuts:
        shape = self._tensor.shape
        return tuple(slice(0, n) for n in shape) if self._layout is None else self._layout.slices(shape, device)

    def parts(self) -> list[tuple[Cuts, torch.Tensor]]:
        """The parts that this process holds, each once, with uninitialized memory for its values."""
        distinct = {key(cuts): cuts for cuts in self._cuts}
        dtype = self._tensor.dtype
        self._memory = {part: torch.empty([stop - start for start, stop in part], dtype=dtype) for part in distinct}
        return [(cuts, self._memory[part]) for part, cuts in distinct.items()]

    @torch.no_grad()
    def commit(self) -> None:
        """Load the values into the tensor, whose layout stays, and release the host memory."""
        memory, self._memory = self._memory, {}
        if self._layout is None or _parts(self._layout) == 1:
            (value,) = memory.values()
            self._tensor.copy_(value)
            return
        shape = self._layout.shard_shape(self._tensor.shape)
        by_part = {part: padded(value, shape) for part, value in memory.items()}
        shards = [by_part[key(cuts)] for cuts in self._cuts]
        _compiler._load_local_shards(self._tensor, shards, self._devices)
        torch.autograd.graph.increment_version(self._tensor)


stage = Staging


class LoadableParameter:
    """A parameter of a wrapped model as loading and saving see it, with the interface of
    `fsdp.parameter.ShardedParameter`: the plan, and host memory for the values while they are read or written."""

    def __init__(self, annotated: Any):
        self.plan, self.layout, self.sites = annotated.plan, annotated.layout, annotated.sites
        self.shard: nn.Parameter = annotated.parameter
        self._staging: Staging | None = None

    @property
    def is_meta(self) -> bool:
        """Whether the parameter has no memory yet."""
        return self.shard.is_meta

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory that `parts` takes, at most."""
        return self.shard.numel() * self.shard.element_size()

    @property
    def local_numel(self) -> int:
        """The number of values of the parameter that the devices of this process hold, copies counted once."""
        return Staging(self.shard).numel

    def give_memory(self) -> None:
        """Move a parameter from the meta device to the devices; its values are not defined until they are loaded."""
        if self.is_meta:
            dtype = dtype_of(self.plan.dtype)
            assert dtype is not None
            new = nn.Parameter(empty(self.plan.shape, dtype, None), self.shard.requires_grad)
            torch.utils.swap_tensors(self.shard, annotate(new, self.layout))  # an optimizer may hold it

    def parts(self, keep: bool = False) -> list[tuple[Cuts, torch.Tensor]]:
        """The parts of the parameter on the devices of this process, each once, in host memory."""
        self._staging = Staging(self.shard)
        parts = self._staging.parts()
        if keep:
            values = {key(piece.cuts): piece.value for piece in read(self.shard)}
            for cuts, memory in parts:
                memory.copy_(values[key(cuts)])
        return parts

    def written(self) -> None:
        """Move the values of `parts` to the devices."""
        assert self._staging is not None
        self._staging.commit()
        self._staging = None

    def show_shard(self) -> None:
        """Let the modules hold the parameter again."""
        for module, name in self.sites:
            parameters_of(module)[name] = self.shard


loadable = LoadableParameter
