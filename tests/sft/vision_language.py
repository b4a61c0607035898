"""Tiny vision-language models in folders, one for each way in which classes hold their language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.data.tiny import chat_rows, make_tokenizer, text_rows, write_rows

SIZES = {
    "vocab_size": 416, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN_VISION = {"depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LLAMA4 = {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 64, "num_local_experts": 4}
LLAMA4_VISION = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}


def config_of(kind: str, **changes: Any) -> Any:
    sizes = {**SIZES, **changes}
    if kind == "gemma3":  # tied embeddings, windows, a loss of its own
        text = {**sizes, "query_pre_attn_scalar": 8, "sliding_window": 16}
        return transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    if kind == "qwen2_5_vl":  # three positions for each token, and prefixes in files that are not those of the modules
        vision = {**QWEN_VISION, "intermediate_size": 32}
        return transformers.Qwen2_5_VLConfig(text_config={**sizes, "rope_parameters": MROPE}, vision_config=vision)
    if kind == "mistral3":
        text = {**sizes, "model_type": "mistral"}
        vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
        return transformers.Mistral3Config(text_config=text, vision_config=vision, spatial_merge_size=1)
    if kind == "ernie4_5_vl_moe":  # experts for images in the language model
        text = {**sizes, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 16],
                "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
                "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
        vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "patch_size": 14}
        return transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    assert kind == "llama4"  # the language model has the head, and experts
    text = {**sizes, **LLAMA4}
    return transformers.Llama4Config(text_config=text, vision_config={**VISION, **LLAMA4_VISION})


def whole_model(kind: str, **changes: Any) -> Any:
    """A model with random values everywhere, by transformers' own class."""
    config = config_of(kind, **changes)
    config.tie_word_embeddings = kind == "gemma3"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(std=0.05)
            elif "norm" not in name:
                p.normal_(std=0.01)
    return model


def make_folder(place: Path, kind: str, **changes: Any) -> Path:
    """`model/` with its image processor's settings, and `data/`."""
    whole_model(kind, **changes).save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    (place / "model" / "preprocessor_config.json").write_text('{"image_size": 28}\n')
    write_rows(place / "data" / "train.jsonl", text_rows(40))
    write_rows(place / "chats" / "train.jsonl", chat_rows(20))
    return place
