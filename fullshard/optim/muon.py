"""`optim muon`: Muon for the matrices of hidden layers, AdamW for everything else, as one optimizer.

Embeddings, the output head, vectors and parameters of more than two dims are AdamW's, as Muon's authors advise. How
Muon updates sharded matrices is in `optim/sharded.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.fsdp.checks import PART_OF_ANOTHER

APART = ("lora_embedding_", "trainable_tokens")
"""Beginnings of the names of adapters on embeddings."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers with one list of parameter groups and one state."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._parts = (muon, adamw)
        for part in self._parts:
            setattr(part, PART_OF_ANOTHER, True)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step both optimizers; returns the loss of `closure`."""
        loss = closure() if closure is not None else None
        muon, adamw = self._parts
        muon.param_groups = [group for group in self.param_groups if "ns_steps" in group]
        adamw.param_groups = [group for group in self.param_groups if "ns_steps" not in group]
        for part in self._parts:
            part.state = self.state  # load_state_dict replaces it
            part.step()
        return loss


def is_hidden_matrix(name: str, p: nn.Parameter, tables: set[nn.Parameter]) -> bool:
    """Whether Muon updates a parameter; `tables` are those of embeddings and output head."""
    return p.dim() == 2 and p not in tables and not any(part.startswith(APART) for part in name.split("."))


def embeddings_of(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of embeddings."""
    return {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}


def tables_of(model: Any) -> set[nn.Parameter]:
    """The parameters of embeddings and of the output head, with adapters on them."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return embeddings_of(model) | (set(head.parameters()) if isinstance(head, nn.Module) else set())
