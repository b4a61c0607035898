"""Tiny models written as releases store them, with the dense values that others read from these files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fullshard.quant.shipped import Shipped
from fullshard.quant.stored_files import as_file_tensor, file_names
from fullshard.quant.stored_format import StoredFormat, StoredWeight
from fullshard.quant.stored_values import decoded, encode

SIZES = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "use_cache": False, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def gpt_oss(experts: int = 3) -> Any:
    torch.manual_seed(5)
    config = GptOssConfig(**SIZES, intermediate_size=96, head_dim=16, num_local_experts=experts, num_experts_per_tok=2)
    return _random(GptOssForCausalLM(config))


def qwen_moe(inner: int = 48, experts: int = 3) -> Any:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        **SIZES, intermediate_size=96, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=2,
        head_dim=16, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    return _random(Qwen3MoeForCausalLM(config))


def llama(inner: int = 160) -> Any:
    torch.manual_seed(5)
    return _random(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=inner, attention_bias=True)))


def _random(model: Any) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or "bias" in name or "sinks" in name:
                p.normal_(std=0.08)
    return model


def compressed(stored_as: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": stored_as, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignore),
    }  # fmt: skip


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def fp8(block: tuple[int, int] | None = (16, 16), **options: Any) -> dict[str, Any]:
    """The `quantization_config` of fp8 weights."""
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block) if block else None,
        "modules_to_not_convert": ["lm_head"], **options,
    }  # fmt: skip


NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(model: Any, quantization: dict[str, Any], folder: Path, together: bool = False) -> Any:
    """Write a model with its linear weights and experts as the configuration says. Returns the dense model with the
    values that are left, unpacked one matrix at a time. `together`: experts of a layer are one tensor."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    shipped, files = Shipped.of(quantization), {}
    for key, value in tensors.items():
        stem = key.removesuffix(".weight")
        own = stem.rpartition(".")[2]
        if shipped.experts_only:
            form = shipped.rules[0].format if own in ("gate_up_proj", "down_proj") and value.ndim == 3 else None
        else:
            form = shipped.format_of(stem, ("Linear",)) if own in NAMES else None
        if form is None:
            files[key] = value
            continue
        dense = key if shipped.experts_only else f"{stem}.weight"
        parts, values = pack(form, value)
        files |= {file: parts[part] for part, file in file_names(StoredWeight.of(form, value.shape), dense).items()}
        tensors[key] = values
    if together:
        files = _joined(files)
    save_file({key: t.contiguous() for key, t in files.items()}, folder / "model.safetensors", {"format": "pt"})
    plain = type(model)(model.config)
    dense_folder = folder.with_name(f"{folder.name}-dense")
    model.save_pretrained(dense_folder)
    save_file({key: t.contiguous() for key, t in tensors.items()}, dense_folder / "model.safetensors", {"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32)
    return plain


def pack(form: StoredFormat, value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The file tensors of a weight or of a stack, and the values that are left."""
    weight = StoredWeight.of(form, tuple(value.shape))
    matrices = (value if value.ndim == 3 else value[None]).float()
    if form.transposed:
        matrices = matrices.transpose(1, 2)
    packed = [encode(form.coding, matrix.contiguous()) for matrix in matrices]
    values = torch.stack([decoded(form.coding, parts, m.shape) for parts, m in zip(packed, matrices, strict=True)])
    parts = {part: as_file_tensor(weight, part, torch.cat([one[part] for one in packed])) for part in weight.parts}
    values = values.transpose(1, 2) if form.transposed else values
    return parts, values if value.ndim == 3 else values[0]


def _joined(files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of a layer as one tensor, with gate and up in it."""
    whole = {key: t for key, t in files.items() if ".experts." not in key}
    stems = sorted({key.split(".experts.")[0] for key in files if ".experts." in key})
    for stem in stems:
        count = len({key.split(".experts.")[1].split(".")[0] for key in files if key.startswith(f"{stem}.experts.")})
        for end in ("", "_scale_inv"):

            def of(name: str, i: int) -> torch.Tensor:
                return files[f"{stem}.experts.{i}.{name}.weight{end}"].view(torch.uint8)  # noqa: B023

            both = [torch.cat([of("gate_proj", i), of("up_proj", i)]) for i in range(count)]
            dtype = files[f"{stem}.experts.0.gate_proj.weight{end}"].dtype
            whole[f"{stem}.experts.gate_up_proj{end}"] = torch.stack(both).view(dtype)
            whole[f"{stem}.experts.down_proj{end}"] = torch.stack([of("down_proj", i) for i in range(count)]).view(
                dtype
            )
    return whole
