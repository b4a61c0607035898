"""A small decoder: the model that the guides' samples leave open."""

from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY, WIDTH, ROWS, LENGTH = 64, 32, 8, 12


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # Without biases: the gradient of a key bias is zero up to rounding, and Adam would make a step of it.
        self.attention = nn.MultiheadAttention(WIDTH, 4, bias=False, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Takes tokens [rows, length] and targets; returns the loss of each token."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.logits(x).transpose(1, 2), y, reduction="none")


@dataclass
class Output:
    logits: torch.Tensor


class DecoderWithOutput(Decoder):
    """Returns an object with the logits, as models of transformers do."""

    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        return Output(self.logits(x))


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, drawn on the host: the same in every process and on both engines."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
