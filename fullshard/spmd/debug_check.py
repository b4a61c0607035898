"""A debugging check that a plain tensor used as a global value is the same on every rank.

Off by default: it reads every such tensor and needs a collective. `check_global_values()` or
`FULLSHARD_CHECK_GLOBAL=1` switches it on.
"""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.config.errors import LayoutError

_on = os.environ.get("FULLSHARD_CHECK_GLOBAL", "0").lower() not in ("", "0", "false", "no")


def check_global_values(on: bool = True) -> None:
    """Switch the check on or off. Every rank must make the same call."""
    global _on
    _on = on


def require_same(t: torch.Tensor, mesh: DeviceMesh) -> None:
    """If the check is on: raise on every rank if values differ, and name the ranks that differ from rank 0."""
    if not _on or t.is_meta or mesh.size() != dist.get_world_size():
        return
    digest = digest_of(t)
    seen: list[tuple[tuple[int, ...], str]] = [((), "")] * dist.get_world_size()
    dist.all_gather_object(seen, (tuple(t.shape), digest))
    odd = [rank for rank, value in enumerate(seen) if value != seen[0]]
    if odd:
        raise LayoutError(
            f"a plain tensor of shape {tuple(t.shape)} was used as a global value, but rank(s) {odd} have another "
            f"value (or shape) than rank 0; use the same seed on every rank (fullshard.runtime.seed), or shard "
            f"per-rank data with ShardingSpec(..., minibatch=True)"
        )


def digest_of(t: torch.Tensor) -> str:
    """A hash of the bytes of a tensor."""
    data = t.detach().cpu().contiguous()
    return hashlib.blake2b(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()
