"""Documents as tokens: what is learnt, long documents, and the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fullshard.config.errors import DataError
from fullshard.data import chat_template, checked_array, loader
from fullshard.data.chat_template import BUILT_IN
from fullshard.data.encode import TextSettings
from fullshard.data.loader import load_table
from fullshard.data.raw_row import RawRow
from fullshard.data.row_formats import reading_of
from fullshard.data.sources import DataSource, file_source, row_source
from fullshard.data.token_table import FILES, TokenTable, make_table, open_table, statistics, table_key
from fullshard.distributed import progress as display
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.sft.batches import describe_data
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import chat_rows, make_tokenizer, text_rows, write_rows
from tests.pool import ranks


def table(rows: list[dict[str, Any]], tmp_path: Path, tokenizer: Any = None, **settings: Any) -> TokenTable:
    chosen = TextSettings(**settings)
    return load_table(row_source(rows, "rows"), tokenizer or make_tokenizer(), chosen, str(tmp_path))


def test_tokens_are_the_tokenizer_s(tmp_path: Path) -> None:
    tokenizer, rows = make_tokenizer(), text_rows(20)
    for adds, end, given in ((False, False, False), (True, True, True), (None, True, None)):
        special = adds is not False
        found = table(rows, tmp_path, add_special_tokens=adds, append_concat_token=given)
        assert len(found) == 20
        for i, row in enumerate(rows):
            ids = tokenizer(row["text"], add_special_tokens=special)["input_ids"] + [tokenizer.eos_token_id] * end
            ((tokens, loss_mask),) = found.documents(i)
            assert tokens.tolist() == ids and loss_mask.all()
            assert found.row_sizes[i] == len(ids) and found.row_targets[i] == len(ids) - 1


@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_learnt_tokens_spell_the_answers(tmp_path: Path, name: str) -> None:
    tokenizer, rows = make_tokenizer(), chat_rows(30, seed=2)
    chat_template.prepare_tokenizer(tokenizer, name)
    template = chat_template.template_of(tokenizer)
    found = table(rows, tmp_path, tokenizer, template=template, assistant_only_loss=True)
    for i, row in enumerate(rows):
        ((tokens, loss_mask),) = found.documents(i)
        spelt = tokenizer.decode(tokens[loss_mask.astype(bool)])
        answers = [m["content"] + str(BUILT_IN[name].end) for m in row["messages"] if m["role"] == "assistant"]
        assert spelt == "".join(answers)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_long_documents(tmp_path: Path, overflow: str, packing: bool) -> None:
    whole = table(text_rows(40), tmp_path)
    found = table(text_rows(40), tmp_path, max_length=16, overflow=overflow, packing=packing)
    sizes = np.diff(whole.document_starts)
    assert found.facts["long"] == (sizes > 16).sum() > 0
    assert np.diff(found.document_starts).max() <= 16 and found.row_sizes[:].max() <= 16
    kept = {
        "truncate": np.minimum(sizes, 16).sum(),
        "split": sizes.sum(),
        "drop": sizes[sizes <= 16].sum(),
    }[overflow]
    assert found.facts["tokens"] == kept and found.facts["cut"] == sizes.sum() - kept
    if overflow == "split":
        assert found.tokens[:].tolist() == whole.tokens[:].tolist()
    assert sorted(found.row_documents) == list(range(found.facts["documents"]))


@pytest.mark.parametrize("kind", ["error", "panic"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_text_that_the_tokenizer_cannot_encode_is_one_line(kind: str, workers: int, tmp_path: Path) -> None:
    """A word without a token for unknown ones; a pattern that takes too long, at which the library panics."""
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]" if kind == "panic" else "missing"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(a|a|b?)+$" if kind == "panic" else " "), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[UNK]")
    rows = [{"text": "a"}, {"text": "a" * 200 + "!"}]
    reason = "retry-limit" if kind == "panic" else "UNK"
    with pytest.raises(DataError, match=rf"^rows, row 1: the tokenizer cannot encode the text: .*{reason}"):
        load_table(row_source(rows, "rows"), tokenizer, TextSettings(), str(tmp_path), workers)


def test_nothing_to_learn_is_said(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match="no documents with tokens"):
        table([{"text": ""}], tmp_path)
    with pytest.raises(DataError, match="no documents with tokens"):
        table([], tmp_path)
    users_only = [{"messages": [{"role": "user", "content": "hello"}]}]
    with pytest.raises(DataError, match=r"none of their tokens contributes to the loss \(assistant_only_loss"):
        table(users_only, tmp_path, tokenizer, template=BUILT_IN["chatml"].text, assistant_only_loss=True)
    with pytest.raises(DataError, match="assistant_only_loss is on, but the rows are plain text"):
        table(text_rows(3), tmp_path, tokenizer, assistant_only_loss=True)
    assert not [*(tmp_path / "tokens").iterdir()], "nothing half-written"
    both = [*text_rows(2), *chat_rows(2)]
    assert len(table(both, tmp_path, tokenizer, template=BUILT_IN["chatml"].text, assistant_only_loss=True)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    source = file_source([write_rows(tmp_path / "train.jsonl", text_rows(1500))])
    settings = TextSettings(max_length=20, packing=True)
    for name, count in (("here", 0), ("there", workers)):
        make_table(source, make_tokenizer(), settings, tmp_path / name, count)
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("packing", [False, True])
def test_statistics_are_numpy_s(tmp_path: Path, packing: bool) -> None:
    tokenizer, rows = make_tokenizer(), text_rows(301)
    found = table(rows, tmp_path, packing=packing, max_length=100)
    lengths = [len(tokenizer(row["text"])["input_ids"]) + 1 for row in rows]
    told = statistics(found)
    assert told["min"] == min(lengths) and told["max"] == max(lengths)
    assert told["mean"] == pytest.approx(np.mean(lengths)) and told["median"] == np.median(lengths)
    assert told["p95"] == pytest.approx(np.percentile(lengths, 95))
    assert told["documents"] == 301 and told["rows"] == len(found)
    assert told["efficiency"] == pytest.approx(sum(lengths) / (100 * len(found)))
    assert found.row_sizes[:].tolist() == [sum(len(ids) for ids, _ in found.documents(r)) for r in range(len(found))]
    assert found.row_targets[:].tolist() == [
        sum(int(m[1:].sum()) for _, m in found.documents(r)) for r in range(len(found))
    ]


def test_everything_that_was_left_out_is_said(tmp_path: Path) -> None:
    rows = [*text_rows(40), {"text": ""}, {"other": 1}, {"text": 3}, {"text": ""}]
    reading = reading_of("text", None, "skip")
    cases: Any = (("truncate", "were truncated ("), ("drop", "were dropped ("), ("split", "were split;"))
    said = "; 2 rows were left out: 1 other columns, 1 unusable values\n  rows, row 41: columns other; expected"
    for overflow, words in cases:
        found = table(rows, tmp_path, max_length=16, overflow=overflow, reading=reading)
        line = describe_data("training", found.facts, SFTConfig(max_seq_len=16, overflow=overflow))
        assert f"; {found.facts['long']} documents longer than 16 tokens {words}" in line
        assert (f"({found.facts['cut']} tokens lost; overflow split keeps them)" in line) == (overflow != "split")
        assert f"; 2 empty rows were dropped{said}" in line and "\n  rows, row 42: the text is 3" in line
    clean = table(text_rows(5), tmp_path, packing=True)
    assert ";" not in describe_data("training", clean.facts, SFTConfig(packing=True))


@pytest.mark.parametrize(("progress", "said"), [("auto", True), ("plain", True), ("json", False), ("quiet", False)])
def test_long_work_says_how_far_it_is(
    progress: str, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "PLAIN_LINE_EVERY", -1.0)
    with display.TokenizingProgress("the rows", progress) as told:
        told(512, 1000)
        told(488, 2000)
    out = capsys.readouterr().out
    assert ("tokenizing the rows: 1,000 rows, 3,000 tokens, " in out) == said and (said or not out)


def test_the_cache_is_named_by_content(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", text_rows(5))
    source, tokenizer, settings = file_source([path]), make_tokenizer(), TextSettings()
    key = table_key(source, tokenizer, settings)
    path.touch()
    tokenizer(["padded", "differently from now on"], padding=True, truncation=True, max_length=3)
    assert table_key(source, tokenizer, settings) == key
    for change in ({"max_length": 9}, {"packing": True}, {"add_special_tokens": True}, {"template": "x"}):
        assert table_key(source, tokenizer, replace(settings, **change)) != key  # type: ignore[arg-type]
    tokenizer.add_tokens(["new"])
    assert table_key(source, tokenizer, settings) != key
    write_rows(path, text_rows(6))
    assert table_key(source, make_tokenizer(), settings) != key


def one_bit_of_every_number(path: Path) -> None:
    content = np.fromfile(path, np.int32 if path.name == "tokens.bin" else np.uint8)
    (content ^ 1).tofile(path)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(content)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def removed(path: Path) -> None:
    path.unlink()


def all_documents(found: TokenTable) -> list[Any]:
    return [[(ids.tolist(), mask.tolist()) for ids, mask in found.documents(row)] for row in range(len(found))]


BLOCKS = 2000
"""Rows of data whose tokens are several blocks."""


def big_source(calls: list[int] | None = None) -> DataSource:
    """Rows whose tokens fill several blocks; `calls` gets the rank of each reader."""

    def rows(start: Any) -> Any:
        if calls is not None:
            calls.append(runtime.rank())
        return (RawRow(f"row {i}", {"text": f"a b c {i} " * 15}, i + 1) for i in range(BLOCKS))

    return DataSource("rows", rows, lambda: "fixed")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("damage", [one_bit_of_every_number, zeros, last_byte, truncated, removed])
@pytest.mark.parametrize("name", [*FILES, "manifest"])
def test_a_damaged_table_is_made_again(
    tmp_path: Path, name: str, damage: Callable[[Path], None], packing: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runtime.get_logger(), "propagate", True)
    monkeypatch.setattr(checked_array, "BLOCK", 64)
    settings = TextSettings(packing=packing, max_length=32)
    source, tokenizer = row_source(text_rows(50), "rows"), make_tokenizer()
    first = load_table(source, tokenizer, settings, str(tmp_path))
    documents, sizes, targets = all_documents(first), first.row_sizes[:].tolist(), first.row_targets[:].tolist()
    path = first.folder / ("manifest.json" if name == "manifest" else f"{name}.bin")
    before = path.read_bytes()
    damage(path)
    again = load_table(source, tokenizer, settings, str(tmp_path))
    assert all_documents(again) == documents
    assert (again.row_sizes[:].tolist(), again.row_targets[:].tolist()) == (sizes, targets)
    assert path.read_bytes() == before
    lines = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert len(lines) == (0 if path.read_bytes() == before and damage is zeros and not any(before) else 1)
    assert [p.name for p in (tmp_path / "tokens").iterdir()] == [first.folder.name]


def test_only_what_is_read_is_checked(tmp_path: Path) -> None:
    settings = TextSettings(max_length=None)
    whole = load_table(big_source(), make_tokenizer(), settings, str(tmp_path))
    assert len(whole.tokens) * 4 > 3 * checked_array.BLOCK
    first, last = (whole.documents(row)[0][0].tolist() for row in (0, BLOCKS - 1))
    last_byte(whole.folder / "tokens.bin")
    found = open_table(whole.folder)
    assert found is not None and found.documents(0)[0][0].tolist() == first
    with pytest.raises(DataError, match=r"are damaged: block \d+ of tokens.bin"):
        found.documents(BLOCKS - 1)
    mended = load_table(big_source(), make_tokenizer(), settings, str(tmp_path))
    assert mended.documents(BLOCKS - 1)[0][0].tolist() == last


def test_other_data_does_not_mend_a_table(tmp_path: Path) -> None:
    settings, changed = TextSettings(), [False]

    def rows(start: Any) -> Any:
        return (RawRow(f"row {i}", {"text": "a b" if changed[0] else "c d"}, i + 1) for i in range(3))

    found = load_table(DataSource("rows", rows, lambda: "fixed"), make_tokenizer(), settings, str(tmp_path))
    zeros(found.folder / "tokens.bin")
    changed[0] = True
    with pytest.raises(DataError, match="rows has changed since the run began, and its token cache was damaged"):
        found.documents(0)


def test_two_makers_at_once_leave_one_table(tmp_path: Path) -> None:
    source, tokenizer, settings = row_source(text_rows(5), "rows"), make_tokenizer(), TextSettings()
    folder = tmp_path / "table"
    make_table(source, tokenizer, settings, folder)
    make_table(source, tokenizer, settings, folder)
    assert open_table(folder) is not None and [p.name for p in tmp_path.iterdir()] == ["table"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"token cache .* cannot be written .*FULLSHARD_CACHE"):
        table(text_rows(1), tmp_path / "file")


@ranks(4)
def test_one_rank_tokenises_and_all_see_it(tmp_path: Path) -> None:
    runtime.use_spmd()
    calls = []

    def rows(start: Any) -> Any:
        calls.append(runtime.rank())
        return (RawRow(f"row {i}", row, i + 1) for i, row in enumerate(text_rows(9)))

    source = DataSource("rows", rows, lambda: "fixed")
    found = load_table(source, make_tokenizer(), TextSettings(), str(tmp_path))
    assert len(found) == 9 and calls == ([0] if runtime.rank() == 0 else [])


@ranks(4)
def test_one_rank_mends_what_all_share(tmp_path: Path) -> None:
    runtime.use_spmd()
    calls: list[int] = []
    settings, tokenizer = TextSettings(max_length=None), make_tokenizer()
    whole = load_table(big_source(), tokenizer, settings, str(tmp_path))
    mine = range(runtime.rank(), len(whole), runtime.world_size())
    expected = [whole.documents(row)[0][0].tolist() for row in mine]
    for name, damage in (("tokens", zeros), ("learnt", zeros), ("row_documents", one_bit_of_every_number)):
        for opened_before in (False, True):
            found = load_table(big_source(calls), tokenizer, settings, str(tmp_path)) if opened_before else None
            runtime.barrier()
            if runtime.rank() == 0:
                damage(whole.folder / f"{name}.bin")
            runtime.barrier()
            found = found or load_table(big_source(calls), tokenizer, settings, str(tmp_path))
            assert [found.documents(row)[0][0].tolist() for row in mine] == expected
            assert [found.documents(row)[0][1].all() for row in mine] == [True] * len(mine)
            makers = [rank for ranks in exchange(calls, "test") for rank in ranks]
            assert len(makers) == 1, (name, opened_before, makers)
            calls.clear()


@ranks(2)
def test_ranks_with_other_tokens_are_refused(tmp_path: Path) -> None:
    runtime.use_spmd()
    with pytest.raises(DataError, match="ranks 1 read other data than rank 0"):
        loader.check_same(exchange(runtime.rank(), "test"), big_source())


@ranks(2)
def test_all_ranks_raise_what_one_met(tmp_path: Path) -> None:
    runtime.use_spmd()
    with pytest.raises(DataError, match="rows, row 1: the text is 3"):
        table([{"text": "good"}, {"text": 3}], tmp_path)
