"""Tokens and labels that TRL's own `SFTTrainer` makes of rows: the oracle of `test_trl_tokens.py`.

    python -m tests.data.trl_tokens        # needs trl; writes tests/data/trl_tokens.json

The file records the versions it was made with. TRL runs under its own chat templates of the families, and under the
templates here where it ships none.
"""
# ruff: noqa: E501 - a table of cases

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.data import chat_template
from fullshard.data.chat_template import BUILT_IN
from tests.data import chats
from tests.data.tiny import make_tokenizer

FILE = Path(__file__).with_suffix(".json")
Row = dict[str, Any]


def said(*turns: str) -> list[Row]:
    """A conversation; the user begins, or the system where a text begins with `=`."""
    system = [{"role": "system", "content": turns[0][1:]}] if turns[0].startswith("=") else []
    rest = turns[len(system) :]
    return system + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(rest)]


TALK = said("=the old house", "one bird sings", "a small tree ", "and then?", " it grows.")
SHORT = said("one bird\nsings", "a small tree", "winter", "salt")
CALL = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"word": "red bird", "n": 2}}}
TOOL: Row = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALLS: list[Row] = [
    {"role": "user", "content": "the red bird?"},
    {"role": "assistant", "content": "wait", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "a stone"},
    {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "a tree"},
    {"role": "assistant", "content": "a stone and a tree"},
]
LONG = [
    {"prompt": "one small", "completion": " bird sings near the river"},
    {"prompt": "a", "completion": " tree"},
    {"prompt": "old", "completion": " house"},
]
HARMONY = [
    {"role": "developer", "content": "Be kind"},
    {"role": "user", "content": "one bird?"},
    {"role": "assistant", "thinking": "the old stone", "content": "a small tree"},
]
CHANNELS = (
    "{{ effort }}{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'developer' %}{{ '# ' }}{% endif %}"
    "{% if m.thinking %}{{ '(' + m.thinking + ')' }}{% endif %}{{ m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""A template in the manner of gpt-oss's: it has a developer, thoughts and a variable of its own."""
MOOD = "{% if mood %}({{ mood }}){% endif %}" + chats.MARKED["appends"]


class Case(NamedTuple):
    """Rows, under a template of ours and the one that TRL uses for the same model."""

    rows: list[Row]
    ours: str | None = None
    """The name of a template that is built in, or Jinja."""
    theirs: str | None = None
    """The name of a file in TRL; ours if there is none."""
    settings: Row = {}  # noqa: RUF012 - a table of cases


APART = [
    {"prompt": TALK[:2], "completion": TALK[2:]},
    {"prompt": SHORT[:3], "completion": SHORT[3:]},
    {"prompt": SHORT[:2], "completion": SHORT[2:]},
]
ASSISTANT = {"assistant_only_loss": True}
CASES = {
    "text": Case([{"text": "the old bird"}, {"text": "ends by itself</s>"}, {"text": " \nblanks "}]),
    "prompt and completion": Case([{"prompt": "one", "completion": " bird"}, {"prompt": "a b ", "completion": "c</s>"}]),
    "prompt and completion, all of it": Case(
        [{"prompt": "one", "completion": " bird"}], settings={"completion_only_loss": False}
    ),
    "chatml": Case([{"messages": TALK}, {"messages": SHORT}], "chatml"),
    "chatml, apart": Case(APART, "chatml"),
    "zephyr, apart": Case(APART, "zephyr"),
    "llama3": Case([{"messages": TALK}, {"messages": SHORT}], "llama3", "llama3_training", ASSISTANT),
    "llama3, apart": Case(APART, "llama3", "llama3"),
    "llama3, apart, assistant": Case(APART, "llama3", "llama3_training", ASSISTANT),
    "gemma": Case([{"messages": SHORT}], "gemma", "gemma_training", ASSISTANT),
    "gemma, a system message": Case([{"messages": TALK}], "gemma", "gemma3_training", ASSISTANT),
    "phi": Case([{"messages": TALK}], "phi", "phi3_training", ASSISTANT),
    "phi, apart": Case(APART[:1], "phi", "phi3"),
    "qwen": Case([{"messages": TALK}, {"messages": SHORT}], "qwen", "qwen2_5_training", ASSISTANT),
    "qwen, tools": Case([{"messages": CALLS, "tools": json.dumps([TOOL])}], "qwen", "qwen2_5_training", ASSISTANT),
    "qwen, tools, apart": Case([{"prompt": CALLS[:1], "completion": CALLS[1:], "tools": json.dumps([TOOL])}], "qwen", "qwen2_5"),
    "chat_template_kwargs": Case([{"messages": SHORT, "chat_template_kwargs": {"mood": "salt"}}], MOOD, None, ASSISTANT),
    "thoughts": Case([{"messages": [*SHORT[:1], {**SHORT[1], "thinking": "one"}]}], chats.REASONS, None, {}),
    "tokens": Case([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]),
    "masks": Case(
        [{"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 1, 0, 1], "completion_mask": [0, 0, 1, 1]}],
        settings={"completion_only_loss": True},
    ),
    "masks, not asked for": Case([{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}]),
    "labels win": Case([{"input_ids": [5, 6, 7], "labels": [5, -100, 7], "assistant_masks": [1, 1, 1]}]),
    "truncated": Case(LONG, settings={"max_length": 6}),
    "truncated at the start": Case(LONG, settings={"max_length": 6, "truncation_mode": "keep_end"}),
    "truncated to nothing": Case(
        [{"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 0, 0, 1]}, {"input_ids": [5, 6], "assistant_masks": [0, 1]}],
        settings={"max_length": 3},
    ),
    "packed": Case([*LONG, *LONG[1:]], settings={"max_length": 12, "packing": True}),
    "packed, split": Case(LONG, settings={"max_length": 12, "packing": True, "packing_strategy": "bfd_split"}),
    "packed, wrapped": Case(LONG, settings={"max_length": 7, "packing": True, "packing_strategy": "wrapped"}),
    "shuffled": Case([{"text": text} for text in ["the", "old", "bird", "sings", "near", "a", "stone"]], settings={"shuffle_dataset": True}),
    "another end": Case([{"text": "the old bird"}, {"prompt": "one", "completion": " bird"}][:1], settings={"eos_token": "<pad>"}),
    "another column": Case([{"content": "the old bird", "other": "a"}], settings={"dataset_text_field": "content"}),
    "qwen, tools as objects": Case([{"messages": CALLS, "tools": [TOOL]}], "qwen", "qwen2_5"),
    "chat_template_kwargs, apart": Case(
        [{"prompt": SHORT[:1], "completion": SHORT[1:], "chat_template_kwargs": {"mood": mood}} for mood in ("salt", "old")], MOOD
    ),
    "a developer's message": Case([{"messages": HARMONY, "chat_template_kwargs": {"effort": "low"}}], CHANNELS),
    "a developer's message, apart": Case([{"prompt": HARMONY[:2], "completion": HARMONY[2:]}], CHANNELS),
    "masks, all of it": Case(
        [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}], settings={"completion_only_loss": False}
    ),
}  # fmt: skip


def tokenizer(case: Case) -> Any:
    """A tokenizer to which the marks of the case's template are single tokens."""
    made = make_tokenizer()
    named = case.ours in BUILT_IN
    chat_template.prepare_tokenizer(made, str(case.ours) if named else "none")
    made.eos_token = "</s>"
    if case.ours is not None and not named:
        made.chat_template = case.ours
    return made


def trl_tokens(case: Case) -> list[list[list[int]]]:
    """[tokens, labels] of each row, by TRL."""
    import trl
    from datasets import Dataset

    from tests.sft.tiny import make_model

    made = tokenizer(case)
    if case.theirs is not None:
        made.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{case.theirs}.jinja").read_text()
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            output_dir=folder, report_to="none", use_cpu=True, bf16=False, **{"max_length": None, **case.settings}
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=make_model(), args=args, train_dataset=Dataset.from_list(case.rows), processing_class=made
        )
        columns = (
            "input_ids",
            "labels",
            *(["seq_lengths"] if "seq_lengths" in trainer.train_dataset.column_names else []),
        )
        return [[row[name] for name in columns] for row in trainer.train_dataset]


def main() -> None:
    packages = ("trl", "transformers", "datasets", "tokenizers")
    made: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in packages}}
    made |= {name: trl_tokens(case) for name, case in CASES.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in made.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
