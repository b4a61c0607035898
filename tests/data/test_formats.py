"""Files and rows: what is understood, and the one line said about what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.data import formats
from fullshard.errors import DataError
from tests.data.tiny import chat_rows, text_rows, write_rows


def test_rows_are_known_by_their_columns(tmp_path: Path) -> None:
    rows = [*text_rows(2), *chat_rows(2), {"input_ids": [1, 2], "labels": [-100, 2]}, {"body": "x"}]
    path = write_rows(tmp_path / "train.jsonl", rows)
    documents = formats.file_source([path]).documents("text")
    found = [next(documents) for _ in range(5)]
    assert [d.text is not None for d in found] == [True, True, False, False, False]
    assert found[2].messages == tuple(rows[2]["messages"])
    assert found[4].input_ids == (1, 2) and found[4].labels == (-100, 2)
    with pytest.raises(DataError, match=r"train\.jsonl, line 6: columns body; expected `messages`.*dataset_text_field"):
        next(documents)
    assert [d.text for d in formats.row_source([{"body": "x"}], "rows").documents("body")] == ["x"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", r"line 3: not JSON \(Expecting property name.* at column 2\)"),
        ('"only text"', "line 3: 'only text' is not an object"),
        ('{"text": 7}', "line 3: the text is 7; expected a string"),
        ('{"messages": "hi"}', "line 3: `messages` is 'hi'; expected a list"),
        ('{"messages": []}', "line 3: `messages` is \\[\\]"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 3: messages\[0\] has the role 'robot'; expected"),
        ('{"messages": [{"role": "user"}]}', r"line 3: messages\[0\] has the content None; expected text"),
        ('{"messages": ["x"]}', r"line 3: messages\[0\] is 'x'"),
        ('{"input_ids": [1, 2], "labels": [1]}', "line 3: 2 input_ids but 1 labels"),
        ('{"input_ids": [1.5]}', "line 3: `input_ids` is"),
        ("{}", "line 3: columns none"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + '\n{"text": "good"}\n')
    with pytest.raises(DataError, match=said):
        list(formats.file_source([path]).documents("text"))


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        list(formats.file_source([path]).documents("text"))


def test_files_of_a_data_set(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl", "training.jsonl", "notes.txt"):
        write_rows(tmp_path / name, text_rows(1))
    train, test = formats.find_files(str(tmp_path), "train,test", evaluates=True)
    assert [p.name for p in train] == ["train-0.jsonl", "train-1.jsonl"] and [p.name for p in test] == ["test.jsonl"]
    assert formats.find_files(str(tmp_path / "test.jsonl"), "train,test", True) == ([tmp_path / "test.jsonl"], [])
    assert formats.find_files(str(tmp_path), "train", True)[1] == []


@pytest.mark.parametrize(
    ("dataset", "splits", "said"),
    [
        ("nowhere", "train", "'.*nowhere' does not exist. Give a file"),
        (".", "valid", "no file for the split 'valid' .valid.jsonl.; the folder holds notes.txt, train.jsonl"),
        (".", "train,test", "evaluation is on, but there is no file for the split 'test'"),
        (".", "", "splits is empty"),
        (".", "a,b,c", "at most two names"),
        ("notes.txt", "train", "a file of kind '.txt'; expected .jsonl"),
    ],
)
def test_files_that_are_not_there(tmp_path: Path, dataset: str, splits: str, said: str) -> None:
    write_rows(tmp_path / "train.jsonl", text_rows(1))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=said):
        formats.find_files(str(tmp_path / dataset), splits, evaluates=True)


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = text_rows(3)
    path = write_rows(tmp_path / "a.jsonl", rows)
    before = formats.file_source([path]).fingerprint()
    path.touch()
    assert formats.file_source([path]).fingerprint() == before
    path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    assert formats.file_source([path]).fingerprint() != before
    assert formats.row_source(rows, "x").fingerprint() == formats.row_source(list(rows), "y").fingerprint()
    assert formats.row_source(rows[:2], "x").fingerprint() != formats.row_source(rows, "x").fingerprint()


def test_what_cannot_be_rows() -> None:
    with pytest.raises(DataError, match="train_dataset is 7; expected rows"):
        formats.source_of(7, "train_dataset")
