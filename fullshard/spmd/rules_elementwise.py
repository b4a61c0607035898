"""Sharding rules for operators that treat each index of some dims independently: attention, convolution, pooling.

A rule is a pattern such as `"query: bhqd, key: bhkd -> bhqd, bhq"`. It names the dims of each tensor argument and
result (`*`: any further dims). The operator is independent along the dims whose letters are in `split`, so shards split
along them can be computed separately. A result without a split letter is a sum over the shards (`Partial`). A result
`=` (the state of a generator) is used as each rank has it. Tensors in a list are used whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard.device.torch_private import DTensorSpec, TensorMeta, local_of, schema_of, spec_of
from fullshard.spmd.redistribute import redistribute, spec_with
from fullshard.spmd.tensor import ShardedTensor, is_sharded


def _whole(t: Any, mesh: Any) -> Any:
    """A tensor that is not split over the mesh; other values as they are."""
    if not is_sharded(t):
        return t
    return redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), mesh, [Replicate()] * mesh.ndim))


class Independent:
    """A rule given as a pattern."""

    def __init__(self, pattern: str, split: str):
        ins, outs = pattern.split("->")
        self.ins = {name.strip(): dims.strip() for name, dims in (part.split(":") for part in ins.split(","))}
        self.outs = [part.strip() for part in outs.split(",")]
        self.split = split

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        named = {a.name: v for a, v in zip(schema_of(op).arguments, args, strict=False)} | kwargs
        tensors = {name: t for name, t in named.items() if is_sharded(t)}
        mesh = next(iter(tensors.values())).device_mesh
        split = self._split(tensors, mesh)
        local: dict[str, Any] = dict(named)
        for name, t in tensors.items():
            dims = [self._dim(name, t, letter) for letter in split]
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            local[name] = redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), mesh, placements))
        local |= {name: [_whole(t, mesh) for t in v] for name, v in named.items() if isinstance(v, list)}
        names = [a.name for a in schema_of(op).arguments]
        result = op(*(local[n] for n in names[: len(args)]), **{k: local[k] for k in kwargs})
        if not isinstance(result, tuple | list):
            return self._wrap(result, self.outs[0], split, mesh)
        return tuple(self._wrap(t, dims, split, mesh) for t, dims in zip(result, self.outs, strict=True))

    def _split(self, tensors: dict[str, DTensor], mesh: Any) -> list[str]:
        """For each mesh dim the letter that is split over it; '' for none."""
        split: list[str] = []
        for index in range(mesh.ndim):
            letter = ""
            for name, t in tensors.items():
                placement = t.placements[index]
                if isinstance(placement, Shard):
                    letters = [c for c in self.split if self._dim(name, t, c) == placement.dim]
                    letter = letter or "".join(letters)
            if letter and not self._divides(letter, [*split, letter], tensors, mesh):
                letter = ""
            split.append(letter)
        return split

    def _divides(self, letter: str, split: list[str], tensors: dict[str, DTensor], mesh: Any) -> bool:
        parts = 1
        for index, used in enumerate(split):
            parts *= mesh.size(index) if used == letter else 1
        dims = [(t, self._dim(name, t, letter)) for name, t in tensors.items()]
        return all(t.shape[dim] % parts == 0 for t, dim in dims if dim is not None)

    def _dim(self, name: str, t: DTensor, letter: str) -> int | None:
        """The dim of an argument that a letter names; None if the argument lacks it or is broadcast along it."""
        dims = self.ins.get(name, "*")
        if "*" not in dims:
            dims = dims[max(len(dims) - t.ndim, 0) :]  # an argument may omit leading dims
        dim = dims.find(letter) if letter else -1
        return dim if 0 <= dim < t.ndim and t.shape[dim] > 1 else None

    def _wrap(self, t: Any, dims: str, split: list[str], mesh: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        shape = list(t.shape)
        placements: list[Placement] = []
        for index, letter in enumerate(split):
            if not letter or dims == "=":
                placements.append(Replicate())
            elif letter in dims:
                placements.append(Shard(dims.index(letter)))
                shape[dims.index(letter)] *= mesh.size(index)
            else:
                placements.append(Partial())
        return wrapped(t, mesh, placements, shape)


def wrapped(local: torch.Tensor, mesh: Any, placements: Any, shape: Any) -> ShardedTensor:
    """A sharded tensor of the given global shape, with its dims in the same memory order as in its shard."""
    stride, step = [0] * len(shape), 1
    order = local.stride() if local.ndim == len(shape) else range(len(shape), 0, -1)  # else: a rank outside the mesh
    for dim in sorted(range(len(shape)), key=lambda d: (order[d], -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return ShardedTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


INDEPENDENT: dict[str, tuple[str, str]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "query: bhqd, key: bhkd, value: bhkd, attn_mask: bhqk -> bhqd, bhq", "bh"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out: bhqd, query: bhqd, key: bhkd, value: bhkd, out: bhqd, logsumexp: bhq, attn_mask: bhqk"
        " -> bhqd, bhkd, bhkd", "bh"),
    "_scaled_dot_product_flash_attention": (
        "query: bhqd, key: bhkd, value: bhkd -> bhqd, bhq, =, =, =, =, =, =, =", "bh"),
    "_scaled_dot_product_flash_attention_backward": (
        "grad_out: bhqd, query: bhqd, key: bhkd, value: bhkd, out: bhqd, logsumexp: bhq -> bhqd, bhkd, bhkd", "bh"),
    "_scaled_dot_product_efficient_attention": (
        "query: bhqd, key: bhkd, value: bhkd, attn_bias: bhqk -> bhqd, bhq, =, =", "bh"),
    "_scaled_dot_product_efficient_attention_backward": (
        "grad_out_: bhqd, query: bhqd, key: bhkd, value: bhkd, attn_bias: bhqk, out: bhqd, logsumexp: bhq"
        " -> bhqd, bhkd, bhkd, bhqk", "bh"),
    "_scaled_dot_product_cudnn_attention": (
        "query: bhqd, key: bhkd, value: bhkd, attn_bias: bhqk -> bhqd, bhq*, =, =, =, =, =, =, =", "bh"),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out: bhqd, query: bhqd, key: bhkd, value: bhkd, out: bhqd, logsumexp: bhq*, attn_bias: bhqk"
        " -> bhqd, bhkd, bhkd", "bh"),
    "convolution": ("input: b*, weight: *, bias: * -> b*", "b"),
    "convolution_backward": ("grad_output: b*, input: b*, weight: * -> b*, *, *", "b"),
    "max_pool2d_with_indices": ("self: b* -> b*, b*", "b"),
    "max_pool2d_with_indices_backward": ("grad_output: b*, self: b*, indices: b* -> b*", "b"),
    "avg_pool2d": ("self: b* -> b*", "b"),
    "avg_pool2d_backward": ("grad_output: b*, self: b* -> b*", "b"),
    "_adaptive_avg_pool2d": ("self: b* -> b*", "b"),
    "_adaptive_avg_pool2d_backward": ("grad_output: b*, self: b* -> b*", "b"),
    "nll_loss_backward": (
        "grad_output: b, self: b*, target: b*, weight: *, total_weight: * -> b*", "b"),
}  # fmt: skip
