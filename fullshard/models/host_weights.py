"""Frozen weights that stay in host memory: the input embedding, and experts.

The accelerator reads an embedding's rows where they are. Experts are sharded over the ranks like other weights, and
copied to the accelerator ahead of their layer.
"""

from __future__ import annotations

from torch import nn

from fullshard.fsdp.host_embedding import keep_on_host
from fullshard.fsdp.offload import keep_shards_on_host
from fullshard.models.causal_lm import get_causal_lm
from fullshard.quant.packed_experts import PackedExperts
from fullshard.quant.quantizable import fused_experts


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


def offload_experts(model: nn.Module) -> str:
    """Let the engine keep the shards of the model's frozen experts in host memory; call it before sharding.

    Returns why the experts stay on the device instead; empty if they do not.
    """
    weights = [p for name, module in model.named_modules() for p in _expert_weights(name, module)]
    frozen = [p for p in weights if not p.requires_grad]
    if not frozen:
        return "the experts are trained" if weights else "the model has no experts"
    for weight in frozen:
        keep_shards_on_host(weight)
    return ""


def _expert_weights(name: str, module: nn.Module) -> list[nn.Parameter]:
    """A module's own weights, if each of several experts has some of them; adapters are not among them."""
    is_stack = isinstance(module, PackedExperts) or any(True for _ in fused_experts(module))
    inside = "experts" in name.split(".") and "lora_" not in name
    return list(module.parameters(recurse=False)) if is_stack or inside else []
