"""Small results to talk to and to export: a model with a chat template, adapters on it, and short runs."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from fullshard import cli
from fullshard.data.chat_template import BUILT_IN
from fullshard.distributed import runtime
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import chat_rows, make_tokenizer
from tests.sft.runs import settings
from tests.sft.tiny import make_folder, make_model

LORA = {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


SHAPE = {"hidden_size": 64, "intermediate_size": 128}
"""Rows of whole blocks: bitsandbytes' CPU kernel unpacks others wrongly."""


def chat_model(folder: Path, **changes: Any) -> Path:
    """A model whose tokenizer has a template and a token that ends a turn; the embedding has a row for it."""
    make_model(**SHAPE, **changes).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = BUILT_IN["chatml"].text
    tokenizer.save_pretrained(folder)
    return folder


def add_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """An adapter with random values, written by PEFT."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **{"target_modules": "all-linear", **options})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def run(place: Path, name: str, **changes: Any) -> Path:
    """The folder of a run of four steps on conversations, with a checkpoint at every other; `model/` is its base."""
    if not (place / "model").exists():
        make_folder(place, **SHAPE, vocab_size=400)  # no row to spare for the template's tokens
    values = {"max_steps": 4, "chat_template_format": "chatml", "assistant_only_loss": True, "max_seq_len": 200}
    values |= {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 2e-3}
    config = settings(place / name, **{**values, **changes})
    trainer = SFTTrainer(model=str(place / "model"), args=config, train_dataset=chat_rows(8))
    trainer.train()
    trainer.save_model()
    return place / name / "out"


def base_of_run(place: Path, out: Path, **options: Any) -> Any:
    """The model that a run's adapter belongs to, with rows for its tokens, as PEFT would make them."""
    model = AutoModelForCausalLM.from_pretrained(place / "model", **options)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(out)), mean_resizing=False)
    return model


def command(*words: str, given: str = "") -> tuple[int, str, str]:
    """`fullshard …` in this process: exit code, output, errors."""
    out, err, level = io.StringIO(), io.StringIO(), runtime.get_logger().level
    said = transformers_logging.get_verbosity()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["fullshard", *words])
        patch.setattr(sys, "stdin", io.StringIO(given))
        try:
            cli.main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            runtime.get_logger().setLevel(level)
            transformers_logging.set_verbosity(said)
            transformers_logging.enable_progress_bar()
    return code, out.getvalue(), err.getvalue()


def greedy(model: Any, ids: list[int], limit: int, stops: list[int], **options: Any) -> list[int]:
    """The answer of transformers' own `generate`, without the token that ends it."""
    out = model.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=limit,
        **{"do_sample": False, "eos_token_id": stops, "pad_token_id": 2, **options},
    )  # fmt: skip
    said: list[int] = out[0, len(ids) :].tolist()
    return said[:-1] if said and said[-1] in stops else said
