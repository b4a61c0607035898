"""Memory of optimizers: the state of each parameter, and what an update needs while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from fullshard.fsdp.plan import ParameterPlan, UnitPlan, item_size
from fullshard.optim.bnb import BLOCK
from fullshard.optim.muon import embeddings_of, is_hidden_matrix, tables_of
from fullshard.optim.names import SERVED

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
    weight_decay: float = 0.0
    """That of matrices; vectors have none."""

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
        """Bytes of state of a rank's pieces of a unit."""
        return sum(self.state(p) for p in unit.parameters)

    @property
    def paged(self) -> bool:
        """Whether the state is in memory that moves between host and device as it is needed."""
        return self.name is not None and self.name.startswith("paged_")

    def updating(self, p: ParameterPlan, accelerator: bool) -> int:
        """Bytes that the update of a parameter by itself needs while it runs."""
        if self.name is None or not p.trainable or accelerator and self._together(p):
            return 0
        if self.name == "muon" and self.apart.isdisjoint(p.names):
            # A whole matrix in bf16: before and after, with momentum, and its products with its transpose.
            rows, columns = p.shape
            return 2 * (4 * rows * columns + 2 * min(rows, columns) ** 2)
        copies = UPDATE_COPIES.get(self._torch_name, 0) + (self._torch_name in ADD_DECAY and self._decays(p))
        if SERVED[self.name].package == "bitsandbytes" and not accelerator:  # no kernels
            copies = 3 if SERVED[self.name].bits == 32 or "rmsprop" in self.name else 5
        return copies * math.prod(p.piece) * item_size(p.dtype)

    def updating_together(self, parameters: Iterable[ParameterPlan], size: Callable[[int], int]) -> int:
        """Bytes that an update of all these needs on an accelerator, where torch updates the parameters of a group in
        one launch (`foreach`): `size` is what a number of bytes takes. Matrices and vectors are groups of their own."""
        groups: dict[Any, int] = {}
        for p in parameters:
            if self._together(p):
                copies = FOREACH_COPIES[self._torch_name] + (self._torch_name in ADD_DECAY_TOGETHER and self._decays(p))
                key = (len(p.shape) > 1, p.dtype)
                groups[key] = groups.get(key, 0) + copies * size(math.prod(p.piece) * item_size(p.dtype))
        return max(groups.values(), default=0)

    def _together(self, p: ParameterPlan) -> bool:
        """Whether an update on an accelerator takes the parameter together with others."""
        by_muon = self.name == "muon" and self.apart.isdisjoint(p.names)
        return p.trainable and self._torch_name in FOREACH_COPIES and not by_muon

    @property
    def _torch_name(self) -> str:
        """The optimizer that updates what Muon does not."""
        return "adamw_torch" if self.name == "muon" else self.name or ""

    def _decays(self, p: ParameterPlan) -> bool:
        return self.weight_decay > 0 and len(p.shape) > 1

    def left_behind(self, p: ParameterPlan, accelerator: bool) -> int:
        """Bytes that the update of a parameter by itself still holds when the next one begins."""
        if accelerator or self.name != "adamw_torch" or not p.trainable:
            return 0
        return math.prod(p.piece) * item_size(p.dtype)


UPDATE_COPIES = {"adamw_torch": 2, "adagrad": 2, "rmsprop": 2, "adafactor": 3, "lion_32bit": 1}
"""Copies of a parameter's piece that its update by itself needs at a time, for optimizers that need any."""
ADD_DECAY = {"sgd", "adagrad", "rmsprop"}
"""Those that add weight decay to a copy of the gradient."""
FOREACH_COPIES = {"adamw_torch": 1, "sgd": 0, "adagrad": 2, "rmsprop": 1}
"""Copies of all parameters of a group, for optimizers of torch that update them in one launch on accelerators. On CPUs
they update one by one."""
ADD_DECAY_TOGETHER = {"sgd", "rmsprop"}


def names_apart(model: Any, optim: str | None) -> set[str]:
    """The parameters whose state differs from that of most: embeddings have 32-bit state with 8-bit optimizers, and
    `muon` updates embeddings, head and what is not a matrix with AdamW."""
    named = list(model.named_parameters(remove_duplicate=False))
    if optim == "muon":
        tables = tables_of(model)
        return {name for name, p in named if not is_hidden_matrix(name, p, tables)}
    wide = embeddings_of(model) if optim in SERVED and SERVED[optim].bits == 8 else set()
    return {name for name, p in named if p in wide}
