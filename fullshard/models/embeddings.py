"""NEFTune: adds noise to the embeddings during training, as transformers' Trainer does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fullshard.fsdp.host_embedding import keep_on_host
from fullshard.models.causal_lm import get_causal_lm


def offload_embedding(model: nn.Module) -> str:
    """Let the engine keep the model's frozen input embedding in host memory; call it before sharding.

    Returns why the embedding stays on the device instead; empty if it does not.
    """
    embedding = get_causal_lm(model).get_input_embeddings()
    tables = [m for m in embedding.modules() if isinstance(m, nn.Embedding)] if embedding is not None else []
    frozen = [m for m in tables if not m.weight.requires_grad]
    if not frozen:
        return "the input embedding is trained" if tables else "the model has no input embedding of torch's class"
    if any(m.max_norm is not None for m in frozen):
        return "the input embedding has a max_norm, which changes its rows"
    inside = set(embedding.modules())
    others = {p for m in model.modules() if m not in inside for p in m.parameters(recurse=False)}
    if any(m.weight in others for m in frozen):
        return "the output head is tied to the input embedding"
    for table in frozen:
        keep_on_host(table.weight)
    return ""


def add_noise(model: Any, alpha: float) -> None:
    """Add uniform noise to the output of the model's embedding, scaled by alpha / sqrt(length × hidden size).

    The noise comes from torch's default generator, which is seeded at each step, so a resumed run draws the same noise.
    """

    def noisy(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.zeros_like(output).uniform_(-size, size)

    get_causal_lm(model).get_input_embeddings().register_forward_hook(noisy)
