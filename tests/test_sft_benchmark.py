"""The model, adapters and rows that `benchmarks/sft_gpu.py` gives to all contestants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import sft_files
from benchmarks.sft_rank import documents


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "tiny"
    sft_files.write(folder, sft_files.SHAPES["tiny"])
    return folder


@pytest.mark.parametrize("shape", sft_files.SHAPES)
def test_weights_are_those_of_the_model(shape: str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sft_files.config(sft_files.SHAPES[shape])))
    assert sft_files.weights(sft_files.SHAPES[shape]) == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_files_are_read_by_transformers_and_peft(tiny: Path) -> None:
    model, about = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not any(about[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16 and AutoTokenizer.from_pretrained(tiny).pad_token_id == 0
    adapted = PeftModel.from_pretrained(model, tiny / "adapter-0.0", is_trainable=True)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * sft_files.SHAPES["tiny"]["num_hidden_layers"]
    assert all(p.abs().sum() > 0 for p in trained.values()), "both matrices have values of the file"


def test_packed_documents_fill_the_rows_of_unpacked_ones() -> None:
    job = {"rows": 4, "steps": 3, "length": 64, "vocabulary": 1024, "packed": False}
    rows, parts = documents(job), documents({**job, "packed": True})
    assert [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)] == rows
    assert len(rows) == 12 and {len(row) for row in rows} == {64}
    assert all(3 <= token < 1024 for row in rows for token in row)
