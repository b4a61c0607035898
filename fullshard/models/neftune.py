"""NEFTune: noise on the embeddings while a model trains, as transformers' Trainer adds it."""

from __future__ import annotations

import math
from typing import Any

import torch

from fullshard.models.chunked_loss import causal


def add_noise(model: Any, alpha: float) -> None:
    """Let the model's embedding give uniform noise with its output, of a size that falls with the row's.

    It is drawn from torch's own generator, which each step seeds: a resumed run draws the same.
    """

    def noisy(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.zeros_like(output).uniform_(-size, size)

    causal(model).get_input_embeddings().register_forward_hook(noisy)
