"""Models as they are shipped in plans: their bytes from config.json alone, in memory, traffic, time and pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fullshard.parallel.settings import EngineSettings
from fullshard.planner.planned_model import planned_model
from fullshard.planner.step_time import packed_weights, unpacked_bytes
from fullshard.report.plan_view import view_plan
from fullshard.report.plan_words import legend_words
from fullshard.spmd.mesh import Mesh
from fullshard.weights.load import load_pretrained
from tests.pool import ranks
from tests.quant.shipped_models import MXFP4, compressed, fp8, gpt_oss, llama, qwen_moe, write
from tests.sft.runs import settings

LORA = {"use_peft_lora": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
MODELS = {"mxfp4": (gpt_oss, MXFP4, 4.25), "fp8": (qwen_moe, fp8(), 8.125), "int4": (llama, INT4, 4.5)}
"""The bits of a weight: its codes and its share of a scale."""


def config_alone(folder: Path, family: Any, quantization: Any) -> Path:
    folder.mkdir()
    config = {**family().config.to_dict(), "quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_bytes_from_config_alone(tmp_path: Path, kind: str) -> None:
    family, quantization, bits = MODELS[kind]
    place = config_alone(tmp_path / "model", family, quantization)
    plans = [
        planned_model(settings(tmp_path, **LORA), EngineSettings(), place, 2, 1, condensed=condensed).plan
        for condensed in (True, False)
    ]
    assert plans[0] == plans[1]
    parts = [p for unit in plans[0].units for p in unit.parameters if p.form]
    weights = sum(p.weights for p in parts)
    assert sum(math.prod(p.whole) for p in parts) == pytest.approx(weights * bits / 8, rel=0.01)
    assert unpacked_bytes(plans[0].units) == 2 * weights + sum(math.prod(p.whole) for p in parts)
    assert packed_weights(plans[0].units) == (0, 0), "they are counted twice"

    view = view_plan(plans[0])
    noted = {note for unit in view.units for row in unit.parameters for note in row.notes if note.startswith(kind)}
    name = parts[0].form
    expected = {"scales"} if kind == "int4" else {"gate_up_proj_scales", "down_proj_scales"}
    assert noted == {f"{name} with {part}" for part in expected | ({"scales"} if kind == "fp8" else set())}
    assert any("as the model's files store it" in line for line in legend_words(view))
    assert not any("one scale per row" in line for line in legend_words(view))


@ranks(1)
@pytest.mark.parametrize("kind", MODELS)
def test_the_plan_is_that_of_the_loaded_model(tmp_path: Path, kind: str) -> None:
    """Scales that the files store in another dtype than the configuration promises are a few bytes."""
    family, quantization, _ = MODELS[kind]
    write(family(), quantization, tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model", Mesh([0], (1,), ("fsdp",)), dtype="bfloat16", progress=False)
    place = config_alone(tmp_path / "alone", family, quantization)
    planned = planned_model(settings(tmp_path, **LORA), EngineSettings(), place, 1, 1).plan
    parts = [
        {p.name.replace("base_layer.", "").removeprefix("base_model.model."): (p.shape, p.form, p.weights)
         for unit in plan.units for p in unit.parameters if p.form}
        for plan in (loaded.plan, planned)
    ]  # fmt: skip
    assert parts[0] == parts[1] and parts[0]
