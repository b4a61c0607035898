"""`sequence_slices`: how it is given, when auto slices, and that losses do not depend on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.activations.levels import Level, has_slices, sliced_parts
from fullshard.activations.slices import ELEMENTS, FEWEST, SliceCount, is_sliced
from fullshard.config.errors import ConfigError
from fullshard.models.slice_check import layers_of
from fullshard.parallel.settings import EngineSettings
from fullshard.sft.checked_run import sharding_settings
from fullshard.sft.cli_args import parse
from fullshard.sft.sequence_slices import RATHER_THAN_COMPILED, slice_count
from fullshard.sft.sft_config import SFTConfig
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.test_qlora import FOUR_BITS
from tests.sft.tiny import make_model


def test_flags_and_values() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d"]
    assert parse(words).config.slices is None
    for text, meant in (("auto", None), ("AUTO", None), ("1", 1), ("16", 16)):
        assert parse([*words, "--sequence_slices", text]).config.slices == meant
        assert SFTConfig(sequence_slices=text).slices == meant
    assert SFTConfig(sequence_slices=8).slices == 8  # type: ignore[arg-type]
    for wrong in ("0", "-4", "many", "2.5", "true"):
        with pytest.raises(ConfigError, match="sequence_slices: expected auto, or a number of slices; 1 for none"):
            SFTConfig(sequence_slices=wrong)


def test_compiled_layers_are_not_sliced() -> None:
    with pytest.raises(ConfigError, match="sequence_slices is 4, and torch_compile is on: compiled layers run whole"):
        sharding_settings(SFTConfig(sequence_slices="4", torch_compile=True), None, [])
    assert sharding_settings(SFTConfig(sequence_slices="1", torch_compile=True), None, []).backend == "inductor"
    for split in ({"tp_size": 2}, {"ep_size": 2}):
        with pytest.raises(ConfigError, match="layers that are split over ranks exchange whole rows"):
            sharding_settings(SFTConfig(sequence_slices="4"), EngineSettings(**split), [])  # type: ignore[arg-type]


def test_auto_slices_long_rows_of_layers_that_are_recomputed() -> None:
    width = 4096
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=width)))
    least, instead = FEWEST * ELEMENTS // width, RATHER_THAN_COMPILED // width

    def count(tokens: int | None, compiles: bool = False, backend: str = "no", **changes: Any) -> SliceCount | None:
        config = SFTConfig(
            **{"max_length": tokens, "gradient_checkpointing": True, "per_device_train_batch_size": 1, **changes}
        )
        return slice_count(config, model, EngineSettings(backend=backend), compiles)

    assert count(least) == SliceCount() and count(least - 1) is None and count(None) is None
    assert count(least // 2, per_device_train_batch_size=2) == SliceCount()
    assert count(least, gradient_checkpointing=False) is None and count(least, sequence_slices="1") is None
    assert count(16, sequence_slices="4", gradient_checkpointing=False) == SliceCount(4)
    # Where the compiler is left open, it goes first up to a length at which attention takes most of the time.
    assert count(instead - 1, True) is None and count(instead, True) == SliceCount()
    assert count(instead, True, "inductor") is None
    config = SFTConfig(max_length=instead, gradient_checkpointing=True, per_device_train_batch_size=1)
    assert slice_count(config, model, EngineSettings(tp_size=2), False) is None


SHORT = {"max_steps": 4, "max_length": 32}
LORA = {"use_peft_lora": True, "lora_target_modules": "all-linear", "lora_dropout": 0.2, "fused_lora": True}
RUNS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": False},
    "lora, recomputed": {**LORA, "gradient_checkpointing": True, "neftune_noise_alpha": 5.0},
    "packed": {"packing": True, "gradient_checkpointing": True, "max_length": 64},
    "offload": {"gradient_checkpointing": True, "activation_offloading": True},
    "reentrant": {"gradient_checkpointing": True, "use_reentrant": True},
    "budget": {"gradient_checkpointing": "auto", "skip_plan": False},
    "4 bits": {**LORA, **FOUR_BITS},
    "peft's own layers": {**LORA, "lora_dropout": 0.0, "fused_lora": False},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "val_size": 0.2, "gradient_checkpointing": True},
}
GUARDED = ("lora, recomputed", "packed")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in GUARDED else pytest.mark.slow) for k in RUNS])
def test_losses_are_those_of_a_run_without_slices(kind: str, tmp_path: Path) -> None:
    batch = global_batch(1, 4)
    results = []
    for slices in ("1", "3"):
        config = settings(tmp_path / slices, sequence_slices=slices, **{**SHORT, **batch, **RUNS[kind]})
        trainer = train(make_model(), config)
        evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        results.append(losses(trainer) + evaluations)
        sliced = has_slices(trainer.model)
        assert sliced is (slices == "3")
        if sliced and kind != "budget":  # there, everything fits and is kept
            assert all(is_sliced(part) for layer in layers_of(trainer.model) for part in sliced_parts(layer))
    assert len(results[0]) > 3 and results[1] == pytest.approx(results[0], rel=1e-5)


@ranks(2)
def test_sharded_layers_are_gathered_once_for_all_slices(tmp_path: Path) -> None:
    gathers, found = [], []
    for slices in ("1", "3"):
        for kind in ("full", "lora, recomputed"):
            config = settings(
                tmp_path / slices / kind[:4], sequence_slices=slices, **{**SHORT, **global_batch(2, 4), **RUNS[kind]}
            )
            trainer = train(make_model(), config)
            found.append(losses(trainer))
            gathers.append(dict(trainer.model.meter.gathers))
    assert found[2] == pytest.approx(found[0], rel=1e-5) and found[3] == pytest.approx(found[1], rel=1e-5)
    assert gathers[2] == gathers[0] and gathers[3] == gathers[1]


def test_without_a_plan_all_layers_are_recomputed(tmp_path: Path) -> None:
    """The first steps of a budget are not measured then: a layer that keeps everything takes more."""
    config = settings(tmp_path, sequence_slices="3", gradient_checkpointing="auto", **SHORT)
    trainer = train(make_model(), config)
    assert trainer.loop.activations.chosen and set(trainer.loop.activations.levels) == {Level.RECOMPUTE}
