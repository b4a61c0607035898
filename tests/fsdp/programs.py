"""The programs that a sharded model must equal: small models, one device, the whole batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fullshard.spmd as xs
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, checkpoint_module, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from tests.spmd.models import InDouble

VOCABULARY = 67
"""Not a multiple of 2 or 4: embeddings need padding."""
ROWS, LENGTH = 8, 9


def llama(*, tied: bool = False, layers: int = 2) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=44, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the grouped kernel has no fp64
    return MixtralForCausalLM(config)


class Branches(nn.Module):
    """Takes one of two ways by what is in the batch, and has parameters of many shapes that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 10)
        self.left = nn.Linear(10, 10)
        self.right = nn.Sequential(nn.Linear(10, 3), nn.Linear(3, 10))
        self.head = nn.Linear(10, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5, 3))
        self.frozen = nn.Parameter(torch.full((3, 10), 0.3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x)) * self.scale
        rows = []
        for row in h.unbind(0):  # each row its own way, so that one device takes every way a rank takes
            rows.append(self.left(row) if row.sum() > 0 else self.right(row) + self.frozen.sum(0))
        return self.head(torch.stack(rows))


class Thin(nn.Module):
    """Parameters that are short in one dim or in all: by their rows they would be mostly padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.down = nn.Linear(16, 3)
        self.up = nn.Linear(3, 13)
        self.mix = nn.Parameter(torch.randn(3, 18))
        self.gate = nn.Parameter(torch.tensor([[1.5, 0.5]]))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.frozen = nn.Parameter(torch.randn(3, 16), requires_grad=False)
        self.head = nn.Linear(31, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x)) * self.frozen.sum(0)
        h = torch.tanh(self.down(h)) * self.gate[0, 0] + self.shift
        return self.head(torch.cat([self.up(h), torch.tanh(h @ self.mix) * self.gate[0, 1]], dim=1))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks, a linear layer and a buffer."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.scale)


HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama-tied": functools.partial(llama, tied=True),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
}

POLICIES: dict[str, Any] = {
    "none": None,
    "transformer": transformer_auto_wrap_policy,
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=1500),
}

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return {**HUGGING_FACE, "branches": Branches, "thin": Thin}[name]().to(dtype)


def batches(steps: int, dtype: torch.dtype, name: str = "llama") -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    if name in ("branches", "thin"):
        return [torch.randn(ROWS, 6, generator=generator).to(dtype) for _ in range(steps)]
    return [torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if batch.is_floating_point():
        return model(batch).square().mean()
    return model(input_ids=batch, labels=batch).loss


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(runtime.world_size())[runtime.rank()]


def mesh_for(strategy: str) -> xs.Mesh:
    world = runtime.world_size()
    if strategy.startswith("HYBRID"):
        return xs.Mesh(np.arange(world), (2, world // 2), ("replica", "fsdp"))
    return xs.Mesh(np.arange(world), (world,), ("fsdp",))


def exact(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return InDouble() if dtype == torch.float64 else contextlib.nullcontext()


def checkpoint_exactly(layer: nn.Module) -> None:
    """`checkpoint_module`, with `exact` in force where backward runs the layer again (autograd turns modes off)."""
    forward = layer.forward

    @functools.wraps(forward)
    def in_double(*args: Any, **kwargs: Any) -> Any:
        with exact(torch.float64):
            return forward(*args, **kwargs)

    layer.forward = in_double  # type: ignore[method-assign]
    checkpoint_module(layer)


def mean_over_ranks(value: torch.Tensor) -> float:
    gathered = [None] * runtime.world_size()
    torch.distributed.all_gather_object(gathered, value.item())
    return sum(gathered) / len(gathered)  # type: ignore[arg-type]


def train_alone(name: str, steps: int, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    """Losses, first gradients and the trained model of the one-device program."""
    model = build(name, dtype)
    losses, gradients = [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with exact(dtype):
        for step, batch in enumerate(batches(steps, dtype, name)):
            loss = loss_of(model, batch)
            loss.backward()
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, gradients, model


@functools.lru_cache(maxsize=16)
def alone(
    name: str, steps: int, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The one-device program's results, worked out once per process."""
    losses, gradients, model = train_alone(name, steps, dtype)
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def train_sharded(
    model: nn.Module, name: str, steps: int, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same program, every rank with its rows: global losses and first gradients."""
    losses, gradients = [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with exact(dtype):
        for step, batch in enumerate(batches(steps, dtype, name)):
            loss = loss_of(model, mine(batch))
            loss.backward()
            if step == 0:
                gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
    return losses, gradients


def sharded(
    name: str = "llama", dtype: torch.dtype = torch.float32, strategy: str = "FULL_SHARD", **options: Any
) -> Any:
    """The model in units of its layers, with parameters both large and small enough to share a bucket."""
    options.setdefault("auto_wrap_policy", None if name in ("branches", "thin") else transformer_auto_wrap_policy)
    options.setdefault("small_parameter_bytes", 2048)
    return FSDPv2(build(name, dtype), mesh_for(strategy), strategy=strategy, **options)


def step(model: nn.Module, name: str = "llama", dtype: torch.dtype = torch.float32, batch: int = 0) -> torch.Tensor:
    """Forward and backward on this rank's rows of a batch."""
    loss = loss_of(model, mine(batches(batch + 1, dtype, name)[batch]))
    loss.backward()
    return loss


def wrapped(name: str, dtype: torch.dtype, checkpointed: bool, **options: Any) -> nn.Module:
    """The model, its layers checkpointed if asked, fully sharded."""
    model = build(name, dtype)
    if checkpointed:
        layers = [m for m in model.modules() if type(m).__name__ in set(model._no_split_modules)]
        assert layers
        for layer in layers:
            (checkpoint_exactly if dtype == torch.float64 else checkpoint_module)(layer)
    return FSDPv2(model, **options)


def assert_same_first_gradients(name: str, checkpointed: bool = False, **options: Any) -> None:
    """In fp32, relative to the model's largest gradient: key biases have a true gradient of zero, only noise."""
    dtype = torch.float32
    _, gradients, _ = alone(name, 1, dtype)
    _, got = train_sharded(wrapped(name, dtype, checkpointed, **options), name, 1, dtype)
    largest = max(g.abs().max().item() for g in gradients.values())
    assert largest > 1e-3
    assert got.keys() == gradients.keys()
    for n, gradient in gradients.items():
        assert (got[n] - gradient).abs().max().item() <= 1e-5 * largest, n


def assert_same_training(name: str, steps: int = 5, checkpointed: bool = False, **options: Any) -> nn.Module:
    """Wrap, train in fp64, and compare every loss, first gradient and final parameter with one device."""
    dtype = torch.float64
    losses, gradients, parameters = alone(name, steps, dtype)
    model = wrapped(name, dtype, checkpointed, **options)
    got_losses, got_gradients = train_sharded(model, name, steps, dtype)
    assert got_gradients.keys() == gradients.keys()
    for n, gradient in gradients.items():
        torch.testing.assert_close(
            got_gradients[n], gradient, rtol=0, atol=1e-9, msg=lambda m, n=n: f"gradient of {n}: {m}"
        )
    assert max(abs(a - b) for a, b in zip(losses, got_losses, strict=True)) < 1e-9, (losses, got_losses)
    full = dict(model.named_parameters())
    assert list(full) == list(parameters)
    for n, value in parameters.items():
        torch.testing.assert_close(full[n].full_tensor(), value, rtol=0, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}")
    return model
