"""Several data sets as one, and rows held back: shares, order, places, and no row on both sides."""
# ruff: noqa: E501 - a table of cases

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.config.errors import ConfigError, DataError, UserError
from fullshard.data.row_formats import parse_row
from fullshard.data.sources import DataSource, chain, file_source, hold_back, mix, row_source
from fullshard.sft.run_data import find_run_data
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import text_rows, write_rows

QUICK = settings(deadline=None, max_examples=40, derandomize=True)


def sources(sizes: Sequence[int]) -> list[DataSource]:
    return [row_source([{"text": f"{s}:{i}"} for i in range(size)], f"set {s}") for s, size in enumerate(sizes)]


def texts(source: DataSource, start: Any = None) -> list[str]:
    return [parse_row(row).text or "" for row in source.rows(start)]


def of(text: str) -> int:
    return int(text.split(":")[0])


def check_places(source: DataSource, every: int = 1) -> None:
    """From any row on, the rest is the same, with the place written down as JSON in between."""
    rows = list(source.rows(None))
    for i in range(0, len(rows), every):
        place = json.loads(json.dumps(rows[i].after))
        assert [row.value for row in source.rows(place)] == [row.value for row in rows[i + 1 :]]


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@QUICK
@given(SIZES, st.data(), st.sampled_from(["all_exhausted", "first_exhausted"]))
def test_a_mix_keeps_its_shares(sizes: list[int], data: st.DataObject, stopping: str) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    found = texts(mix(sources(sizes), weights, stopping))
    shares = [weight / sum(weights) for weight in weights]
    taken: Counter[int] = Counter()
    for count, text in enumerate(found, 1):  # after every row, not only at the end
        taken[of(text)] += 1
        for s, share in enumerate(shares):
            assert -(len(sizes) - 1) - 1e-6 < taken[s] - share * count < 1 + 1e-6
    for s, size in enumerate(sizes):  # in order, over and over
        mine = [text for text in found if of(text) == s]
        assert mine == list(itertools.islice(itertools.cycle(f"{s}:{i}" for i in range(size)), len(mine)))
    rounds = [Counter(map(of, found))[s] / size for s, size in enumerate(sizes)]
    last = of(found[-1])
    if stopping == "all_exhausted":  # every row at least once, and not a row more than that takes
        assert min(rounds) >= 1 and rounds[last] == 1
    else:
        assert max(rounds) == 1 and rounds[last] == 1
    assert found == texts(mix(sources(sizes), weights, stopping))


@QUICK
@given(SIZES, st.data(), st.sampled_from(["all_exhausted", "first_exhausted"]))
def test_a_mix_goes_on_from_any_place(sizes: list[int], data: st.DataObject, stopping: str) -> None:
    weights = data.draw(st.lists(st.floats(0.5, 5), min_size=len(sizes), max_size=len(sizes)))
    check_places(mix(sources(sizes), weights, stopping))


def test_the_order_of_a_mix() -> None:
    assert [of(t) for t in texts(mix(sources([6, 3]), [2, 1]))] == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert [of(t) for t in texts(mix(sources([2, 2]), [1, 1]))] == [0, 1, 0, 1]


@settings(QUICK, max_examples=12)
@given(SIZES)
def test_equal_shares_are_those_of_datasets(sizes: list[int]) -> None:
    """`datasets` goes on to the end of a round; here a mix ends with the row that completes it."""
    tables = [datasets.Dataset.from_list([{"text": f"{s}:{i}"} for i in range(size)]) for s, size in enumerate(sizes)]
    for stopping in ("all_exhausted", "first_exhausted"):
        expected = datasets.interleave_datasets(tables, stopping_strategy=stopping)["text"]
        found = texts(mix(sources(sizes), [1.0] * len(sizes), stopping))
        assert found == list(expected)[: len(found)] and len(expected) - len(found) < len(sizes)


def test_one_after_the_other(tmp_path: Path) -> None:
    both = chain(sources([3, 2]))
    assert texts(both) == ["0:0", "0:1", "0:2", "1:0", "1:1"]
    check_places(both)
    paths = [write_rows(tmp_path / f"{i}.jsonl", text_rows(4, seed=i)) for i in range(3)]
    files = file_source(paths)
    rows = list(files.rows(None))
    assert len(rows) == 12
    assert [list(files.rows(json.loads(json.dumps(row.after)))) for row in rows] == [rows[i + 1 :] for i in range(12)]
    nested = mix([chain(sources([3, 2])), files], [1, 1])
    check_places(nested)
    assert len({chain([a, b]).fingerprint() for a, b in itertools.permutations(sources([3, 2, 1]), 2)}) == 6


def test_fingerprints_of_mixes() -> None:
    kinds = [([1, 2], "all_exhausted"), ([2, 1], "all_exhausted"), ([1, 2], "first_exhausted")]
    found = [mix(sources([3, 2]), weights, stopping).fingerprint() for weights, stopping in kinds]
    assert len(set(found)) == 3 and found[0] == mix(sources([3, 2]), [1, 2], "all_exhausted").fingerprint()


def test_a_set_without_rows_cannot_be_mixed() -> None:
    with pytest.raises(DataError, match="set 1: no rows;"):
        texts(mix(sources([3, 0]), [1, 1]))


# --- rows held back -------------------------------------------------------------------------------------------------


@QUICK
@given(st.integers(2, 60), st.data(), st.integers(0, 5))
def test_rows_held_back_are_gone_from_the_rest(size: int, data: st.DataObject, seed: int) -> None:
    count = data.draw(st.one_of(st.integers(1, size - 1), st.floats(0.01, 0.9)))
    (source,) = sources([size])
    kept, back = hold_back(source, count, seed)
    exact = count if count >= 1 else max(1, round(count * size))
    if exact >= size:
        with pytest.raises(DataError, match=f"holds out {exact} rows, but set 0 has only {size}"):
            texts(kept)
        return
    assert len(texts(back)) == exact
    assert sorted(texts(kept) + texts(back)) == sorted(texts(source))
    order = {text: i for i, text in enumerate(texts(source))}
    assert texts(kept) == sorted(texts(kept), key=order.__getitem__)
    again = hold_back(sources([size])[0], count, seed)
    assert (texts(kept), texts(back)) == (texts(again[0]), texts(again[1]))
    check_places(kept, 7)
    check_places(back, 7)


def test_which_rows_follows_from_the_seed() -> None:
    found = [tuple(texts(hold_back(sources([50])[0], 10, seed)[1])) for seed in range(5)]
    assert len(set(found)) == 5
    prints = {part.fingerprint() for seed in range(3) for part in hold_back(sources([50])[0], 10, seed)}
    assert len(prints) == 6


@QUICK
@given(st.lists(st.integers(3, 12), min_size=2, max_size=3), st.integers(1, 4), st.booleans())
def test_rows_held_back_from_a_mix_never_come_again(sizes: list[int], count: int, streaming: bool) -> None:
    weights = [1.0 + s for s in range(len(sizes))]
    kept, back = hold_back(mix(sources(sizes), weights), count, 0, streaming)
    left = Counter(map(of, texts(back)))
    if any(left[s] >= size for s, size in enumerate(sizes)):  # a set would have nothing left
        with pytest.raises(DataError, match=r"no rows;|all rows of"):
            texts(kept)
        return
    trained, held = texts(kept), texts(back)
    assert len(held) == len(set(held)) == count and not set(held) & set(trained)
    assert set(held) | set(trained) == {f"{s}:{i}" for s, size in enumerate(sizes) for i in range(size)}
    check_places(kept, 5)
    check_places(back)


def test_a_stream_holds_back_its_first_rows() -> None:
    kept, back = hold_back(sources([9])[0], 3, seed=5, streaming=True)
    assert texts(back) == ["0:0", "0:1", "0:2"] and texts(kept) == [f"0:{i}" for i in range(3, 9)]
    check_places(kept)
    check_places(back)
    with pytest.raises(DataError, match="holds out 9 rows, which are all rows of set 0"):
        texts(hold_back(sources([9])[0], 9, 0, streaming=True)[0])
    with pytest.raises(ConfigError, match=r"val_size is 0.5: the length of a stream is not known in advance"):
        hold_back(sources([9])[0], 0.5, 0, streaming=True)


# --- by options -----------------------------------------------------------------------------------------------------


def config(**values: Any) -> SFTConfig:
    return SFTConfig(**{"model_name_or_path": "x", "eval_strategy": "steps", **values})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for s, size in enumerate((6, 3)):
        for split in ("train", "test"):
            rows = [{"text": f"{s}:{split} {i}"} for i in range(size if split == "train" else 1)]
            write_rows(tmp_path / str(s) / f"{split}.jsonl", rows)
    write_rows(tmp_path / "one.jsonl", text_rows(4))
    return tmp_path


def test_several_sets_by_options(place: Path) -> None:
    names = f"{place}/0, {place}/1"
    train, evaluation = find_run_data(config(dataset_name=names))
    assert evaluation is not None and texts(evaluation) == ["0:test 0", "1:test 0"]
    assert [of(t) for t in texts(train)] == [0] * 6 + [1] * 3
    train, evaluation = find_run_data(config(dataset_name=names, dataset_weights="1,1"))
    assert [of(t) for t in texts(train)] == ([0, 1] * 6)[:11] and evaluation is not None and len(texts(evaluation)) == 2
    train, _ = find_run_data(config(dataset_name=names, dataset_weights="1,1", stopping_strategy="first_exhausted"))
    assert [of(t) for t in texts(train)] == [0, 1, 0, 1, 0, 1]
    train, evaluation = find_run_data(config(dataset_name=names, val_size=2))
    assert evaluation is None and len(texts(train)) == 9  # the trainer holds rows back
    train, evaluation = find_run_data(config(dataset_name=f"{place}/0,{place}/one.jsonl"))
    assert evaluation is not None and texts(evaluation) == ["0:test 0"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dataset_weights": "1"}, r"dataset_weights has 1 numbers, dataset_name 2 data sets"),
        ({"dataset_weights": "1,0"}, "dataset_weights is '1,0'; expected numbers above 0"),
        ({"dataset_weights": "1,nan"}, "expected numbers above 0"),
        ({"dataset_weights": "a,b"}, "expected numbers above 0"),
        ({"dataset_name": "{}/one.jsonl"}, "evaluation is on .eval_strategy steps., but .*one.jsonl has no split 'test'; .*val_size"),
        ({"dataset_name": "{}/0", "splits": "train"}, "is asked for the split 'train' alone; name one in splits, or hold out rows"),
        ({"dataset_name": " , "}, "dataset_name is empty"),
        ({"val_size": 2.5}, "val_size is 2.5; expected a number of rows, or a fraction below 1"),
        ({"val_size": 0.5, "streaming": True}, "val_size is 0.5: a fraction of a stream is unknown"),
        ({"val_size": -1}, "val_size is -1.0; expected 0 or more"),
        ({"dataset_columns": "x"}, "dataset_columns has 'x'"),
        ({"dataset_columns": "text=body"}, r"0/train.jsonl, line 1: dataset_columns is text=body, but the columns are text"),
        ({"dataset_text_field": "body"}, r"0/train.jsonl, line 1: columns text; expected .*`body`"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(place: Path, values: dict[str, Any], said: str) -> None:
    given = {"dataset_name": f"{place}/0,{place}/1", "max_steps": 1, **values}
    given["dataset_name"] = given["dataset_name"].format(place)
    with pytest.raises(UserError, match=said):
        find_run_data(config(**given), check_rows=True)


def test_bad_rows_do_not_stop_a_run_that_skips_them(place: Path) -> None:
    (place / "one.jsonl").write_text("{\n" + json.dumps({"text": "good"}) + "\n")
    values = {"dataset_name": f"{place}/one.jsonl", "eval_strategy": "no"}
    with pytest.raises(DataError, match=r"one.jsonl, line 1: not JSON"):
        find_run_data(config(**values), check_rows=True)
    train, _ = find_run_data(config(**values, on_bad_row="skip"), check_rows=True)
    assert len(list(train.rows(None))) == 2
