"""The cases of the training matrix: one value of each factor, chosen so that every pair of values occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.pairwise import pairwise


@dataclass(frozen=True)
class Case:
    """One way to train."""

    strategy: str = "FULL_SHARD"
    mesh: tuple[int, ...] = ()
    """(replicas, shards) of the hybrid strategies; empty for one axis over all ranks."""
    trains: str = "full"
    """`full`, `lora` or `qlora`."""
    precision: str = "fp32"
    """`fp32`, or `bf16`: fp32 masters, bf16 compute, fp32 reduction."""
    activations: str = "kept"
    """`kept`, `recomputed` in backward, or `hosted`: recomputed from inputs that were moved to the host."""
    place: str = "device"
    """`device`, or `offload`: shards, gradients and optimizer state on the host."""
    batches: str = "one"
    """Micro-batches a step: `one`, two that are reduced `each`, or two with `no_sync` around the first."""
    words: str = "untied"
    """Whether the output head is `tied` to the embedding; `hosted`: untied, and a frozen embedding is on the host."""
    clip: str = "free"
    """`clipped`: the norm of the gradients is limited."""
    prefetch: str = "pre"
    """When backward gathers the next unit: `pre`, `post` or `none`."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh))
        words = [self.strategy, shape, self.trains, self.precision, self.activations, self.place, self.batches]
        return "-".join(word for word in (*words, self.words, self.clip, self.prefetch) if word)


FACTORS: list[list[Any]] = [
    ["full", "lora", "qlora"],
    ["fp32", "bf16"],
    ["kept", "recomputed", "hosted"],
    ["device", "offload"],
    ["one", "each", "no_sync"],
    ["untied", "tied", "hosted"],
    ["free", "clipped"],
    ["pre", "post", "none"],
]
MESHES = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1)]}


def layouts(ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    """The strategies, each hybrid one on each of its meshes."""
    plain: list[tuple[str, tuple[int, ...]]] = [(name, ()) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]
    return plain + [(name, mesh) for name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") for mesh in MESHES[ranks]]


def cases(ranks: int) -> list[Case]:
    """The matrix for a number of ranks."""
    return [Case(*layout, *rest) for layout, *rest in pairwise([layouts(ranks), *FACTORS])]  # type: ignore[misc]
