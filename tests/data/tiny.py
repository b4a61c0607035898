"""A small tokenizer and small texts, made here: nothing is downloaded."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "the a one small large red old new quick slow bird tree river stone house child sings grows runs falls sees finds "
    "makes takes over under near beside and but then because morning evening winter summer light water bread salt"
)
WORDS = TEXT.split()


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "."


def text_rows(count: int, seed: int = 0, longest: int = 24) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [{"text": sentence(draw, draw.randint(2, longest))} for _ in range(count)]


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": sentence(draw, 3)}] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": sentence(draw, draw.randint(2, 8))})
            messages.append({"role": "assistant", "content": sentence(draw, draw.randint(2, 10))})
        rows.append({"messages": messages})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["text"] for row in text_rows(400, seed=1)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer trained on the words above; `<s>` leads when special tokens are asked for."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
