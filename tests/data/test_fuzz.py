"""Data that nobody meant to write: a file gives rows or one clear error, a row is a document, empty, or counted."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullshard.config.errors import DataError
from fullshard.data.chat_template import BUILT_IN
from fullshard.data.encode import TextSettings, encode_rows
from fullshard.data.file_formats import READERS, read_file
from fullshard.data.raw_row import RawRow, parse_json
from fullshard.data.row_formats import Reading, parse_rows
from tests.data.tiny import chat_rows, make_tokenizer, text_rows

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
FUZZ = settings(
    deadline=None, max_examples=EXAMPLES, derandomize=EXAMPLES == 40, suppress_health_check=list(HealthCheck)
)
SKIP = TextSettings(100_000, template=BUILT_IN["qwen"].text, reading=Reading(on_bad_row="skip"))
STOP = TextSettings(100_000, template=BUILT_IN["qwen"].text)
LEARNS = ({}, {"assistant_only_loss": True}, {"last_turn_only_loss": True, "template": BUILT_IN["chatml"].text})
TOKENIZER = make_tokenizer()


def account(rows: list[RawRow]) -> int:
    """Tokenise rows; every one of them is a document, empty or counted as bad, and no error is hidden by skipping."""
    for changes in LEARNS:
        counts: dict[str, Any] = Counter()
        found = list(encode_rows(rows, TOKENIZER, replace(SKIP, **changes), counts))
        assert len(found) + counts["empty"] + counts["bad"] + counts["masked"] == len(rows)
        assert len(counts.get("bad_rows") or ()) == min(5, counts["bad"])
        assert all(len(ids) == len(mask) > 0 for ids, mask, _ in found)
        try:
            again = list(encode_rows(rows, TOKENIZER, replace(STOP, **changes), Counter()))
            assert len(again) == len(found) and not counts["bad"]
        except DataError as error:
            check_clear(error)
            assert counts["bad"]
    return len(found)


def check_clear(error: DataError, names: str = "") -> None:
    text = str(error)
    assert text.encode() and "\n" not in text and len(text) < 900 and names in text, text[:2000]


def read_all(name: str, content: bytes, account: Callable[[list[RawRow]], int] = account) -> int | None:
    """How many documents a file gives; None if it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        rows: list[RawRow] = []
        try:
            rows.extend(read_file(path))
        except DataError as error:
            check_clear(error, names=name)
            return None
        assert json.dumps([row.after for row in rows])
        for row in rows[:2]:
            again = list(read_file(path, json.loads(json.dumps(row.after))))
            assert len(again) == len(rows) - rows.index(row) - 1 or row in rows[: rows.index(row)]
    return account(rows)


# --- rows -----------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec=None), max_size=8)  # halves of surrogate pairs and zeros among them
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
COLUMNS = ["messages", "conversations", "instruction", "input", "output", "system", "history", "prompt", "completion",
           "text", "input_ids", "labels", "tools", "chat_template_kwargs", "chosen", "rejected", "label", "images",
           "assistant_masks", "completion_mask", "attention_mask", "position_ids", "seq_lengths"]  # fmt: skip
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | VALUES})}), max_size=2
)
TURNS = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "tool_calls", "name", "weight", "train", "thinking"]),
        st.sampled_from(["user", "assistant", "system", "tool", "function_call", "gpt", '{"name": "f"}', 0, 1, ""])
        | CALLS
        | TEXT
        | VALUES,
    )
    | VALUES,
    max_size=4,
)
ROWS = st.dictionaries(st.sampled_from(COLUMNS), TURNS | TEXT | VALUES, max_size=5) | VALUES


@FUZZ
@given(st.lists(ROWS, max_size=6))
def test_any_values_as_rows(rows: list[Any]) -> None:
    account([RawRow(f"row {i}", row, i + 1) for i, row in enumerate(rows)])
    account([RawRow(f"row {i}", json.dumps(row).encode(), i + 1) for i, row in enumerate(rows)])


@FUZZ
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_as_rows(rows: list[bytes]) -> None:
    account([RawRow(f"row {i}", row, i + 1) for i, row in enumerate(rows)])


# --- files ----------------------------------------------------------------------------------------------------------


def _written(kind: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Rows as others write them."""
    frame = pandas.DataFrame(rows)
    if kind in (".csv", ".tsv"):
        # pandas quotes a carriage return only where lines end with one; unquoted it would be a line break.
        ends = "\r\n" if any("\r" in str(value) for row in rows for value in row.values()) else "\n"
        frame.to_csv(path, index=False, sep="," if kind == ".csv" else "\t", lineterminator=ends)
    elif kind == ".json":
        frame.to_json(path, orient="records")
    elif kind == ".arrow":
        frame.to_feather(path)
    elif kind == ".parquet":
        frame.to_parquet(path, row_group_size=2)
    else:
        frame.to_json(path, orient="records", lines=True)


WHOLE = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ['"', "\n", "\r\n", "\t", ",", "\\", "\r", "[", "\0"]
)


@FUZZ
@given(st.sampled_from(sorted(READERS.keys() - {".txt"})), st.lists(st.tuples(WHOLE, WHOLE), min_size=1, max_size=5))
def test_what_pandas_writes_is_read(kind: str, pairs: list[tuple[str, str]]) -> None:
    rows = [{"text": a, "other": b} for a, b in pairs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{kind}"
        _written(kind, rows, path)
        found = [parse_json(raw.value) if isinstance(raw.value, bytes) else raw.value for raw in read_file(path)]
    assert found == rows


def _table(rows: list[dict[str, Any]]) -> Any:
    return pa.Table.from_pylist(rows)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(_table(rows), sink, row_group_size=8)
    return sink.getvalue().to_pybytes()


def _arrow(rows: list[dict[str, Any]], kind: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    sink, table = pa.BufferOutputStream(), _table(rows)
    with kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    return sink.getvalue().to_pybytes()


def _csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    quoted = (json.dumps(row["messages"]).replace('"', '""') for row in rows)
    return f"id{delimiter}messages\n".encode() + b"".join(
        f'{i}{delimiter}"{q}"\n'.encode() for i, q in enumerate(quoted)
    )


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


TALKS = chat_rows(20)
VALID: dict[str, bytes] = {
    "x.jsonl": _lines(TALKS),
    "x.ndjson": _lines(text_rows(20)),
    "x.json": json.dumps(TALKS, indent=1).encode(),
    "columns.json": json.dumps({"text": [row["text"] for row in text_rows(20)]}).encode(),
    "x.csv": _csv(TALKS),
    "semicolons.csv": _csv(TALKS, ";"),
    "x.tsv": _csv(TALKS, "\t"),
    "x.txt": "".join(row["text"] + "\n\n" for row in text_rows(20)).encode(),
    "x.parquet": _parquet(TALKS),
    "x.arrow": _arrow(TALKS),
    "file.arrow": _arrow(TALKS, pa.ipc.new_file),
    "x.jsonl.gz": gzip.compress(_lines(TALKS)),
}


def test_what_is_spoilt_below_is_whole() -> None:
    assert {read_all(name, content) for name, content in VALID.items()} == {20}
    assert {kind for kind in READERS if not any(kind in name for name in VALID)} == set()


@FUZZ
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=200))
def test_any_bytes_as_files(name: str, content: bytes) -> None:
    read_all(name, content)


@FUZZ
@given(st.sampled_from(sorted(VALID)), st.data())
def test_files_that_are_spoilt(name: str, data: st.DataObject) -> None:
    """Bytes changed, cut out, put in, written twice."""
    content = bytearray(VALID[name])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        size = data.draw(st.integers(0, 40))
        kind = data.draw(st.sampled_from(["change", "cut", "insert", "twice", "end"]))
        if kind == "change":
            content[at : at + size] = data.draw(st.binary(min_size=size, max_size=size))
        elif kind == "cut":
            del content[at : at + size]
        elif kind == "insert":
            content[at:at] = data.draw(
                st.sampled_from([b"\0", b'"', b"\n", b"[", b"{", b"}", b",", b"\xff", b"\\ud800"])
            )
        elif kind == "twice":
            content[at:at] = content[at : at + size]
        else:
            del content[max(at, len(content) // 2) :]
    read_all(name, bytes(content))


LARGE: dict[str, tuple[str, bytes, int | None]] = {
    # file, content, documents in it; None: it cannot be read
    "a row": ("x.jsonl", json.dumps({"text": "x" * 10**7}).encode(), 1),
    "a value in CSV": ("x.csv", b'text\n"' + b"word " * 2_000_000 + b'"\n', 1),
    "many turns": ("x.json", json.dumps([{"messages": TALKS[0]["messages"] * 10**4}]).encode(), 1),
    "many bad turns": ("x.jsonl", json.dumps({"conversations": [{"from": "gpt"}] * 10**5}).encode(), 0),
    "a key": ("x.jsonl", json.dumps({"x" * 10**7: 1}).encode(), 0),
    "many columns": ("x.jsonl", json.dumps(dict.fromkeys(map(str, range(10**5)), 1)).encode(), 0),
    "a broken row": ("x.jsonl", b'{"text": "' + b"x" * 10**7, 0),
    "a wrong value": ("x.json", json.dumps([{"text": ["x" * 10**7]}]).encode(), 0),
    "zeros": ("x.jsonl", b"\0" * 10**6, 0),
    "depth in CSV": ("x.csv", b'messages\n"' + b"[" * 10**6 + b'"\n', 0),
    "blank lines": ("x.jsonl", b"\n" * 10**6, 0),
    "depth": ("x.json", b"[" * 10**6, None),
    "an open quote": ("x.csv", b'text\n"' + b"x\n" * 10**6, None),
}


def understood(rows: list[RawRow]) -> int:
    """As `account`, but for the tokens, which take their time."""
    counts: dict[str, Any] = {}
    found = parse_rows(rows, SKIP.reading, counts)
    assert len(found) + counts.get("bad", 0) == len(rows)
    try:
        assert parse_rows(rows, STOP.reading, {}) == found
    except DataError as error:
        check_clear(error)
        assert counts["bad"]
    return len(found)


@pytest.mark.parametrize("case", LARGE)
def test_large_things(case: str) -> None:
    name, content, found = LARGE[case]
    assert read_all(name, content, understood) == found


@pytest.mark.parametrize("words", [100_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_a_large_row_is_a_document(words: int) -> None:
    row = RawRow("here", {"text": "bird " * words}, 1)
    counts: dict[str, Any] = Counter()
    ((ids, mask, _),) = encode_rows([row], TOKENIZER, TextSettings(1 << 24), counts)
    assert len(ids) >= words and mask.all() and not counts["cut"]
