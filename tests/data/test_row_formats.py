"""Rows and files: what is understood, and the one line said about what is not."""
# ruff: noqa: E501 - tables of cases read best with a case per line

from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fullshard.config.errors import ConfigError, DataError, UserError
from fullshard.data import find_dataset
from fullshard.data.file_formats import read_file
from fullshard.data.raw_row import BadRow, RawRow, parse_json, short
from fullshard.data.row_formats import BAD as BAD_KIND
from fullshard.data.row_formats import Reading, bad_kinds, parse_row, parse_rows, reading_of
from fullshard.data.sources import DataSource, file_source, row_source
from tests.data.tiny import chat_rows, text_rows, write_rows

U, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "R"}


def read(row: Any, **reading: Any) -> dict[str, Any]:
    """What a row means: the fields of its document that are set."""
    document = parse_row(RawRow("here", row, 1), Reading(**reading))
    return {k: v for k, v in vars(document).items() if v is not None and k != "where"}


# --- rows -----------------------------------------------------------------------------------------------------------

TALK = {"messages": (U, A)}
UNDERSTOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"messages": [U, A]}, TALK),
    "parts of text": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, A]}, TALK),
    "parts are joined": ({"messages": [{"role": "user", "content": ["a", {"text": "b"}]}]}, {"messages": ({"role": "user", "content": "ab"},)}),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "R"}]}, TALK),
    "ShareGPT, other names": ({"conversations": [{"from": "Human", "value": "Q"}, {"from": "chatgpt", "value": "R"}]}, TALK),
    "role and content in conversations": ({"conversations": [U, A]}, TALK),
    "from and value in messages": ({"messages": [{"from": "user", "value": "Q"}, {"from": "assistant", "value": "R"}]}, TALK),
    "a tool's result": ({"conversations": [{"from": "observation", "value": ""}]}, {"messages": ({"role": "tool", "content": ""},)}),
    "an empty system turn": ({"messages": [{"role": "system", "content": ""}, U]}, {"messages": ({"role": "system", "content": ""}, U)}),
    "a system column": ({"conversations": [U, A], "system": "S"}, {"messages": ({"role": "system", "content": "S"}, U, A)}),
    "an empty system column": ({"messages": [U, A], "system": ""}, TALK),
    "nulls of a table": ({"messages": [{**U, "name": None}, {**A, "tool_calls": None}]}, TALK),
    "a call of a tool": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "x": None}}]}]},
        {"messages": ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},)},
    ),
    "a list as JSON text": ({"messages": json.dumps([U, A])}, TALK),
    "Alpaca": ({"instruction": "Q", "input": "", "output": "R"}, TALK),
    "Alpaca without input": ({"instruction": "Q", "output": "R"}, TALK),
    "Alpaca with null input": ({"instruction": "Q", "input": None, "output": "R"}, TALK),
    "Alpaca with NaN input": ({"instruction": "Q", "input": float("nan"), "output": "R"}, TALK),
    "Alpaca with input": ({"instruction": "Do", "input": "this", "output": "R"}, {"messages": ({"role": "user", "content": "Do\n\nthis"}, A)}),
    "Alpaca with input alone": ({"instruction": "", "input": "Q", "output": "R"}, TALK),
    "Alpaca with system and history": (
        {"instruction": "Q", "output": "R", "system": "S", "history": [["a", "b"]]},
        {"messages": ({"role": "system", "content": "S"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, U, A)},
    ),
    "Alpaca with its own text": ({"instruction": "Q", "output": "R", "text": "### Q"}, {**TALK, "unused": ("text",)}),
    "prompt and completion": ({"prompt": "Q", "completion": " R"}, {"prompt": "Q", "text": " R"}),
    "no prompt": ({"prompt": "", "completion": "R"}, {"prompt": "", "text": "R"}),
    "prompt and completion as messages": ({"prompt": [U], "completion": [A]}, {**TALK, "completion_start": 1}),
    "and a system column": ({"prompt": [U], "completion": [A], "system": "S"}, {"messages": ({"role": "system", "content": "S"}, U, A), "completion_start": 2}),
    "prompt and completion as messages in JSON text": ({"prompt": json.dumps([U]), "completion": json.dumps([A])}, {**TALK, "completion_start": 1}),
    "a prompt that is JSON text": ({"prompt": json.dumps([U]), "completion": "[1, 2]"}, {"prompt": json.dumps([U]), "text": "[1, 2]"}),
    "prompt beside messages": ({"prompt": "Q", "messages": [U, A]}, {**TALK, "unused": ("prompt",)}),
    "text": ({"text": "T"}, {"text": "T"}),
    "zeros in text": ({"text": "a\0b"}, {"text": "a\0b"}),
    "null columns": ({"messages": None, "conversations": None, "prompt": None, "text": "T"}, {"text": "T"}),
    "tokens": ({"input_ids": [1, 2]}, {"input_ids": (1, 2)}),
    "tokens and labels": ({"input_ids": [1, 2], "labels": [-100, 2], "text": "T"}, {"input_ids": (1, 2), "labels": (-100, 2), "unused": ("text",)}),
    "an array of tokens": ({"input_ids": np.array([1, 2])}, {"input_ids": (1, 2)}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNDERSTOOD)
def test_what_a_row_means(case: str) -> None:
    row, meaning = UNDERSTOOD[case]
    assert read(row) == meaning


def test_a_text_column_that_is_named_is_meant() -> None:
    assert read({"content": "T", "instruction": "Q", "output": "R"}, text_field="content") == {"text": "T"}
    assert read({"content": "T", "messages": [U, A]}, text_field="content") == TALK
    assert read({"text": "T", "instruction": "Q", "output": "R"}) == {**TALK, "unused": ("text",)}


def test_columns_under_other_names() -> None:
    columns = reading_of("text", "prompt=question, completion = answer", "stop").columns
    assert read({"question": "Q", "answer": "R"}, columns=columns) == {"prompt": "Q", "text": "R"}
    assert read({"x": [U, A], "messages": 7}, columns=(("messages", "x"),)) == TALK
    with pytest.raises(
        DataError,
        match=r"here: dataset_columns is prompt=question, but the columns are answer\. The row: \{'answer': 'R'\}",
    ):
        read({"answer": "R"}, columns=columns)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("prompt", "dataset_columns has 'prompt'; expected name=column"),
        ("=x", "expected name=column"),
        ("question=prompt", "dataset_columns names 'question'; .* one of input_ids, labels, .*messages"),
        ("prompt=a,prompt=b", "names prompt twice"),
    ],
)
def test_columns_that_make_no_sense(columns: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reading_of("text", columns, "stop")


BAD: dict[str, tuple[Any, str]] = {
    "broken JSON": (b"{not json", r"not JSON \(Expecting property name.* at column 2\)\. The row: b'\{not json'"),
    "half a row": (b'{"text": "abc', "not JSON .Unterminated string"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 text .invalid start byte at byte 10"),
    "a deep row": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a long number": (b'{"text": ' + b"1" * 5000 + b"}", "not usable JSON .Exceeds the limit"),
    "a key twice": (b'{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
    "only text": (b'"only text"', "'only text' is not an object with columns"),
    "no columns": ({}, "columns none; expected `input_ids`, `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, `text`"),
    "unknown columns": ({"question": "Q"}, r"columns question; expected .*dataset_columns.*dataset_text_field.* The row: \{'question': 'Q'\}"),
    "a prompt alone": ({"prompt": "Q"}, "columns prompt; expected"),
    "null": ({"text": None}, "`text` is null; expected a value"),
    "a number": ({"text": 7}, "the text is 7; expected a string"),
    "infinity": ({"text": float("inf")}, "the text is inf; expected a string"),
    "half a character": ({"text": "ab\ud800"}, r"the text holds '\\ud800' at character 2, which is half of a surrogate pair"),
    "half a character in JSON": (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"the content of messages\[0\] holds '\\ud83d' at character 0"),
    "half a character elsewhere": ({"messages": [{**U, "name": "\udc00"}]}, r"messages\[0\] holds '\\udc00', which is not JSON-compatible"),
    "messages that are text": ({"messages": "hi"}, "`messages` is 'hi'; expected a list"),
    "broken JSON text": ({"messages": "[{"}, "`messages`: not JSON"),
    "no messages": ({"messages": []}, r"`messages` is \[\]"),
    "a role": ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\] has the role 'robot'; expected one of system, developer, user, assistant, tool"),
    "a role that is no text": ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\] has the role \['user'\]"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\] has the content None; expected text"),
    "a turn that is text": ({"messages": ["x"]}, r"messages\[0\] is 'x'"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, r"messages\[0\] has .*image.* in its content; expected text"),
    "an empty answer": ({"messages": [U, {"role": "assistant", "content": " \n"}]}, r"messages\[1\]: the assistant message is empty"),
    "an empty question": ({"conversations": [{"from": "human", "value": ""}]}, r"conversations\[0\]: the user message is empty"),
    "an empty output": ({"instruction": "Q", "output": ""}, "`output` is empty; expected text"),
    "an empty instruction": ({"instruction": " ", "input": "", "output": "R"}, "`instruction` is empty"),
    "a wrong output": ({"instruction": "Q", "output": 3}, "`output` is 3; expected a string"),
    "a wrong history": ({"instruction": "Q", "output": "R", "history": [["a"]]}, r"history\[0\] is \['a'\]; expected"),
    "two systems": ({"messages": [{"role": "system", "content": "S"}, U], "system": "S"}, "both a `system` column and a system message"),
    "an empty completion": ({"prompt": "Q", "completion": ""}, "`completion` is empty"),
    "text and messages": ({"prompt": "Q", "completion": [A]}, "one of `prompt` and `completion` is text"),
    "fewer labels": ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
    "other labels": ({"input_ids": [1, 2], "labels": [1, 3]}, r"labels\[1\] is 3; expected -100 or its token, 2"),
    "fractions": ({"input_ids": [1.5]}, r"`input_ids` is \[1.5\]; expected a list of integers"),
    "truths": ({"input_ids": [True]}, "`input_ids` is .True.; expected a list of integers"),
    "no tokens": ({"input_ids": []}, r"`input_ids` is \[\]"),
    "too large a token": ({"input_ids": [2**31]}, "`input_ids` holds 2147483648, which is not a token id"),
    "too large by far": ({"input_ids": [10**5000]}, "`input_ids` holds int, which is not a token id"),
    "below zero": ({"input_ids": [-1]}, "`input_ids` holds -1, which is not a token id"),
    "what a reader refused": (BadRow("2 values, the header has 3.", ["a", "b"]), r"2 values, the header has 3\. The row: \['a', 'b'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_shown_or_counted(case: str) -> None:
    value, said = BAD[case]
    good = RawRow("file, line 1", {"text": "good"}, 1)
    bad = RawRow("file, line 2", value, 2)
    with pytest.raises(DataError, match=f"^file, line 2: .*{said}.*on_bad_row skip leaves such rows out") as error:
        parse_rows([good, bad], Reading(), {})
    text = str(error.value)
    assert "\n" not in text and len(text) < 700 and text.encode()
    counts: dict[str, Any] = {}
    found = parse_rows([good, bad, bad, good, *[bad] * 9], Reading(on_bad_row="skip"), counts)
    assert [d.text for d in found] == ["good", "good"] and counts["bad"] == 11
    assert len(counts["bad_rows"]) == 5 and counts["bad_rows"][0][1].startswith("file, line 2: ")


def test_anything_is_shown_in_a_line() -> None:
    loop: list[Any] = []
    loop.append(loop)

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    deep: Any = 0
    for _ in range(10_000):
        deep = [deep]
    for value in (loop, Odd(), deep, 10**10_000, "x" * 10**7, {"a": "b" * 10**7}, "\ud800\n", [1] * 10**5):
        shown = short(value)
        assert 0 < len(shown) <= 60 and "\n" not in shown and shown.encode()


# --- files ----------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names, delimiter=delimiter)
        writer.writeheader()
        writer.writerows([{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows])
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 7) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=5)
    return path


def write_gz(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def write_columns(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({name: [row[name] for row in rows] for name in rows[0]}))
    return path


WRITERS: dict[str, tuple[str, Callable[[Path, list[dict[str, Any]]], Any]]] = {
    "JSON lines": ("x.jsonl", write_rows),
    "JSON lines, Windows": ("x.jsonl", lambda p, rows: p.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(r).encode() for r in rows))),
    "JSON lines, compressed": ("x.jsonl.gz", write_gz),
    "JSON lines called JSON": ("x.json", write_rows),
    "JSON": ("x.json", lambda p, rows: p.write_text(json.dumps(rows))),
    "JSON, written large": ("x.json", lambda p, rows: p.write_text(json.dumps(rows, indent=2))),
    "JSON in data": ("x.json", lambda p, rows: p.write_text(json.dumps({"version": 1, "data": rows}))),
    "JSON columns": ("x.json", write_columns),
    "CSV": ("x.csv", write_csv),
    "CSV with semicolons": ("x.csv", lambda p, rows: write_csv(p, [{**row, "more": ",,"} for row in rows], ";")),
    "TSV": ("x.tsv", lambda p, rows: write_csv(p, rows, "\t")),
    "parquet": ("x.parquet", write_parquet),
    "arrow": ("x.arrow", write_arrow),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITERS)
def test_a_file_gives_its_rows_from_any_place_on(case: str, tmp_path: Path) -> None:
    rows = text_rows(30)
    rows[3]["text"] = 'a "quoted", text\nof\ttwo lines, ünd – 日本語 \u2028 \0'
    rows[5]["text"] = "x" * 300_000
    name, writer = WRITERS[case]
    writer(tmp_path / name, rows)
    found = list(read_file(tmp_path / name))
    values = [parse_json(raw.value) if isinstance(raw.value, bytes) else raw.value for raw in found]
    assert [{k: v for k, v in value.items() if k != "more"} for value in values] == rows
    assert len({raw.where for raw in found}) == len(rows)
    for i in range(0, len(rows), 4):
        place = json.loads(json.dumps(found[i].after))
        assert list(read_file(tmp_path / name, place)) == found[i + 1 :]


@pytest.mark.parametrize(
    ("header", "columns"), [('"a;b",text', 2), ("a;text", 2), ("a\ttext", 2), ("text", 1), ('"a,b";text', 2)]
)
def test_a_header_says_what_parts_the_values(tmp_path: Path, header: str, columns: int) -> None:
    between = next((sign for sign in (";", "\t", ",") if sign in header.replace('"a;b"', "").replace('"a,b"', "")), ",")
    (tmp_path / "x.csv").write_text(f'{header}\n{"1" + between if columns > 1 else ""}"x{between}y"\n')
    (raw,) = read_file(tmp_path / "x.csv")
    assert raw.value["text"] == f"x{between}y" and len(raw.value) == columns


def test_a_row_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,x\n"two\nlines",1\n\nlast,2\n')
    assert [raw.where.split(", ")[1] for raw in read_file(tmp_path / "a.csv")] == ["line 2", "line 5"]
    (tmp_path / "a.json").write_text('\n[{"text":\n "a"},\n\n  {"text": "b"}, {"text": "c"}]\n')
    lines = [raw.where.split(", ")[1] for raw in read_file(tmp_path / "a.json")]
    assert lines == ["line 2 (row 0)", "line 5 (row 1)", "line 5 (row 2)"]


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", ["one", "two", " three ", "four"]),
        ("paragraph", ["one\ntwo", " three \nfour"]),
        ("document", ["one\ntwo\n\n\n three \nfour"]),
    ],
)
def test_running_text(tmp_path: Path, sample_by: str, expected: list[str]) -> None:
    """As `datasets` reads it, but for blank lines, which are no rows."""
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n \n three \nfour\n".replace(b" \n three", b"\n three"))
    found = list(read_file(path, sample_by=sample_by))
    assert [raw.value["text"] for raw in found] == expected
    assert all(list(read_file(path, raw.after, sample_by)) == found[i + 1 :] for i, raw in enumerate(found))
    keys = {by: file_source([path], by).fingerprint() for by in ("line", "paragraph", "document")}
    assert len(set(keys.values())) == 3 and [d.text for d in file_source([path], sample_by).documents()] == expected
    folder = datasets.load_dataset(
        "text", data_files=str(path), sample_by=sample_by, split="train", cache_dir=str(tmp_path / "cache")
    )
    theirs = [row["text"].removeprefix("\ufeff").strip("\n") for row in folder if row["text"].strip()]
    assert theirs == expected


def test_one_object_in_a_file_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for row in ({"messages": [U, A]}, {"text": "T"}):
        path.write_text(json.dumps(row))
        assert [raw.value for raw in read_file(path)] == [row]


def bad_parquet(path: Path) -> None:
    """Text in a parquet file that is not UTF-8."""
    array = pa.array([b"good", b"\xff\xfe", b"good"]).view(pa.string())
    pq.write_table(pa.table({"text": array}), path)


BAD_IN_FILES: dict[str, tuple[str, Any, str, int]] = {
    # file, content, what is said, good rows
    "more values": ("x.csv", "text,y\na,1\nb,2,3\nc,4\n", r"x.csv, line 3: 3 values, the header has 2 \(text, y\)\. The row: \['b', '2', '3'\]", 2),
    "fewer values": ("x.csv", "text,y\na\nc,4\n", "x.csv, line 2: 1 values, the header has 2", 1),
    "a quote inside": ("x.csv", 'text\n"a"b\nc\n', "x.csv, line 2: not a row of values .*expected after", 1),
    "bytes in CSV": ("x.csv", b"text\ngood\n\xff\n", r"x.csv, line 3: the text holds '\\udcff' at character 0", 1),
    "bytes in JSON": ("x.json", b'[{"text": "good"},\n{"text": "\xff"}]', r"x.json, line 2 .row 1.: the text holds '\\udcff'", 1),
    "a key twice": ("x.json", '[{"text": "a"}, {"text": "b", "text": "c"}, {"text": "d"}]', "x.json, line 1 .row 1.: the key 'text' occurs twice", 2),
    "bytes in parquet": ("x.parquet", bad_parquet, "x.parquet, row 1: a value that cannot be read .*UTF8", 2),
    "a line": ("x.jsonl", b'{"text": "a"}\n\0\n{"text": "b"}\n', "x.jsonl, line 2: not JSON", 2),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_IN_FILES)
def test_a_bad_row_in_a_file(case: str, tmp_path: Path) -> None:
    name, content, said, good = BAD_IN_FILES[case]
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(DataError, match=said):
        list(file_source([path]).documents())
    counts: dict[str, Any] = {}
    rows = pickle.loads(pickle.dumps(list(read_file(path))))  # on their way to another process
    assert len(parse_rows(rows, Reading(on_bad_row="skip"), counts)) == good and counts["bad"] == 1


UNREADABLE: dict[str, tuple[str, Any, str]] = {
    "empty JSON": ("x.json", b"", "x.json: the file is empty"),
    "empty CSV": ("x.csv", b"\n", "x.csv: the file is empty; expected a line of column names"),
    "columns twice": ("x.csv", b"text,text\n", "x.csv, line 1: columns text, text; expected each name once"),
    "an open quote": ("x.csv", b'text\na\n"b\nc\nd\n', "x.csv, line 3: the quote that is opened here is never closed"),
    "half a list": ("x.json", b'[{"text": "a"},\n{"text": ', "x.json, line 2: not JSON"),
    "no comma": ("x.json", b'[{"text": "a"}\n{"text": "b"}]', r"x.json, line 1: not JSON .expected , or \] after row 0"),
    "more than a list": ("x.json", b'[{"text": "a"}] x', "x.json, line 1: not JSON .extra data"),
    "a number": ("x.json", b"7", "x.json: the file holds 7; expected a list of rows"),
    "a deep list": ("x.json", b'[{"text": ' + b"[" * 100_000, "x.json, line 1 .row 0.: not usable JSON .nested too deeply"),
    "a long number": ("x.json", b'[{"text": ' + b"1" * 5000 + b"}]", "x.json, line 1 .row 0.: not usable JSON .Exceeds"),
    "two splits": ("x.json", b'{"train": [{"text": "a"}], "test": []}', "x.json: the file holds several lists .train, test."),
    "text as parquet": ("x.parquet", b"text\na\n", "x.parquet cannot be read as parquet"),
    "empty parquet": ("x.parquet", b"", "x.parquet cannot be read as parquet"),
    "parquet as text": ("x.jsonl", b"PAR1\0\0", "x.jsonl: the content is that of a .parquet file, not .jsonl; rename it"),
    "gzip as text": ("x.csv", gzip.compress(b"text\na\n"), "x.csv: the content is that of a .gz file"),
    "text as gzip": ("x.jsonl.gz", b'{"text": "a"}', "x.jsonl.gz cannot be read: Not a gzipped file"),
    "half a gzip": ("x.jsonl.gz", gzip.compress(os.urandom(5000))[:3000], "x.jsonl.gz cannot be read: Compressed file ended"),
    "text as arrow": ("x.arrow", b"text", "x.arrow cannot be read as Arrow data"),
    "empty arrow": ("x.arrow", b"", "x.arrow cannot be read"),
    "no file": ("x.jsonl", None, "x.jsonl cannot be read: No such file"),
    "another kind": ("x.doc", b"text", r"x.doc: unsupported file type '.doc'; expected .jsonl, .ndjson, .json, .csv, .tsv, .txt, .parquet, .arrow"),
    "two delimiters": ("x.csv", b"text;a,b\n", "x.csv: the header 'text;a,b' has commas and semicolons; expected one delimiter"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    name, content, said = UNREADABLE[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        list(read_file(tmp_path / name))
    assert "\n" not in str(error.value)


def test_half_a_table_is_an_error(tmp_path: Path) -> None:
    """Not fewer rows: whatever is cut off is missed."""
    for name, writer in (("x.parquet", write_parquet), ("x.arrow", write_arrow)):
        path = writer(tmp_path / name, text_rows(200))
        whole = path.read_bytes()
        for size in (len(whole) // 10, len(whole) // 2, len(whole) - 8, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=f"{name} cannot be read"):
                list(read_file(path))


def test_parquet_is_not_read_as_a_whole(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": os.urandom(50_000).hex()} for _ in range(300)], group=10)
    rows = read_file(path)
    before = pa.total_allocated_bytes()
    next(rows)
    assert pa.total_allocated_bytes() - before < path.stat().st_size / 5


# --- data sets ------------------------------------------------------------------------------------------------------


def names(source: DataSource | None) -> list[str]:
    return [] if source is None else [Path(part.name).name for part in source.parts or (source,)]


def test_files_of_a_data_set(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train_1.jsonl", "test.jsonl", "training.jsonl", "notes.txt"):
        write_rows(tmp_path / name, text_rows(1))
    (tmp_path / "train-2.jsonl").mkdir()
    train, test = find_dataset.find_data(str(tmp_path), ["train", "test"])
    assert names(train) == ["train-0.jsonl", "train_1.jsonl"] and names(test) == ["test.jsonl"]
    train, test = find_dataset.find_data(str(tmp_path / "test.jsonl"), ["train", "test"])
    assert names(train) == ["test.jsonl"] and test is None
    assert find_dataset.find_data(str(tmp_path), ["train", "test"], evaluates=False)[1] is None
    assert find_dataset.find_data(str(tmp_path), ["train"])[1] is None


def test_folders_as_hubs_have_them(tmp_path: Path) -> None:
    parts = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet",
             "small/train.csv", "plain/train/0.json", "plain/train/1.json", "plain/test.json"]  # fmt: skip
    for i, part in enumerate(parts):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        writer = {"parquet": write_parquet, "csv": write_csv, "json": write_rows}[part.rsplit(".", 1)[1]]
        writer(tmp_path / part, text_rows(2, seed=i))  # type: ignore[operator]
    train, test = find_dataset.find_data(str(tmp_path), ["train", "test"])
    assert names(train) == [Path(p).name for p in parts[:2]] and names(test) == [Path(parts[2]).name]
    assert [d.text for d in train.documents()] == [r["text"] for s in (0, 1) for r in text_rows(2, seed=s)]
    assert names(find_dataset.find_data(str(tmp_path), ["train"], config="small")[0]) == ["train.csv"]
    with pytest.raises(
        DataError, match=r"dataset_config_name is 'large', but .* has no such folder; it holds data, plain, small"
    ):
        find_dataset.find_data(str(tmp_path), ["train"], config="large")
    train, test = find_dataset.find_data(str(tmp_path / "plain"), ["train", "test"])
    assert names(train) == ["0.json", "1.json"] and names(test) == ["test.json"]


def test_what_datasets_saved(tmp_path: Path) -> None:
    rows = {"train": chat_rows(40), "test": chat_rows(5, seed=3)}
    both = datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in rows.items()})
    both.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    both["train"].select(range(0, 40, 2)).save_to_disk(tmp_path / "one")
    train, test = find_dataset.find_data(str(tmp_path / "both"), ["train", "test"])
    assert test is not None
    for source, expected in ((train, rows["train"]), (test, rows["test"])):
        assert [list(d.messages or ()) for d in source.documents()] == [row["messages"] for row in expected]
    one, none = find_dataset.find_data(str(tmp_path / "one"), ["train", "test"])
    assert none is None and len(list(one.rows(None))) == 20
    assert [r.value for r in find_dataset.source_of(str(tmp_path / "one"), "x").rows(None)] == rows["train"][::2]
    with pytest.raises(
        DataError, match=r"no file for the split 'valid' .*; the folder holds dataset_dict.json, test, train"
    ):
        find_dataset.find_data(str(tmp_path / "both"), ["valid"])
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match=r"state\.json lists data-00000-of-00001.arrow, but they do not exist"):
        find_dataset.find_data(str(tmp_path / "one"), ["train"])
    (tmp_path / "one" / "state.json").write_text("[1")
    with pytest.raises(DataError, match=r"state.json is not what `datasets` writes"):
        find_dataset.find_data(str(tmp_path / "one"), ["train"])


@pytest.mark.parametrize(
    ("dataset", "splits", "said"),
    [
        ("nowhere", "train", "'.*nowhere' does not exist. Give a file"),
        ("a" * 300, "train", "does not exist"),
        ("a\0b", "train", "does not exist"),
        (".", "valid", r"no file for the split 'valid' .such as valid.jsonl.; the folder holds notes.doc, train.jsonl, two"),
        ("notes.doc", "train", "unsupported file type '.doc'; expected .jsonl"),
        ("two", "train", r"two: files of several formats for the split 'train' .train.csv, train.jsonl.; name one"),
    ],
)  # fmt: skip
def test_data_that_is_not_there(tmp_path: Path, dataset: str, splits: str, said: str) -> None:
    for name in ("train.jsonl", "two/train.jsonl", "two/train.csv"):
        write_rows(tmp_path / name, text_rows(1))
    (tmp_path / "notes.doc").write_text("x")
    with pytest.raises(DataError, match=said):
        find_dataset.find_data(str(tmp_path / dataset), find_dataset.split_names(splits))


@pytest.mark.parametrize(("splits", "said"), [("", "splits is empty"), ("a,b,c", "at most two names")])
def test_names_of_splits(splits: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        find_dataset.split_names(splits)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "train.jsonl", text_rows(1))

    def refuse(*given: Any, **more: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for name in ("open", "iterdir"):  # root may read everything
        source = find_dataset.find_data(str(tmp_path), ["train"])[0]
        monkeypatch.setattr(Path, name, refuse)
        with pytest.raises(DataError, match=r" cannot be read: Permission denied\.$"):
            find_dataset.check_first_rows(
                source if name == "open" else find_dataset.find_data(str(tmp_path), ["train"])[0], Reading()
            )
        monkeypatch.undo()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"train\.jsonl cannot be read: Permission denied"):
        source.fingerprint()


def test_names_of_several_sets(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a, b.jsonl", text_rows(1))
    assert find_dataset.names_of(str(path)) == [str(path)]
    assert find_dataset.names_of("a.jsonl, me/it ,") == ["a.jsonl", "me/it"]


def test_the_first_row_is_looked_at(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"train-{i}.jsonl" for i in range(3))
    write_rows(first, text_rows(1))
    second.write_text('{"body": "x"}\n')
    third.write_text("\n")
    source = file_source([first, second])
    with pytest.raises(DataError, match=r"train-1.jsonl, line 1: columns body"):
        find_dataset.check_first_rows(source, Reading())
    find_dataset.check_first_rows(source, Reading(on_bad_row="skip"))
    with pytest.raises(DataError, match=r"train-2.jsonl: no rows;"):
        find_dataset.check_first_rows(file_source([third]), Reading(on_bad_row="skip"))


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"train": datasets.Dataset.from_list(text_rows(9)), "test": datasets.Dataset.from_list(text_rows(3, seed=2))}
    asked: list[Any] = []

    def load(name: str, config: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        if name == "no/where":
            raise ConnectionError("Couldn't reach it.\nMore lines")
        return kept[split].to_iterable_dataset() if streaming else kept[split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(find_dataset, "_unreachable", lambda name: None)
    find_dataset._load.cache_clear()
    for streaming in (False, True):
        train, test = find_dataset.find_data("me/it", ["train", "test"], config="small", streaming=streaming)
        assert test is not None and len(asked) == 2 * streaming, "nothing is loaded before it is needed"
        rows = list(train.rows(None))
        assert [row.value for row in rows] == text_rows(9) and rows[2].where == "me/it (small, train), row 2"
        assert [row.value for row in train.rows(rows[3].after)] == text_rows(9)[4:]
        assert [d.text for d in test.documents()] == [row["text"] for row in text_rows(3, seed=2)]
        assert train.fingerprint() != test.fingerprint()
    assert asked == [("me/it", "small", split, streaming) for streaming in (False, True) for split in ("train", "test")]
    find_dataset._load.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # whatever the tests run under
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *given, **more: 1 / 0)  # no answer at all
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: text_rows(1) if datasets.config.HF_HUB_OFFLINE else None
    )
    find_dataset.check_first_rows(find_dataset.find_data("me/it", ["train"])[0], Reading())  # what was loaded before
    assert not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        DataError,
        match=r"the dataset 'no/where' is not a local file or folder, and its split 'train' could not be loaded.*: it cannot be reached .division by zero.\.$",
    ):
        find_dataset.check_first_rows(find_dataset.find_data("no/where", ["train"])[0], Reading())


def test_without_a_network_a_name_is_one_line() -> None:
    """`datasets` itself is asked here, with the network switched off."""
    program = (
        "import sys\nfrom fullshard.data import find_dataset\nfrom fullshard.data.row_formats import Reading\n"
        "from fullshard.config.errors import DataError\n"
        "try: find_dataset.check_first_rows(find_dataset.find_data('no-such-owner/no-such-data', ['train'])[0], Reading())\n"
        "except DataError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    said, torch = ran.stdout.splitlines()
    assert (
        said.startswith("the dataset 'no-such-owner/no-such-data' is not a local file or folder")
        and "HF_HUB_OFFLINE" in said
    )
    assert torch == "False"


# --- sources --------------------------------------------------------------------------------------------------------


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = text_rows(3)
    path = write_rows(tmp_path / "a.jsonl", rows)
    before = file_source([path]).fingerprint()
    path.touch()
    assert file_source([path]).fingerprint() == before
    path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    assert file_source([path]).fingerprint() != before
    assert row_source(rows, "x").fingerprint() == row_source(list(rows), "y").fingerprint()
    assert row_source(rows[:2], "x").fingerprint() != row_source(rows, "x").fingerprint()
    assert row_source([{"text": "\ud800", 1: b"x", ("a",): 2}], "x").fingerprint()


def test_what_users_hand_over(tmp_path: Path) -> None:
    rows = text_rows(5)
    path = write_rows(tmp_path / "a.jsonl", rows)
    table = datasets.Dataset.from_list(rows)
    for data in (rows, (row for row in rows), table, table.to_iterable_dataset(), str(path), path, [path]):
        source = find_dataset.source_of(data, "x")
        assert [d.text for d in source.documents()] == [row["text"] for row in rows]
        places = [row.after for row in source.rows(None)]
        assert [parse_row(row).text for row in source.rows(places[1])] == [row["text"] for row in rows[2:]]


HANDED: dict[str, tuple[Any, str]] = {
    "a number": (7, "train_dataset is 7; expected rows"),
    "all splits": (datasets.DatasetDict({"train": datasets.Dataset.from_list([])}), r"train_dataset is a DatasetDict .train.; give one of its splits"),
    "no file": ("nowhere.jsonl", "train_dataset: 'nowhere.jsonl' does not exist"),
    "a folder": ("/", "/ is a folder; expected a file"),
}  # fmt: skip


@pytest.mark.parametrize("case", HANDED)
def test_what_cannot_be_rows(case: str) -> None:
    data, said = HANDED[case]
    with pytest.raises(UserError, match=said):
        find_dataset.source_of(data, "train_dataset")


KINDS = {
    "truncated JSON": '{"messages": [{"role": "user", "cont',
    "broken JSON": '{"messages": [}',
    "no messages": '{"messages": []}',
    "unknown role": '{"messages": [{"role": "robot", "content": "hi"}]}',
    "null content": '{"messages": [{"role": "user", "content": null}]}',
    "other columns": '{"question": "a", "answer": "b"}',
}


def test_rows_that_are_left_out_have_reasons_and_places(tmp_path: Path) -> None:
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    path = tmp_path / "rows.jsonl"
    lines = [good, *[KINDS["unknown role"]] * 7]
    for line in KINDS.values():
        lines += [good, line]
    path.write_text("".join(f"{line}\n" for line in lines))
    counts: dict[str, Any] = {}
    kept = parse_rows(list(read_file(path)), Reading(on_bad_row="skip"), counts)
    assert len(kept) == lines.count(good)
    assert {name.removeprefix(BAD_KIND): n for name, n in counts.items() if name.startswith(BAD_KIND)} == {
        kind: lines.count(line) for kind, line in KINDS.items()
    }
    assert bad_kinds(counts).startswith("8 unknown role, 1 ")
    assert len(counts["bad_rows"]) == 5 == len({kind for kind, _ in counts["bad_rows"]})
    for kind, message in counts["bad_rows"]:
        assert message.startswith(f"{path}, line {1 + lines.index(KINDS[kind])}: ")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_broken_json_is_reported_where_it_breaks(tmp_path: Path, end: str) -> None:
    row = '{"text": "wörter", "n": [1, 2]}'
    path = tmp_path / "rows.jsonl"
    for size in range(1, len(row)):
        path.write_bytes(f"{row}\n{row[:size]}{end}".encode())
        with pytest.raises(DataError, match=rf"^{path}, line 2: not JSON \(.* at column (\d+)\)") as error:
            list(file_source([path]).documents())
        column = int(re.findall(r"at column (\d+)\)", str(error.value))[0])
        quote = row.rfind('"', 0, size) + 1 if row[:size].count('"') % 2 else size + 1
        assert column == quote or row[size - 1] == " " and column == size, (size, str(error.value))


BROKEN_LISTS = {
    "no comma between rows": ('[\n {"text": "a"}\n {"text": "b"}\n]', 2, 15),
    "no comma inside a row": ('[\n {"text": "a"\n  "n": 1},\n {"text": "b"}\n]', 2, 14),
    "no colon": ('[\n {"text"\n "a"}]', 2, 9),
    "truncated after a comma": ('[\n {"text": "a",\n\n', 2, 15),
    "a word": ('[\n {"text": "a",\n  "n": nothing}]', 3, 8),
    "lines of which one is broken": ('{"text": "a"\n{"text": "b"}\n', 1, 13),
}


@pytest.mark.parametrize("case", BROKEN_LISTS)
def test_a_broken_list_is_reported_where_it_breaks(tmp_path: Path, case: str) -> None:
    text, line, column = BROKEN_LISTS[case]
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"^{path}, line {line}: not JSON \(.* at column {column}\)"):
        list(file_source([path]).documents())
