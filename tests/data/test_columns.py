"""Columns with a meaning elsewhere: honoured, refused or named, never passed over in silence."""
# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import ConfigError, DataError
from fullshard.data.encode import TextSettings, encode_rows
from fullshard.data.loader import load_table
from fullshard.data.raw_row import RawRow
from fullshard.data.row_formats import Reading, parse_row, reading_of
from fullshard.data.sources import row_source
from fullshard.data.token_table import unused_columns
from fullshard.sft.batches import describe_data
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import make_tokenizer

U, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "R"}
TALK = {"messages": [U, A]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": None}}


def read(row: Any, **reading: Any) -> dict[str, Any]:
    """What a row means: the fields of its document that are set."""
    document = parse_row(RawRow("here", row, 1), Reading(**reading))
    return {k: v for k, v in vars(document).items() if v is not None and k != "where"}


HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tools": ({**TALK, "tools": [TOOL]}, {"tools": ({"type": "function", "function": {"name": "f"}},)}),
    "tools as JSON text": ({**TALK, "tools": json.dumps([{"name": "f"}])}, {"tools": ({"name": "f"},)}),
    "each tool as JSON text": ({**TALK, "tools": [json.dumps({"name": "f"})]}, {"tools": ({"name": "f"},)}),
    "no tools": ({**TALK, "tools": []}, {}),
    "no tools as text": ({**TALK, "tools": ""}, {}),
    "no tools as JSON text": ({**TALK, "tools": "[]"}, {}),
    "words for the template": ({**TALK, "chat_template_kwargs": {"a": 1, "b": None}}, {"template_kwargs": {"a": 1}}),
    "no words for the template": ({**TALK, "chat_template_kwargs": {}}, {}),
    "weights": ({"messages": [U, {**A, "weight": 0}, U, {**A, "weight": 1}]}, {"messages": (U, A, U, A), "weights": (None, 0, None, 1)}),
    "weights and a system column": ({"messages": [U, {**A, "train": True}], "system": "S"}, {"messages": ({"role": "system", "content": "S"}, U, A), "weights": (None, None, 1)}),
    "empty calls": ({"messages": [U, {**A, "tool_calls": []}]}, {}),
    "a developer's words": ({"messages": [{"role": "developer", "content": "S"}, U, A]}, {"messages": ({"role": "developer", "content": "S"}, U, A)}),
    "a number of a class": ({**TALK, "label": 1}, {"unused": ("label",)}),
    "no pictures": ({**TALK, "images": [], "image": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", HONOURED)
def test_columns_that_are_honoured(case: str) -> None:
    row, meaning = HONOURED[case]
    assert read(row) == {"messages": (U, A), **meaning}


TOKENS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an attention mask": ({"attention_mask": [1, 1, 1]}, {}),
    "padding behind": ({"attention_mask": [1, 1, 0], "labels": [-100, 2, -100]}, {"input_ids": (1, 2), "labels": (-100, 2)}),
    "padding before": ({"attention_mask": [0, 1, 1], "position_ids": [0, 0, 1]}, {"input_ids": (2, 3)}),
    "several documents": ({"seq_lengths": [1, 2]}, {"seq_lengths": (1, 2)}),
    "positions that restart": ({"position_ids": [0, 1, 0]}, {"seq_lengths": (2, 1)}),
    "both, and padding": ({"position_ids": [0, 0, 0], "seq_lengths": [1, 1], "attention_mask": [1, 1, 0]}, {"input_ids": (1, 2), "seq_lengths": (1, 1)}),
    "positions": ({"position_ids": [0, 1, 2], "seq_lengths": [3]}, {}),
    "the assistant's": ({"assistant_masks": [0, 1, 1]}, {"labels": (-100, 2, 3)}),
    "truths": ({"assistant_masks": [False, True, True]}, {"labels": (-100, 2, 3)}),
    "a completion": ({"completion_mask": [0, 0, 1]}, {"completion_mask": (0, 0, 1)}),
    "labels win": ({"labels": [1, -100, 3], "assistant_masks": [0, 1, 1], "completion_mask": [0, 0, 0]}, {"labels": (1, -100, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENS)
def test_columns_beside_tokens(case: str) -> None:
    columns, meaning = TOKENS[case]
    assert read({"input_ids": [1, 2, 3], **columns}) == {"input_ids": (1, 2, 3), **meaning}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "preferences": ({"prompt": "Q", "chosen": "a", "rejected": "b"}, r"preferences .`chosen` and `rejected`., the data format of DPO .*completion=chosen.*DPOTrainer"),
    "whole preferences": ({"chosen": [U, A], "rejected": [U, A]}, "messages=chosen"),
    "preferences for a talk": ({"conversations": [U], "chosen": A, "rejected": A}, "the row holds preferences"),
    "Alpaca's preferences": ({"instruction": "Q", "chosen": "a", "rejected": "b"}, "the row holds preferences"),
    "a verdict": ({"prompt": "Q", "completion": "R", "label": False}, "`label` is False: an unpaired preference .KTO."),
    "a verdict in words": ({"prompt": "Q", "completion": "R", "label": "True"}, "`label` is 'True': an unpaired preference"),
    "a tag": ({**TALK, "kto_tag": True}, "`kto_tag` is True: an unpaired preference"),
    "pictures": ({**TALK, "images": ["x.png"]}, "`images`: the data is vision-related.*vision-language model"),
    "a picture beside text": ({"text": "T", "image": "x.png"}, "`image`: the data is vision-related"),
    "functions": ({**TALK, "functions": [TOOL]}, "dataset_columns tools=functions"),
    "a prompt": ({"prompt": "Q"}, "Rows with only a prompt are for trainers that generate"),
    "half a weight": ({"messages": [U, {**A, "weight": 0.5}]}, r"messages\[1\] has the weight 0.5; expected 0 or 1"),
    "a weight in words": ({"messages": [U, {**A, "train": "yes"}]}, r"messages\[1\] has the train 'yes'; expected 0 or 1"),
    "two weights": ({"messages": [U, {**A, "weight": 0, "train": True}]}, r"messages\[1\] has weight 0 and train True; expected one of them"),
    "parts of a turn": ({"messages": [U, {**A, "train_detail": [{"begin_offset": 0}]}]}, r"messages\[1\] has `train_detail`"),
    "tools that are text": ({**TALK, "tools": "find"}, "`tools` is 'find'; expected a list of JSON schemas"),
    "a tool that is text": ({**TALK, "tools": ["find"]}, r"tools\[0\] is 'find'; expected the JSON schema"),
    "broken tools": ({**TALK, "tools": "[{"}, "`tools`: not JSON"),
    "a call without a name": ({"messages": [U, {**A, "tool_calls": [{"function": {}}]}]}, r"messages\[1\].tool_calls\[0\] is .*expected an object with the name and arguments"),
    "broken arguments": ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, r"messages\[1\].tool_calls\[0\].arguments`: not JSON"),
    "arguments that are a list": ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": [1]}]}]}, r"has the arguments \[1\]; expected a JSON object"),
    "a call in words": ({"conversations": [U, {"from": "function_call", "value": "find it"}]}, r"conversations\[1\].tool_calls\[0\] is 'find it'"),
    "words for the template": ({**TALK, "chat_template_kwargs": [1]}, r"`chat_template_kwargs` is \[1\]; expected an object"),
    "the template itself": ({**TALK, "chat_template_kwargs": {"chat_template": "x"}}, "`chat_template_kwargs` sets chat_template, which"),
    "too short documents": ({"input_ids": [1, 2], "seq_lengths": [1]}, "`seq_lengths` is .1,., with 2 tokens in the row"),
    "an empty document": ({"input_ids": [1, 2], "seq_lengths": [2, 0]}, "`seq_lengths` is .2, 0., with 2 tokens in the row"),
    "two opinions": ({"input_ids": [1, 2, 3], "seq_lengths": [1, 2], "position_ids": [0, 1, 0]}, "`seq_lengths` is .1, 2., but `position_ids` restart after .2, 1. tokens"),
    "few positions": ({"input_ids": [1, 2], "position_ids": [0]}, "2 input_ids but 1 position_ids"),
    "positions from five": ({"input_ids": [1, 2], "position_ids": [5, 6]}, "expected 0, 1, 2"),
    "a hole": ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "`attention_mask` has zeros between ones"),
    "only padding": ({"input_ids": [1], "attention_mask": [0]}, "`attention_mask` is all zeros"),
    "a short mask": ({"input_ids": [1, 2], "completion_mask": [1]}, "2 input_ids but 1 values in `completion_mask`"),
    "a wrong mask": ({"input_ids": [1], "assistant_masks": [2]}, "`assistant_masks` is .2.; expected a list of zeros and ones"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_columns_that_are_refused(case: str) -> None:
    row, said = REFUSED[case]
    with pytest.raises(DataError, match=f"^here: .*{said}") as error:
        read(row)
    assert "\n" not in str(error.value) and len(str(error.value)) < 900


def test_the_chosen_side_alone_can_be_learnt() -> None:
    pair = {"prompt": "Q", "chosen": " R", "rejected": " S"}
    assert read(pair, columns=(("completion", "chosen"),)) == {"prompt": "Q", "text": " R", "unused": ("rejected",)}
    whole = {"chosen": [U, A], "rejected": [U, {**A, "content": "S"}]}
    assert read(whole, columns=(("messages", "chosen"),)) == {"messages": (U, A), "unused": ("rejected",)}
    text = {"chosen": "Human: Q Assistant: R", "rejected": "Human: Q Assistant: S"}
    assert read(text, text_field="chosen") == {"text": text["chosen"], "unused": ("rejected",)}
    assert read({**TALK, "prompt": "Q", **whole})["unused"] == ("prompt", "chosen", "rejected"), "a row of both kinds"


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    rows = [
        {"text": "bread", "label": 1, "weight": 0.5, "train_on_prompt": True},
        {"text": "salt", "label": 0, "id": 7},
    ]
    table = load_table(row_source(rows, "rows"), make_tokenizer(), TextSettings(), str(tmp_path))
    assert unused_columns(table.facts) == {"label": 2, "weight": 1, "train_on_prompt": 1}
    line = describe_data("training", table.facts, SFTConfig())
    assert "; `label` is not used (in 2 rows)" in line and "`id`" not in line


def test_masks_of_completions() -> None:
    row = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 0], "assistant_masks": [1, 1, 1]}
    for only, expected in ((None, [1, 1, 1]), (True, [0, 1, 0]), (False, [1, 1, 1])):
        raw, counts = RawRow("here", row, 1), Counter[str]()
        ((_, mask, _),) = encode_rows([raw], make_tokenizer(), TextSettings(completion_only_loss=only), counts)
        assert mask.tolist() == expected
        assert unused_columns(counts) == ({"completion_mask": 1} if only is None else {}), "not in silence"
    with pytest.raises(DataError, match="completion_only_loss is on, but the row has no prompt"):
        list(
            encode_rows(
                [RawRow("here", {"input_ids": [5]}, 1)],
                make_tokenizer(),
                TextSettings(completion_only_loss=True),
                counts,
            )
        )


QUESTION = "### {question}\n{{x}} {context}\n=> "


def test_prompts_by_a_format() -> None:
    reading = reading_of("text", "completion=answer", "stop", QUESTION)
    row = {"question": "Q?", "context": None, "answer": "R", "id": 3}
    assert vars(parse_row(RawRow("here", row, 1), reading))["prompt"] == "### Q?\n{x} \n=> "
    assert read({"question": "Q", "context": "C", "output": "R"}, prompt_format=QUESTION) == {
        "prompt": "### Q\n{x} C\n=> ",
        "text": "R",
    }
    with pytest.raises(
        DataError, match=r"here: columns text; prompt_format needs question, context, and the completion must be"
    ):
        read({"text": "T"}, prompt_format=QUESTION)
    with pytest.raises(DataError, match=r"here: `output` is empty"):
        read({"question": "Q", "output": ""}, prompt_format=QUESTION)
    for wrong in ("no column", "{", "{0}", "{a.b}", "{}"):
        with pytest.raises(ConfigError, match="prompt_format is "):
            reading_of("text", None, "stop", wrong)
