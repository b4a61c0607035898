"""Tiny models as a plan sees them, once with values and once without, built alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from fullshard.fsdp.strategy import MixedPrecision
from fullshard.lora.fused import fuse_lora
from fullshard.lora.gated_mlp import fuse_mlps
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.layer_groups import gated_mlps, shared_inputs
from fullshard.models.packed_inputs import Packed, PackingMethod
from fullshard.quant.quantize import quantize_model
from tests.lora.fused_models import ARCHITECTURES, CLASSES, SMALL

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}


def bare(name: str, device: str, dtype: torch.dtype, attention: str, **changes: Any) -> Any:
    """A model with random weights, or on the meta device."""
    if name == "gpt2":
        kind, options = "GPT2", {**GPT2, **changes}
    else:
        kind, more = ARCHITECTURES[name]
        options = {**SMALL, **SIZES, **more, **changes}
    config = getattr(transformers, f"{kind}Config")(**options)
    config._attn_implementation = attention
    kind = CLASSES.get(kind, f"{kind}ForCausalLM").replace("GPT2ForCausalLM", "GPT2LMHeadModel")
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, kind)(config).to(dtype)


def planned(
    name: str, device: str, *, dtype: torch.dtype = torch.float32, target: str = "cpu", attention: str = "sdpa",
    lora: dict[str, Any] | None = None, fused: bool = False, quantize: Any = None, precision: Any = None,
    packing: PackingMethod | None = None, chunked: bool = True, chunk_tokens: int = 0, compiled: bool = False,
    **changes: Any,
) -> Any:  # fmt: skip
    """What `trace_step` takes of a `PlannedModel`, for a run on `target`."""
    model = bare(name, device, dtype, attention, **changes)
    if quantize is not None:
        model = quantize_model(model, quantize)
    if lora is not None:
        options = {"r": 4, "target_modules": "all-linear", **lora}
        model = get_peft_model(model, LoraConfig(**options))
    if fused:
        fuse_lora(model, shared_inputs(model))
        fuse_mlps(model, gated_mlps(model))
    head = ChunkedLossHead(model, chunk_tokens, chunked)
    block = get_causal_lm(model)
    layers = [n for n, m in model.named_modules() if type(m).__name__ in block._no_split_modules]
    return SimpleNamespace(
        model=model, head=head, kinds={n: n for n in layers}, precision=MixedPrecision.of(precision),
        packed=None if packing is None else Packed(model, packing, dtype), device=torch.device(target),
        engine=SimpleNamespace(backend="inductor" if compiled else "no"),
    )  # fmt: skip
