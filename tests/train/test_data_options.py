"""What the options about data come to in a run: several sets, weights, rows held back, bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullshard import runtime
from fullshard.errors import ConfigError, DataError
from fullshard.train.arguments import find
from fullshard.train.sft import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows, write_rows
from tests.pool import ranks
from tests.train.runs import settings
from tests.train.tiny import make_model


def documents(table: Any) -> list[str]:
    return sorted(str(ids.tolist()) for row in range(len(table)) for ids, _ in table.documents(row))


def trainer_of(place: Path, **changes: Any) -> SFTTrainer:
    config = settings(place, max_steps=1, eval_strategy="steps", dataset_name=f"{place}/a,{place}/b.csv", **changes)
    data = find(config)
    return SFTTrainer(make_model(), config, None, data.train, data.evaluation, tokenizer=make_tokenizer())


@ranks(2)
def test_sets_are_mixed_and_rows_held_back(tmp_path: Path) -> None:
    if runtime.rank() == 0:
        write_rows(tmp_path / "a" / "train.jsonl", text_rows(30))
        write_rows(tmp_path / "a" / "test.jsonl", text_rows(4, seed=9))
        (tmp_path / "b.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in text_rows(10, seed=5)))
        with (tmp_path / "a" / "train.jsonl").open("a") as file:
            file.write('{"text": 3}\n{"text": ""}\n')
    runtime.use_spmd()
    runtime.barrier()
    with pytest.raises(DataError, match=r"train\.jsonl, line 31: the text is 3.*on_bad_row skip"):
        trainer_of(tmp_path)
    parts = trainer_of(tmp_path, on_bad_row="skip").parts
    assert parts.train is not None and parts.evaluation is not None
    facts = parts.train.facts
    assert (facts["documents"], facts["bad"], facts["empty"]) == (40, 1, 1) and len(parts.evaluation) == 4
    assert "line 31: the text is 3" in facts["bad_rows"][0]
    everything = documents(parts.train)
    held = trainer_of(tmp_path, on_bad_row="skip", val_size=0.25).parts
    assert held.train is not None and held.evaluation is not None
    gone = (
        held.train.facts["bad"] + held.train.facts["empty"],
        held.evaluation.facts["bad"] + held.evaluation.facts["empty"],
    )
    assert (len(held.train) + gone[0], len(held.evaluation) + gone[1]) == (32, 10)  # a part of 42 rows, rounded
    assert sorted(documents(held.train) + documents(held.evaluation)) == everything
    mixed = trainer_of(tmp_path, on_bad_row="skip", dataset_weights="1,1").parts.train
    assert mixed is not None and len(mixed) == 30 + 31, "the smaller set comes again and again"


def test_evaluation_data_is_given_once(tmp_path: Path) -> None:
    config = settings(tmp_path, val_size=2)
    with pytest.raises(ConfigError, match="val_size is 2, and there is an eval_dataset; choose one"):
        SFTTrainer(make_model(), config, None, text_rows(9), text_rows(3), tokenizer=make_tokenizer())
    with pytest.raises(ConfigError, match=r"there is no eval_dataset; give one, or hold rows back with val_size"):
        SFTTrainer(
            make_model(), settings(tmp_path, eval_strategy="steps"), None, text_rows(9), tokenizer=make_tokenizer()
        )
