"""Memory of optimizers: the state of each parameter, and what an update needs while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from fullshard.fsdp.bnb_optimizers import BLOCK
from fullshard.fsdp.plan import ParameterPlan, UnitPlan, item_size
from fullshard.optimizers.muon import embeddings_of, is_hidden_matrix, tables_of
from fullshard.optimizers.names import SERVED

SMALL = 4096
"""Parameters of fewer elements have 32-bit state with the 8-bit optimizers of bitsandbytes."""


@dataclass(frozen=True)
class OptimizerMemory:
    """An optimizer by its name in `optim`; None stands for one of the user's, whose state is unknown."""

    name: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its `optim_args`."""
    apart: AbstractSet[str] = frozenset()
    """The names of parameters that have other state than the rest: see `names_apart`."""

    def state(self, p: ParameterPlan) -> int:
        """Bytes of state of a rank's piece of a parameter."""
        if self.name is None or not p.trainable:
            return 0
        kind, count = SERVED[self.name], math.prod(p.piece)
        apart = not self.apart.isdisjoint(p.names)
        if self.name == "adafactor":
            wide = max(item_size(p.dtype), 4)
            factored = math.prod(p.piece[:-1]) + math.prod((*p.piece[:-2], p.piece[-1])) if len(p.shape) > 1 else count
            return factored * wide
        states = kind.states + bool(self.arguments.get("momentum") and self.name != "muon")
        states += bool(self.arguments.get("centered"))
        if self.name == "muon" and apart:
            states = 2
        if kind.bits == 8 and not apart and math.prod(p.shape) >= SMALL:
            return states * (count + 4 * -(-count // BLOCK))
        return states * count * (4 if kind.bits else item_size(p.dtype))

    def unit_state(self, unit: UnitPlan) -> int:
        return sum(self.state(p) for p in unit.parameters)

    @property
    def paged(self) -> bool:
        """Whether the state is in memory that moves between host and device as it is needed."""
        return self.name is not None and self.name.startswith("paged_")

    def updating(self, p: ParameterPlan, accelerator: bool) -> int:
        """Bytes that the update of a parameter needs while it runs."""
        if self.name is None or not p.trainable:
            return 0
        if self.name == "muon" and self.apart.isdisjoint(p.names):
            # A whole matrix in bf16: before and after, with momentum, and its products with its transpose.
            rows, columns = p.shape
            return 2 * (4 * rows * columns + 2 * min(rows, columns) ** 2)
        copies = UPDATE_COPIES.get(self.name, UPDATE_COPIES["adamw_torch"] if self.name == "muon" else 0)
        if SERVED[self.name].package == "bitsandbytes" and not accelerator:  # no kernels
            copies = 3 if SERVED[self.name].bits == 32 or "rmsprop" in self.name else 5
        return copies * math.prod(p.piece) * item_size(p.dtype)

    @property
    def copies_at_once(self) -> int:
        """Copies of all pieces together that an update on accelerators needs; 0 where it takes them one by one."""
        return FOREACH_COPIES.get(self.name or "", 0)

    def left_behind(self, p: ParameterPlan) -> int:
        """Bytes that the update of a parameter still holds when the next one begins."""
        return math.prod(p.piece) * item_size(p.dtype) if self.name == "adamw_torch" and p.trainable else 0


UPDATE_COPIES = {"adamw_torch": 2, "adagrad": 2, "rmsprop": 2, "adafactor": 3, "lion_32bit": 1}
"""Copies of a parameter's piece that its update needs at a time, for optimizers that need any."""
FOREACH_COPIES = {"adamw_torch": 1, "adagrad": 2, "rmsprop": 1}
"""The same for optimizers that update all parameters at once on accelerators (`foreach` of torch)."""


def names_apart(model: Any, optim: str | None) -> set[str]:
    """The parameters whose state differs from that of most: embeddings have 32-bit state with 8-bit optimizers, and
    `muon` updates embeddings, head and what is not a matrix with AdamW."""
    named = list(model.named_parameters(remove_duplicate=False))
    if optim == "muon":
        tables = tables_of(model)
        return {name for name, p in named if not is_hidden_matrix(name, p, tables)}
    wide = embeddings_of(model) if optim in SERVED and SERVED[optim].bits == 8 else set()
    return {name for name, p in named if p in wide}
