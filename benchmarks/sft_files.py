"""Writes the model of `benchmarks/sft_gpu.py`: random weights of a Llama's shape, adapters for it, and a tokenizer.

It is run as `python -m benchmarks.sft_files FOLDER SHAPE [LAYERS]` and imports only torch and safetensors, so that a
model is on its way while the contestants still import their libraries.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": False},
}  # fmt: skip
LORA = {"r": 8, "lora_alpha": 16, "bias": "none", "task_type": "CAUSAL_LM"}
DROPOUTS = (0.0, 0.1)
FILES = 16
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
"""The only tokens that have a text: nothing is tokenized, rows are tokens already."""


def linear_layers(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The linear layers of a decoder layer, with the sizes of their weights."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def weights(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and sizes of the model's weights."""
    hidden, table = shape["hidden_size"], (shape["vocab_size"], shape["hidden_size"])
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in (f"model.layers.{i}" for i in range(shape["num_hidden_layers"])):
        found |= {f"{layer}.{name}.weight": size for name, size in linear_layers(shape).items()}
        found |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    found["model.norm.weight"] = (hidden,)
    return found if shape["tie_word_embeddings"] else {**found, "lm_head.weight": table}


def config(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, **shape,
    }  # fmt: skip


def write(folder: Path, shape: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", config(shape))
    write_tokenizer(folder)
    _write_weights(folder, weights(shape))
    for dropout in DROPOUTS:
        _write_adapter(folder / f"adapter-{dropout}", str(folder), shape, dropout)


def _write_weights(folder: Path, sizes: dict[str, tuple[int, ...]]) -> None:
    """Random bf16 weights, each from a seed of its own, in several files at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = list(sizes)
    pieces = {f"model-{i + 1:05}-of-{FILES:05}.safetensors": names[i::FILES] for i in range(FILES)}

    def made(name: str) -> torch.Tensor:
        size = sizes[name]
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        source = torch.Generator(device).manual_seed(names.index(name))
        return torch.randn(size, generator=source, device=device, dtype=torch.bfloat16).mul_(0.02).cpu()

    def save(file: str) -> None:
        save_file({name: made(name) for name in pieces[file]}, folder / file, {"format": "pt"})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(save, pieces))
    total = 2 * sum(torch.Size(size).numel() for size in sizes.values())
    places = {name: file for file, piece in pieces.items() for name in piece}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _write_adapter(place: Path, base: str, shape: dict[str, Any], dropout: float) -> None:
    """Both matrices are random, so that an error in either changes the first loss."""
    place.mkdir()
    source, made = torch.Generator().manual_seed(7), {}
    for i in range(shape["num_hidden_layers"]):
        for name, (rows, columns) in linear_layers(shape).items():
            layer = f"base_model.model.model.layers.{i}.{name}"
            made[f"{layer}.lora_A.weight"] = torch.randn(LORA["r"], columns, generator=source) * 0.02
            made[f"{layer}.lora_B.weight"] = torch.randn(rows, LORA["r"], generator=source) * 0.005
    save_file(made, place / "adapter_model.safetensors", {"format": "pt"})
    targets = [name.split(".")[-1] for name in linear_layers(shape)]
    about = {"peft_type": "LORA", "base_model_name_or_path": base, "target_modules": targets, "lora_dropout": dropout}
    _write_json(place / "adapter_config.json", {**about, **LORA})


def write_tokenizer(folder: Path) -> None:
    """A tokenizer without tokens besides the special ones."""
    tokens = list(SPECIAL.values())
    added = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, token in enumerate(tokens)
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": tokens[0]}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    _write_json(
        folder / "tokenizer.json", {"version": "1.0", **dict.fromkeys(parts), "added_tokens": added, "model": model}
    )
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL})


def _write_json(place: Path, value: dict[str, Any]) -> None:
    place.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    chosen = SHAPES[sys.argv[2]]
    write(Path(sys.argv[1]), {**chosen, **({"num_hidden_layers": int(sys.argv[3])} if len(sys.argv) > 3 else {})})
