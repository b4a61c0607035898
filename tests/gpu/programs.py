"""Training programs for NCCL ranks that share one GPU: one device, fullshard, and torch's `fully_shard`.

The model is a small Llama: no parameter of it has a true gradient of zero, which AdamW would turn into noise. Its
vocabulary and its feed-forward width do not divide by the ranks, and its parameters are both larger and smaller than
`SMALL`, so that direct, padded and bucketed parameters all occur.

The one-device program sees the whole batch. In bf16 it holds fp32 masters and a bf16 copy of every floating-point
parameter, computes in the copy, adds up the bf16 gradients of the micro-batches in fp32, and updates the masters: the
casting rules of `fully_shard` with `MixedPrecisionPolicy(bf16, fp32)` and of `mixed_precision="bf16"`, and no autocast.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fullshard.spmd as xs
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, checkpoint_module, transformer_auto_wrap_policy
from fullshard.models.host_weights import offload_embedding
from fullshard.quant.quantize import quantize_model, quantized_layers
from fullshard.quant.sharded_groups import Scheme
from tests.fsdp.programs import mean_over_ranks, mine
from tests.gpu.cases import Case

VOCABULARY, ROWS, LENGTH, STEPS = 251, 8, 64, 3
SMALL = 8 * 1024
"""`small_parameter_bytes`: norms and LoRA's factors are below it."""
MAX_NORM = 0.25
LAYER = "LlamaDecoderLayer"


# --- models ---------------------------------------------------------------------------------------------------------


def llama(tied: bool = False) -> LlamaForCausalLM:
    """On the CPU, the same values every time."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=151, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def base(trains: str, tied: bool) -> nn.Module:
    """The model without adapters, on the CPU; in 4 bits for `qlora`."""
    model: nn.Module = llama(tied)
    return quantize_model(model, Scheme(double=True)) if trains == "qlora" else model


def build(trains: str, tied: bool) -> nn.Module:
    """What trains, on this rank's device: the model, or adapters on it (both factors random) or on its 4-bit form."""
    model = base(trains, tied)
    if trains != "full":
        torch.manual_seed(7)
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
        model = get_peft_model(model, lora)
    return model.to(runtime.device())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ == LAYER]


@functools.cache
def batches(count: int) -> list[torch.Tensor]:
    """Global micro-batches."""
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(count)]
    return [ids.to(runtime.device()) for ids in drawn]


# --- one training ---------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What is left of a training."""

    losses: list[float]
    """Over the global batch, of every micro-batch."""
    norms: list[float]
    """Of the gradients before each clipping."""
    values: dict[str, torch.Tensor]
    """Parameters and buffers, whole, on the CPU."""
    trainable: frozenset[str]

    def same_bits(self, other: Trained) -> bool:
        return (
            (self.losses, self.norms) == (other.losses, other.norms)
            and self.values.keys() == other.values.keys()
            and all(torch.equal(value, other.values[name]) for name, value in self.values.items())
        )

    def apart(self, other: Trained) -> tuple[float, float]:
        """The largest and the root mean square difference of the trained parameters."""
        assert self.trainable == other.trainable
        gaps = torch.cat([(self.values[n] - other.values[n]).flatten() for n in sorted(self.trainable)]).double()
        return gaps.abs().max().item(), gaps.square().mean().sqrt().item()

    def farthest(self, other: Trained) -> str:
        """The trained parameter that differs most."""
        return max(self.trainable, key=lambda n: (self.values[n] - other.values[n]).abs().max().item())


@contextlib.contextmanager
def exact_kernels() -> Iterator[None]:
    """Kernels that repeat bit for bit, fp32 products in fp32, and memory as torch allocates it: without the fills that
    come with deterministic algorithms, which would order streams that a training does not order."""
    tf32, fills = torch.backends.cuda.matmul.allow_tf32, torch.utils.deterministic.fill_uninitialized_memory
    torch.backends.cuda.matmul.allow_tf32 = torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32, torch.utils.deterministic.fill_uninitialized_memory = tf32, fills


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an `eps` well below the gradients (1e-3) and well above their rounding noise (1e-10): with the default
    of 1e-8 a few entries whose gradient happens to be about zero decide the largest difference, on one device too."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)


def train(
    model: nn.Module,
    case: Case,
    *,
    mean: Callable[[torch.Tensor], float] = torch.Tensor.item,
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    unsynced: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
    clip: Callable[[float], torch.Tensor] | None = None,
) -> tuple[list[float], list[float]]:
    """Losses and norms of `STEPS` steps of AdamW."""
    optimizer = optimizer or optimizer_for(model)
    per_step = 1 if case.batches == "one" else 2
    losses, norms = [], []
    for step in range(STEPS):
        for i in range(per_step):
            held = case.batches == "no_sync" and i + 1 < per_step
            with unsynced() if held else contextlib.nullcontext():
                ids = rows(batches(STEPS * per_step)[step * per_step + i])
                loss = model(input_ids=ids, labels=ids).loss
                (loss / per_step).backward()
                after_backward()
            losses.append(loss.detach())
        if case.clip == "clipped":
            limit = clip or functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
            norms.append(float(getattr(norm := limit(MAX_NORM), "full_tensor", lambda n=norm: n)()))
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return [mean(loss) for loss in losses], norms


# --- one device -----------------------------------------------------------------------------------------------------


def alone(case: Case) -> Trained:
    """The case's program on one device, worked out once per process and kind of arithmetic."""
    return _alone(case.trains, case.precision, case.batches != "one", case.words == "tied", case.clip)


@functools.cache
def _alone(trains: str, precision: str, several: bool, tied: bool, clip: str) -> Trained:
    model = build(trains, tied)
    case = Case(batches="each" if several else "one", clip=clip)
    with exact_kernels():
        losses, norms = train(model, case) if precision == "fp32" else _in_bf16(model, case)
    return Trained(losses, norms, _plain_values(model), _trainable(model))


def _in_bf16(masters: nn.Module, case: Case) -> tuple[list[float], list[float]]:
    narrow = copy.deepcopy(masters)  # ties stay ties
    pairs = list(zip(masters.parameters(), narrow.parameters(), strict=True))
    for _, p in pairs:
        if p.is_floating_point():
            p.data = p.data.bfloat16()

    def take_gradients() -> None:
        for master, p in pairs:
            if p.grad is not None:
                term, p.grad = p.grad.float(), None
                master.grad = term if master.grad is None else master.grad.add_(term)

    def refresh() -> None:
        with torch.no_grad():
            for master, p in pairs:
                if p.requires_grad:
                    p.copy_(master)

    limit = functools.partial(torch.nn.utils.clip_grad_norm_, list(masters.parameters()))
    return train(
        narrow, case, after_backward=take_gradients, after_step=refresh, optimizer=optimizer_for(masters), clip=limit
    )


def _plain_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _trainable(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad)


# --- several ranks --------------------------------------------------------------------------------------------------


def mesh_of(case: Case) -> xs.Mesh:
    world = runtime.world_size()
    if case.mesh:
        return xs.Mesh(np.arange(world), case.mesh, ("replica", "fsdp"))
    return xs.Mesh(np.arange(world), (world,), ("fsdp",))


def sharded(case: Case) -> Any:
    """The case's model, wrapped."""
    model = build(case.trains, case.words == "tied")
    if case.words == "hosted":
        offload_embedding(model)
    if case.activations != "kept":
        if case.trains != "full":
            model.enable_input_require_grads()
        for layer in decoder_layers(model):
            checkpoint_module(layer, offload=case.activations == "hosted")
    return FSDPv2(
        model, mesh_of(case), strategy=case.strategy, auto_wrap_policy=transformer_auto_wrap_policy,
        mixed_precision=None if case.precision == "fp32" else "bf16", cpu_offload=case.place == "offload",
        backward_prefetch={"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": None}[case.prefetch],
        small_parameter_bytes=SMALL,
    )  # fmt: skip


def train_sharded(case: Case) -> Trained:
    """The case on fullshard, every rank with its rows."""
    with exact_kernels():
        model = sharded(case)
        losses, norms = train(
            model, case, mean=mean_over_ranks, rows=mine, unsynced=model.no_sync, clip=model.clip_grad_norm_
        )
        return Trained(losses, norms, model.full_state_dict(), _trainable(model))


def train_fully_shard(case: Case) -> Trained:
    """The same in bf16 on torch's `fully_shard`, worked out once per process and kind of arithmetic.

    NO_SHARD's counterpart is a mesh with all ranks along the replicated axis. 4-bit weights are left out of the
    sharding, which cannot hold them. Offload, recomputation and prefetching do not change the arithmetic.
    """
    world = runtime.world_size()
    mesh = (world, 1) if case.strategy == "NO_SHARD" else case.mesh
    keeps = case.strategy in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD_ZERO2")
    return _fully_shard(case.trains, mesh, keeps, case.batches, case.words == "tied", case.clip)


@functools.cache
def _fully_shard(trains: str, shape: tuple[int, ...], keeps: bool, batches: str, tied: bool, clip: str) -> Trained:
    case = Case(mesh=shape, batches=batches, clip=clip)
    model: Any = build(trains, tied)
    packed = {p for layer in quantized_layers(model).values() for p in layer.parts.values()}
    options = {
        "mesh": mesh_of(case).device_mesh, "reshard_after_forward": not keeps, "ignored_params": packed,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }  # fmt: skip
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)

    @contextlib.contextmanager
    def unsynced() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    with exact_kernels():
        losses, norms = train(model, case, mean=mean_over_ranks, rows=mine, unsynced=unsynced)
    values = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
        for name, value in model.state_dict().items()
    }
    return Trained(losses, norms, values, _trainable(model))
