"""Documents of a million tokens: reading and packing them needs the memory of a few, whatever their number."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fullshard.data.encode import TextSettings
from fullshard.data.sources import file_source
from fullshard.data.token_table import make_table, open_table
from fullshard.sft.vocabulary import beyond_training
from tests.data.tiny import make_tokenizer

TOKENS, DOCUMENTS = 50_000, 40
OBJECTS = 40
"""Bytes of a token as a Python object in a list."""


def write(folder: Path, kind: str) -> Path:
    path = folder / f"long.{kind}"
    rows = np.random.default_rng(0).integers(3, 400, (DOCUMENTS, TOKENS))
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows))
        return path
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"input_ids": pa.array(list(rows))})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(
    "kind", ["parquet", pytest.param("arrow", marks=pytest.mark.slow), pytest.param("jsonl", marks=pytest.mark.slow)]
)
def test_tables_of_long_documents_take_the_memory_of_a_few(kind: str, tmp_path: Path) -> None:
    path, folder = write(tmp_path, kind), tmp_path / "table"
    settings = TextSettings(max_length=TOKENS // 4, packing=True, overflow="split")
    tokenizer = make_tokenizer()
    tracemalloc.start()
    try:
        make_table(file_source([path]), tokenizer, settings, folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * TOKENS * OBJECTS < DOCUMENTS * TOKENS * OBJECTS
    table = open_table(folder)
    assert table is not None and table.facts["long"] == DOCUMENTS  # they are counted
    assert sum(len(ids) for row in range(len(table)) for ids, _ in table.documents(row)) == DOCUMENTS * TOKENS


def test_rows_beyond_what_a_model_was_made_for_are_said() -> None:
    table: Any = SimpleNamespace(facts={"lengths": {"max": 9000}})
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

    def line(parameters: dict[str, Any], longest_of_tokenizer: int) -> str:
        text = SimpleNamespace(rope_parameters=parameters)
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
        return beyond_training(model, SimpleNamespace(model_max_length=longest_of_tokenizer), table)

    assert line({"rope_type": "default"}, 10**30) == ""
    assert "up to 9,000 tokens; the model was made for 4,096 positions before rope scaling (yarn)." in line(
        rope, 10**30
    )
    assert "8,192 tokens that the tokenizer names" in line({}, 8192)
