"""Rows as a trainer shows and trains them: packed, truncated, padded and ordered as the settings ask."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from fullshard.config.errors import ConfigError, DataError
from fullshard.data.encode import TextSettings
from fullshard.data.find_dataset import source_of
from fullshard.data.loader import Collator, load_table
from fullshard.data.prepared_rows import PreparedRows, prepared_rows
from fullshard.data.row_formats import Reading
from fullshard.data.sources import row_source
from fullshard.data.token_table import table_key
from fullshard.data.tokenize import encode_chunk
from fullshard.sft.batches import describe_data, make_collator, make_stream, make_table, text_settings
from fullshard.sft.run_data import script_source, stream_if_iterable
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_model

TOKENS = [
    {"input_ids": [1, 2, 3, 4, 5], "assistant_masks": [0, 0, 0, 1, 1]},
    {"input_ids": [6, 7, 8], "assistant_masks": [1, 1, 1]},
    {"input_ids": [9, 10, 11, 12], "labels": [-100, 10, -100, 12]},
]


def rows_of(rows: list[dict[str, Any]], folder: Path, **given: Any) -> PreparedRows:
    return PreparedRows(load_table(row_source(rows, "rows"), make_tokenizer(), TextSettings(**given), str(folder)))


def test_rows_are_read_like_a_dataset_s(tmp_path: Path) -> None:
    found = rows_of(TOKENS, tmp_path)
    expected = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, 4, 5]},
        {"input_ids": [6, 7, 8], "labels": [6, 7, 8]},
        {"input_ids": [9, 10, 11, 12], "labels": [-100, 10, -100, 12]},
    ]
    assert list(found) == found.to_list() == expected and len(found) == found.num_rows == 3
    assert found[0] == found[-3] == found[np.int64(0)] == expected[0] and found.select([2, 0]) == [
        expected[2],
        expected[0],
    ]
    assert found["labels"] == [row["labels"] for row in expected]
    assert found[1:] == found[[1, 2]] == {name: [row[name] for row in expected[1:]] for name in ("input_ids", "labels")}
    assert found[:] == found.to_dict() and found.column_names == ["input_ids", "labels"]
    assert "seq_lengths" not in found and expected[1] in found
    for wrong, error in ((3, IndexError), (-4, IndexError), ("seq_lengths", KeyError)):
        with pytest.raises(error):
            found[wrong]


def test_documents_that_nothing_is_learnt_from_are_dropped(tmp_path: Path) -> None:
    """As by TRL: row 0's trained tokens are beyond the maximum."""
    found = rows_of(TOKENS, tmp_path, max_length=3)
    assert found["labels"] == [[6, 7, 8], [-100, 10, -100]] and found.table.facts["masked"] == 1
    assert "; 1 documents without trained tokens were dropped" in describe_data(
        "training", found.table.facts, SFTConfig()
    )
    ends = rows_of(TOKENS, tmp_path, max_length=3, truncation_mode="keep_end")
    assert ends["input_ids"] == [[3, 4, 5], [6, 7, 8], [10, 11, 12]] and not ends.table.facts["masked"]
    assert rows_of(TOKENS, tmp_path, max_length=None)["input_ids"] == [row["input_ids"] for row in TOKENS]


def test_wrapped_rows_are_all_tokens_cut_anywhere(tmp_path: Path) -> None:
    rows = text_rows(30)
    whole, cut = rows_of(rows, tmp_path), rows_of(rows, tmp_path, max_length=16, packing=True, wrapped=True)
    for name in ("input_ids", "labels"):
        flat = list(chain.from_iterable(whole[name]))
        assert cut[name] == [flat[i : i + 16] for i in range(0, len(flat), 16)]
    assert cut.column_names == ["input_ids", "labels"] and not cut.table.facts["long"]
    masked = rows_of([{"prompt": "one", "completion": " bird"}] * 9, tmp_path, max_length=4, packing=True, wrapped=True)
    assert masked.table.row_targets[:].tolist() == [sum(n != -100 for n in labels[1:]) for labels in masked["labels"]]


PACKED = [
    {"input_ids": [5, 6, 7, 8], "labels": [5, 6, -100, 8], "seq_lengths": [3, 1]},
    {"input_ids": [9, 10, 11], "labels": [-100, -100, 11], "position_ids": [0, 0, 1]},
    {"input_ids": [12, 13], "labels": [-100, 13]},
]


def test_rows_that_are_packed_already(tmp_path: Path) -> None:
    """Their documents stay apart: each in a row of its own, packed again, or in the row that they came in."""
    alone = rows_of(PACKED, tmp_path)
    assert alone["input_ids"] == [[5, 6, 7], [8], [10, 11], [12, 13]], (
        "a first token alone is never trained: [9] is dropped"
    )
    assert "2 packed rows were split into their documents" in describe_data("training", alone.table.facts, SFTConfig())
    again = rows_of(PACKED, tmp_path, packing=True, max_length=5)
    assert again["seq_lengths"] == [[3, 2], [2, 1]] and again["input_ids"] == [[5, 6, 7, 10, 11], [12, 13, 8]]
    config = SFTConfig(skip_prepare_dataset=True, packing=True, max_seq_len=2)
    kept = text_settings(config, make_tokenizer())
    found = PreparedRows(load_table(row_source(PACKED, "rows"), make_tokenizer(), kept, str(tmp_path)))
    assert found["seq_lengths"] == [[3, 1], [1, 2], [2]] and found["labels"] == [row["labels"] for row in PACKED]
    batch = Collator(0, isolate=True)(found.table, [0])
    assert batch["position_ids"][0, :4].tolist() == [0, 1, 2, 0]
    assert batch["labels"][0, :4].tolist() == [-100, 6, -100, -100]


def test_rows_that_are_used_as_they_are(tmp_path: Path) -> None:
    prepared = {"reading": Reading(prepared=True)}
    assert rows_of(PACKED[2:], tmp_path, **prepared)["labels"] == [[-100, 13]]
    with pytest.raises(DataError, match=r"`assistant_masks` but no labels.*Add a 'labels' column"):
        rows_of(TOKENS, tmp_path, **prepared)
    with pytest.raises(
        DataError, match=r"skip_prepare_dataset is on, but the row has no `input_ids`; its columns are text"
    ):
        rows_of([{"text": "bread"}], tmp_path, **prepared)


@ranks(1)
def test_rows_of_a_batch_without_padding(tmp_path: Path) -> None:
    """The losses are those of padded rows, and of rows padded further."""
    found = []
    for number, changes in enumerate(({}, {"padding_free": True}, {"pad_to_multiple_of": 50}, {"dataset_num_proc": 2})):
        config = settings(tmp_path / str(number), max_steps=3, per_device_train_batch_size=4, **changes)
        trainer = train(make_model(), config, text_rows(20))
        collator = trainer.loop.loader.collator
        batch = collator(trainer.parts.train, [0, 1])
        lengths = trainer.parts.train.row_sizes[:2].tolist()
        shape = {"padding_free": (1, sum(lengths)), "pad_to_multiple_of": (2, 50)}
        assert tuple(batch["input_ids"].shape) == shape.get(next(iter(changes), ""), (2, -(-max(lengths) // 8) * 8))
        found.append(losses(trainer))
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)


@ranks(1)
def test_evaluation_packed_or_not(tmp_path: Path) -> None:
    """The loss is the same; TRL's `eval_packing` decides which rows there are."""
    found = {}
    for packs in (False, True, None):
        config = settings(tmp_path / str(packs), max_steps=1, packing=True, eval_packing=packs, eval_strategy="epoch")
        trainer = train(make_model(), config, text_rows(20), eval_dataset=text_rows(9, seed=4))
        assert trainer.parts.evaluation is not None
        rows = prepared_rows(trainer.parts.evaluation)
        found[packs] = len(rows), trainer.evaluate()["eval_loss"]  # type: ignore[arg-type]
        assert ("seq_lengths" in rows.column_names) == (packs is not False)
    assert found[False][0] == 9 > found[True][0] == found[None][0]
    assert found[False][1] == pytest.approx(found[True][1], abs=1e-6)
    only = SFTConfig(eval_packing=True, max_seq_len=48)
    assert only.keeps_apart and not text_settings(only, make_tokenizer()).packing
    assert make_collator(only, 2, flash=False, marks_padding=False).isolate


def test_settings_that_contradict_each_other() -> None:
    for given, said in (
        ({"max_length": None, "packing": True}, "packing needs max_length, which is none"),
        ({"max_length": None, "rope_scaling": "yarn"}, "rope_scaling is yarn, but max_length is none"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0; expected 1 or more"),
        ({"dataset_kwargs": {"other": 1}}, "dataset_kwargs has 'other'; expected skip_prepare_dataset"),
        (
            {"streaming": True, "max_steps": 1, "shuffle_dataset": True, "dataset_name": "x"},
            "shuffle_dataset reads all rows first",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            SFTConfig(**given)
    config = SFTConfig(dataset_kwargs={"skip_prepare_dataset": True, "add_special_tokens": False}, max_length=None)
    assert (config.skip_prepare_dataset, config.add_special_tokens, config.max_seq_len) == (True, False, None)
    assert [SFTConfig(pad_to_multiple_of=n).pad_to_multiple_of for n in ("auto", None, 16, "16")] == [
        None,
        None,
        16,
        16,
    ]


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_the_tokens_that_end_and_fill_rows(name: str) -> None:
    from fullshard.sft.vocabulary import prepared_tokenizer

    tokenizer = make_tokenizer()
    prepared_tokenizer(SFTConfig(**{name: "<s>"}), tokenizer)
    assert getattr(tokenizer, name) == "<s>"
    with pytest.raises(ConfigError, match=f"{name} is '<none>', which is not in the tokenizer's vocabulary"):
        prepared_tokenizer(SFTConfig(**{name: "<none>"}), tokenizer)


def test_a_tokenizer_that_ends_texts_itself() -> None:
    """Its EOS token is there once, and contributes to the loss of a completion."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    rows = [{"prompt": "one", "completion": " bird"}, {"text": "bread"}]
    found = encode_chunk(list(row_source(rows, "rows").rows(None)), tokenizer, TextSettings())
    starts = np.cumsum([0, *found.lengths[:-1]])
    for start, size in zip(starts, found.lengths, strict=True):
        ids, mask = found.tokens[start : start + size].tolist(), found.loss_mask[start : start + size].tolist()
        assert (ids[0], ids[-1], ids.count(1)) == (0, 1, 1) and mask[-1] == 1


# --- data sets of `datasets` ----------------------------------------------------------------------------------------


def test_data_sets_in_another_format(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(
        [{"input_ids": list(range(1, 3000)), "labels": list(range(1, 3000)), "id": i} for i in range(2)]
    )
    plain = source_of(rows, "rows")
    for kind in ("torch", "numpy"):
        assert source_of(rows.with_format(kind), "rows").fingerprint() == plain.fingerprint()
    arrays = [{"input_ids": np.arange(1, 3000)}, {"input_ids": np.arange(1, 3000)}]
    other = [arrays[0], {"input_ids": np.where(np.arange(2999) == 1500, 7, np.arange(1, 3000))}]
    keys = [table_key(row_source(each, "x"), make_tokenizer(), TextSettings()) for each in (arrays, other)]
    assert keys[0] != keys[1], "the middle of a long array counts"
    with pytest.raises(DataError, match=r"Dataset\.with_transform\(\).*skip_prepare_dataset.*trainer-ready"):
        source_of(rows.with_transform(lambda batch: batch), "train_dataset")
    assert (
        len(list(source_of(rows.with_transform(lambda batch: batch), "train_dataset", prepared=True).rows(None))) == 2
    )


def test_an_iterable_data_set_is_streamed_in_its_order(tmp_path: Path) -> None:
    import datasets

    given = datasets.Dataset.from_list(text_rows(5))
    config, notes = SFTConfig(max_steps=2, cache_dir=str(tmp_path)), list[str]()
    assert stream_if_iterable(config, given, notes) is config and not notes
    found = stream_if_iterable(config, given.to_iterable_dataset(), notes)
    assert found.streaming and found.train_sampling_strategy == "sequential" and len(notes) == 1
    with pytest.raises(ConfigError, match="streaming needs max_steps"):
        stream_if_iterable(SFTConfig(), given.to_iterable_dataset(), notes)
    for formatting in (None, lambda row: f"{row['text']} and salt"):
        sources = [script_source(data, "rows", config, formatting) for data in (given, given.to_iterable_dataset())]
        rows = prepared_rows(make_stream(config, sources[1], make_tokenizer()))
        assert list(rows) == list(
            prepared_rows(make_table(config, sources[0], make_tokenizer()))
        ) and rows.column_names == ["input_ids", "labels"]
    with pytest.raises(ConfigError, match="formatting_func: the rows are tokenized already"):
        script_source(TOKENS, "rows", config, str)


def test_rows_are_shuffled_once(tmp_path: Path) -> None:
    config, rows = SFTConfig(shuffle_dataset=True, seed=3), text_rows(40)
    order = [row.value["text"] for row in script_source(rows, "rows", config).rows(None)]
    texts = [row["text"] for row in rows]
    assert order != texts and sorted(order) == sorted(texts)
    assert [row.value["text"] for row in script_source(rows, "rows", config).rows(7)] == order[7:], "from any position"
    other = SFTConfig(shuffle_dataset=True, seed=4)
    assert script_source(rows, "rows", config).fingerprint() != script_source(rows, "rows", other).fingerprint()
    import datasets

    given = datasets.Dataset.from_list(rows)
    found = [row.value for row in script_source(given, "rows", config).rows(None)]
    assert found == list(given.shuffle(seed=3)), "as `datasets` and TRL do it"


def test_the_view_is_what_is_trained(tmp_path: Path) -> None:
    """A batch's labels are the view's, without the first token of each document."""
    found = rows_of(text_rows(9), tmp_path, packing=True, max_length=48)
    batch = Collator(2, isolate=True)(found.table, range(len(found)))
    for i, row in enumerate(found):
        size = len(row["input_ids"])
        starts = np.cumsum([0, *row["seq_lengths"][:-1]])
        labels = torch.tensor(row["labels"])
        labels[starts] = -100
        assert (
            batch["input_ids"][i, :size].tolist() == row["input_ids"]
            and batch["labels"][i, :size].tolist() == labels.tolist()
        )
