"""Evaluates a model on the held-out questions and counts exactly correct answers.

Models and adapters are loaded with transformers and peft alone, without fullshard.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LONGEST = 16
"""Maximum number of tokens of an answer; correct answers have up to 11."""
AT_ONCE = 90


def read_questions(file: Path) -> list[tuple[str, str]]:
    """Questions and their answers."""
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return [(row[0]["content"], row[1]["content"]) for row in rows]


def load(model: Path, adapter: Path | None = None) -> tuple[Any, Any]:
    """The model, with its adapter if there is one, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter)
    return loaded.eval(), tokenizer


@torch.no_grad()
def answers(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """The answer to each question, with greedy decoding."""
    said: list[str] = []
    for first in range(0, len(questions), AT_ONCE):
        chats = [[{"role": "user", "content": question}] for question in questions[first : first + AT_ONCE]]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=LONGEST,
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        said += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in said]


def count_right(model: Any, tokenizer: Any, asked: list[tuple[str, str]]) -> int:
    said = answers(model, tokenizer, [question for question, _ in asked])
    return sum(text == right for text, (_, right) in zip(said, asked, strict=True))
