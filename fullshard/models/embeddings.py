"""NEFTune: adds noise to the embeddings during training, as transformers' Trainer does."""

from __future__ import annotations

import math
from typing import Any

import torch

from fullshard.models.causal_lm import get_causal_lm


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
