"""Tiny models of many architectures with LoRA on all linear layers, and what a step of training makes of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 4}),
    "phi3": ("Phi3", {}),
    "phi": ("Phi", {}),
    "starcoder2": ("Starcoder2", {}),
    "neox": ("GPTNeoX", {}),
    "cohere": ("Cohere", {}),
    "deepseek": ("DeepseekV3", {**LATENT, **EXPERTS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 8, **EXPERTS}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2, "sliding_window": 4}),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}
IDS = torch.arange(18).view(2, 9) * 7 % 61 + 3


def bare(name: str, **changes: Any) -> Any:
    """A tiny model with random weights and biases."""
    kind, more = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more, **changes})
    model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model


def adapted(model: Any, **options: Any) -> Any:
    """PEFT's model around it, with an adapter that changes outputs."""
    made = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return made


def step(model: Any, seed: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits and all gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    logits = model(input_ids=IDS, use_cache=False).logits.float()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any, close: float = 1e-5) -> None:
    """Logits and gradients are equal up to `close`, relative to the largest."""
    (logits, grads), (logits_expected, grads_expected) = found, expected
    assert grads.keys() == grads_expected.keys()
    for name, one, other in (
        ("logits", logits, logits_expected),
        *((n, grads[n], grads_expected[n]) for n in grads_expected),
    ):
        off = float((one - other).abs().max()) / max(float(other.abs().max()), 1e-8)
        assert off <= close, (name, off)
