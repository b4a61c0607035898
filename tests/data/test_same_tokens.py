"""The same conversations in every format and every kind of file: the same tokens, the same masks, the same losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.data.chat_template import BUILT_IN
from fullshard.data.encode import TextSettings, encode_rows
from fullshard.data.loader import load_table
from fullshard.data.sources import file_source, row_source
from tests.data.test_row_formats import WRITERS
from tests.data.tiny import chat_rows, make_tokenizer
from tests.pool import ranks
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_model

Row = dict[str, Any]
CHATML = BUILT_IN["chatml"].text


def render(messages: list[Row]) -> str:
    """chatml, written down here once more."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def sharegpt(messages: list[Row]) -> Row:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}


def alpaca(messages: list[Row]) -> Row:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    said = [m["content"] for m in messages if m["role"] != "system"]
    *history, (question, answer) = zip(said[::2], said[1::2], strict=True)
    first, _, rest = question.partition("\n\n")
    fields = {"instruction": first, "input": rest, "output": answer, "system": system}
    return {**fields, "history": [list(pair) for pair in history]} if history else fields


FORMATS: dict[str, Callable[[list[Row]], Row]] = {
    "messages": lambda messages: {"messages": messages},
    "ShareGPT": sharegpt,
    "Alpaca": alpaca,
    "prompt and completion": lambda messages: {"prompt": messages[:-1], "completion": messages[-1:]},
}
WRITTEN_OUT: dict[str, Callable[[list[Row]], Row]] = {
    "text": lambda messages: {"text": render(messages)},
    "prompt and completion as text": lambda messages: {
        "prompt": render(messages[:-1]) + "<|im_start|>assistant\n",
        "completion": f"{messages[-1]['content']}<|im_end|>\n",
    },
}


def talks(count: int, turns: int | None = None) -> list[list[Row]]:
    """Conversations; some with a system turn, some with an empty line in the question."""
    found = [row["messages"] for row in chat_rows(4 * count)]
    for i, messages in enumerate(found):
        question = next(m for m in messages if m["role"] == "user")
        question["content"] += "\n\nand this" if i % 3 == 0 else ""
    return [m for m in found if turns is None or len([x for x in m if x["role"] == "user"]) == turns][:count]


def tokens_of(rows: list[Row], **changes: Any) -> list[tuple[list[int], list[int]]]:
    counts: Counter[str] = Counter()
    raws = list(row_source(rows, "rows").rows(None))
    changes = {
        "append_concat_token": False,
        "add_special_tokens": False,
        **changes,
    }  # the text of a conversation is no text that ends
    found = encode_rows(raws, make_tokenizer(), TextSettings(template=CHATML, **changes), counts)
    return [(ids.tolist(), mask.tolist()) for ids, mask, _ in found]


def test_formats_give_the_same_tokens_and_masks() -> None:
    one, many = talks(20, turns=1), talks(30)
    expected = tokens_of([{"text": render(m)} for m in many])
    assert len(expected) == 30 and all(all(mask) for _, mask in expected)
    for name, make in {**FORMATS, **WRITTEN_OUT}.items():
        assert tokens_of([make(m) for m in many], completion_only_loss=False) == expected, name
    answers = tokens_of([{"messages": m} for m in one], assistant_only_loss=True)
    assert all(0 < sum(mask) < len(mask) for _, mask in answers)
    for name, make in FORMATS.items():
        assert tokens_of([make(m) for m in one], assistant_only_loss=True) == answers, name
    apart = tokens_of([FORMATS["prompt and completion"](m) for m in one])
    assert apart == [(ids, [*mask[:-1], 1]) for ids, mask in answers], (
        "all of the completion, its line break too: TRL's"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_files_give_the_same_tokens_and_masks(name: str, tmp_path: Path) -> None:
    rows = [FORMATS[name](m) for m in talks(8, turns=1)]
    expected, tokenizer = tokens_of(rows, assistant_only_loss=True), make_tokenizer()
    chosen = TextSettings(template=CHATML, assistant_only_loss=True)
    for i, (kind, (file, writer)) in enumerate(WRITERS.items()):
        if name != "Alpaca" and kind == "JSON columns":
            continue  # messages in those would be one row's
        path = tmp_path / str(i) / file
        path.parent.mkdir()
        writer(path, rows)
        table = load_table(file_source([path]), tokenizer, chosen, str(tmp_path / "cache"))
        found = [table.documents(row)[0] for row in range(len(table))]
        assert [(ids.tolist(), mask.tolist()) for ids, mask in found] == expected, kind


@ranks(1)
def test_formats_give_the_same_losses(tmp_path: Path) -> None:
    found = {}
    files = [("messages", "JSON lines"), ("ShareGPT", "parquet"), ("Alpaca", "CSV"), ("prompt and completion", "JSON")]
    for number, (name, kind) in enumerate(files):
        place = tmp_path / str(number)
        place.mkdir()
        file, writer = WRITERS[kind]
        writer(place / file, [FORMATS[name](m) for m in talks(20, turns=1)])
        config = settings(place, max_steps=2, chat_template_format="chatml", assistant_only_loss=True, max_seq_len=200)
        found[name, kind] = losses(train(make_model(), config, rows=str(place / file)))
    assert len(set(map(tuple, found.values()))) == 1 and len(next(iter(found.values()))) == 2, found
