"""Rows become the tokens and labels that TRL's `SFTTrainer` makes of them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from fullshard.data.chat_template import BUILT_IN
from fullshard.data.encode import TextSettings, encode_rows
from fullshard.data.prepared_rows import prepared_rows
from fullshard.data.sources import row_source
from fullshard.sft.batches import make_table
from fullshard.sft.run_data import script_source
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.vocabulary import prepared_tokenizer
from tests.data import trl_tokens
from tests.data.trl_tokens import CASES, Case

RECORDED = json.loads(trl_tokens.FILE.read_text())


def our_tokens(case: Case, folder: Path) -> list[list[list[int]]]:
    """[tokens, labels] of each row, and the lengths of its documents if it is packed."""
    config = SFTConfig(**{"max_length": None, "cache_dir": str(folder), **case.settings})
    tokenizer = trl_tokens.tokenizer(case)
    prepared_tokenizer(config, tokenizer)
    rows = Dataset.from_list(case.rows) if config.shuffle_dataset else case.rows
    found = prepared_rows(make_table(config, script_source(rows, "rows", config), tokenizer))
    return [[row[name] for name in found.column_names] for row in found]


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_labels_are_trl_s(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours, theirs = our_tokens(case, tmp_path), RECORDED[name]
    if "packed" in name:  # the order of rows, and of documents in them, is not TRL's
        assert sorted(map(documents, ours)) == sorted(map(documents, theirs))
        return
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    if not (case.settings.get("assistant_only_loss") and case.theirs):
        assert ours == theirs
        return
    # TRL's templates of these families also learn the line break around a turn, which no model ever has to write: it
    # stops at the end-of-turn mark before.
    tokenizer = trl_tokens.tokenizer(case)
    for (ids, mine), (_, labels) in zip(ours, theirs, strict=True):
        assert sum(label != -100 for label in mine) > 1
        for token, a, b in zip(ids, mine, labels, strict=True):
            assert a == b or (a == -100 and tokenizer.decode([token]) in ("\n", "</s>")), (token, a, b)
        marks = [i for i, token in enumerate(ids) if i and mine[i - 1] != -100 and mine[i] == -100]
        assert all(tokenizer.decode([ids[i - 1]]).startswith("<") for i in marks), "the mark that ends a turn is learnt"


def documents(row: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """The (tokens, labels) of each document in a row, in any order."""
    ids, labels, *lengths = row
    ends = np.cumsum(lengths[0] if lengths else [len(ids)]).tolist()
    return sorted((ids[a:b], labels[a:b]) for a, b in pairwise([0, *ends]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_recorded_is_trl_s(name: str) -> None:
    assert trl_tokens.trl_tokens(CASES[name]) == RECORDED[name]


def test_the_end_of_text_is_written_once(tmp_path: Any) -> None:
    tokenizer = trl_tokens.tokenizer(CASES["text"])
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id

    def encoded(row: dict[str, Any], **changes: Any) -> list[int]:
        settings = TextSettings(template=BUILT_IN["zephyr"].text, **changes)
        ((ids, *_),) = encode_rows(list(row_source([row], "rows").rows(None)), tokenizer, settings, Counter())
        return ids.tolist()

    chat = {"messages": trl_tokens.SHORT}
    for row in ({"text": "bread"}, {"text": "bread</s>"}, {"prompt": "salt", "completion": "bread"}):
        assert encoded(row)[-1] == end != encoded(row)[-2]
        assert encoded(row, append_concat_token=True) == encoded(row)
    assert end not in encoded({"text": "bread"}, append_concat_token=False)
    assert encoded({"text": "bread</s>"}, append_concat_token=False)[-1] == end, "what is written is not taken away"
    assert encoded({"input_ids": [5, 6]}, append_concat_token=True) == [5, 6], "tokens made elsewhere stay as they are"
    assert encoded(chat)[-1] != end == encoded(chat, append_concat_token=True)[-1]
    assert encoded({"text": "bread"})[0] == start not in encoded({"text": "bread"}, add_special_tokens=False)
    assert start not in encoded(chat)
