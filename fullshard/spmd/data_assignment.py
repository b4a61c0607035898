"""`tensor.data = value` on a sharded tensor: the value reaches the pieces.

torch would change the outer tensor alone, whose memory nobody reads, and say nothing.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fullshard import runtime
from fullshard.errors import LayoutError
from fullshard.spmd.tensor import ShardedTensor, is_sharded, layout_of, relay, respec
from fullshard.torch_private import local_of, set_local, spec_of

_read = torch.Tensor.data.__get__


@torch.no_grad()
def _assign(t: DTensor, value: torch.Tensor) -> None:
    """Let the pieces be those of a value of the same shape; a plain one is the whole, the same on every rank."""
    if value.shape != t.shape or value.dtype != t.dtype:
        raise LayoutError(
            f".data of a sharded tensor of shape {tuple(t.shape)} and {t.dtype} was assigned one of shape "
            f"{tuple(value.shape)} and {value.dtype}; shape and dtype must be the same (module.to(dtype) casts "
            f"parameters)"
        )
    if is_sharded(value):
        piece = relay(local_of(value), spec_of(value), respec(spec_of(value), t.device_mesh, t.placements))
    else:
        piece = value[layout_of(spec_of(t)).slices(t.shape, runtime.rank())]
    # Not a copy into the old memory: `a.data, b.data = b.data, a.data` swaps.
    set_local(t, piece.detach().to(local_of(t).device).contiguous())
    torch.autograd.graph.increment_version(t)


for kind in (DTensor, ShardedTensor):
    kind.data = property(_read, _assign)
