"""A run plans first: `plan.json`, the stop of a run that cannot fit, and no effect on what is trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import CapacityError, ConfigError
from fullshard.distributed.ranks import on_rank_0
from fullshard.planner import estimate as estimates
from fullshard.planner import plan_first
from fullshard.planner.estimate import Estimate, Estimator
from fullshard.planner.machines import MACHINES, Machine
from fullshard.planner.request import PlanRequest
from fullshard.planner.verdict import ERROR_BOUND, Change
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings
from tests.sft.tiny import make_folder, make_trained

LORA = {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.3, "lora_target_modules": "all-linear"}


def trainer_of(place: Path, model: Any = None, **changes: Any) -> SFTTrainer:
    if model is None:
        on_rank_0(lambda: (place / "model").exists() or make_folder(place), "folder")
    config = settings(place, **{"max_steps": 2, "skip_plan": False, **changes})
    return SFTTrainer(model or str(place / "model"), config, train_dataset=text_rows(60), tokenizer=make_tokenizer())


def with_change(estimate: Estimate, change: Change) -> Estimate:
    verdict = dataclasses.replace(estimate.verdict, changes=(change,))
    return dataclasses.replace(estimate, verdict=verdict)


def small_gpu(bytes_: int) -> Machine:
    return dataclasses.replace(MACHINES["h100-80gb"], device_memory=bytes_, gpus_per_node=1)


@ranks(1, 2, slow=(2,))
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(LORA, id="lora"),
        pytest.param({"packing": True, "gradient_checkpointing": True}, id="packed", marks=pytest.mark.slow),
    ],
)
def test_a_run_records_what_fullshard_plan_would_say(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    if trainer.estimate is None:  # another rank than the first
        return
    run, data = trainer._run, trainer.parts.train
    machine = trainer.estimate.machine
    lengths = list(data.row_sizes)  # type: ignore[union-attr]
    request = PlanRequest(run.config, trainer.parts.engine, str(tmp_path / "model"), None, machine, lengths)
    planned = Estimator()(request)
    assert planned.memory == trainer.estimate.memory and planned.traffic == trainer.estimate.traffic
    assert (planned.time, planned.levels, planned.batch) == (
        trainer.estimate.time, trainer.estimate.levels, trainer.estimate.batch
    )  # fmt: skip
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written == json.loads(json.dumps(trainer.estimate.to_json(), default=str))
    assert written["machine"]["num_processes"] == machine.num_processes and written["memory"]["timeline"]


@pytest.mark.slow
@ranks(1)
@pytest.mark.parametrize("kind", ["full", "lora", "settings"])
def test_a_model_in_memory_is_planned_too(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(tmp_path, make_trained(kind), **(LORA if kind == "settings" else {}))
    trainer.train()
    assert trainer.estimate is not None and trainer.estimate.verdict.certain
    assert trainer.estimate.plan == trainer.loop.model.plan


@ranks(1)
def test_planning_changes_nothing_about_the_run(tmp_path: Path) -> None:
    """Random numbers, dropout included, are those of a run without."""
    found = []
    for skip in (True, False):
        trainer = trainer_of(tmp_path / str(skip), skip_plan=skip, max_steps=4, **LORA)
        trainer.train()
        found.append(losses(trainer))
        assert (tmp_path / str(skip) / "out" / "plan.json").exists() is not skip
    assert found[0] == found[1]


@ranks(1)
def test_a_run_that_cannot_fit_stops_with_advice(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_first, "machine_of_run", lambda: small_gpu(2**20))
        help_ = Change("gradient_checkpointing true", {"gradient_checkpointing": True}, 2**19)
        patch.setattr(plan_first, "with_advice", lambda estimate, *_: with_change(estimate, help_))
        trainer = trainer_of(tmp_path, per_device_train_batch_size=8, max_length=48)
        with pytest.raises(ConfigError) as stopped:
            trainer.train()
        text = str(stopped.value)
        assert "Does not fit: each device needs" in text and "--skip_plan starts the run anyway" in text
        assert "Smallest change that fits: gradient_checkpointing true (512.0 KiB per device)." in text
        assert not (tmp_path / "out" / "plan.json").exists() and not (tmp_path / "out" / "settings.json").exists()
        trainer_of(tmp_path, skip_plan=True).train()


@pytest.mark.slow
@ranks(1)
def test_a_run_within_the_error_of_the_estimate_starts(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_first, "machine_of_run", lambda: small_gpu(2**34))
        large = trainer_of(tmp_path / "large")
        large.prepare()
        assert large.estimate is not None
        peak = large.estimate.memory.peak
        for share, starts in ((1 - ERROR_BOUND + 0.01, True), (1 - ERROR_BOUND - 0.01, False)):
            patch.setattr(plan_first, "machine_of_run", lambda share=share: small_gpu(int(peak * share)))
            again = trainer_of(tmp_path / "large")
            if starts:
                again.prepare()
                assert again.estimate is not None and again.estimate.verdict.fits is False, "it says so, and starts"
            else:
                with pytest.raises(ConfigError, match="Does not fit"):
                    again.prepare()


@ranks(1)
@pytest.mark.parametrize("error", [CapacityError("it branches on values"), RuntimeError("no such operator")])
def test_what_cannot_be_traced_is_only_noted(tmp_path: Path, error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "trace_step", fails)
        patch.setattr(plan_first, "machine_of_run", lambda: small_gpu(2**30))
        trainer = trainer_of(tmp_path, progress="plain")
        trainer.train()
    if isinstance(error, CapacityError):
        assert trainer.estimate is not None and trainer.estimate.verdict.fits is None
        assert trainer.estimate.verdict.untraced == "it branches on values"
    else:
        assert trainer.estimate is None


@pytest.mark.slow
@ranks(1)
def test_a_script_s_own_loss_never_stops_a_run(tmp_path: Path) -> None:
    class Own(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    make_folder(tmp_path)
    config = settings(tmp_path, max_steps=1, skip_plan=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_first, "machine_of_run", lambda: small_gpu(2**20))
        Own(str(tmp_path / "model"), config, train_dataset=text_rows(60), tokenizer=make_tokenizer()).train()


@ranks(1)
@pytest.mark.parametrize("skip", [False, True])
def test_what_no_batch_could_fit_is_refused_without_a_plan_too(tmp_path: Path, skip: bool) -> None:
    """The same part of the estimate decides, before anything is traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_first, "available_memory", lambda on_host: (2**12, "host memory"))
        patch.setattr(plan_first, "plan_step", lambda *_: pytest.fail("planned"))
        with pytest.raises(ConfigError, match=r"the model does not fit: each rank needs at least .* but has 4.0 KiB"):
            trainer_of(tmp_path, skip_plan=skip).train()


@ranks(1)
def test_the_state_that_is_checked_is_the_estimate_s(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **LORA)
    trainer.prepare()
    assert trainer.estimate is not None
    plan, state = trainer.loop.model.plan, trainer.estimate.memory.state
    parts = trainer.estimate.memory.moments["optimizer step"]
    assert (state.shards, state.gradients) == (plan.shard_bytes, parts["gradients"]) and state.gradients
    assert state.optimizer == parts["optimizer"] == 2 * state.gradients
