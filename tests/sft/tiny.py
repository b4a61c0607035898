"""A tiny Llama, its tokenizer and small data sets in a folder: everything a run needs, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.tiny import chat_rows, make_tokenizer, text_rows, write_rows

VOCABULARY = 416


def make_model(seed: int = 0, **changes: Any) -> Any:
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def make_trained(kind: str) -> Any:
    """The model as a run of some kind trains it: with an adapter for `lora`, else as it is."""
    made = make_model()
    if kind == "lora":
        torch.manual_seed(5)
        made = get_peft_model(made, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return made


def make_folder(place: Path, rows: int = 60, **changes: Any) -> Path:
    """`model/` and `data/` (train.jsonl, test.jsonl of text) and `chats/` (the same of conversations)."""
    make_model(**changes).save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    write_rows(place / "data" / "train.jsonl", text_rows(rows))
    write_rows(place / "data" / "test.jsonl", text_rows(10, seed=9))
    write_rows(place / "chats" / "train.jsonl", chat_rows(rows))
    write_rows(place / "chats" / "test.jsonl", chat_rows(10, seed=9))
    return place


def children_of(parent: int) -> list[int]:
    """The ranks that a launcher has started; not its guard."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                started_by = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                is_guard = b"guard.py" in (entry / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if started_by == parent and not is_guard:
                found.append(int(entry.name))
    return sorted(found)
