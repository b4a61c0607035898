"""Broken off and gone on with: the same losses and weights as a run that was left alone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.preemption import EXIT_PREEMPTED
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import children_of, make_folder, make_model


class StopAt:
    """Asks the job to stop after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.checkpoints: Any = None

    def of(self, trainer: Any) -> None:
        """Use the checkpoint manager that this trainer will open."""
        opens = trainer._saver.open_checkpoints

        def keep() -> Any:
            self.checkpoints = opens()
            return self.checkpoints

        trainer._saver.open_checkpoints = keep

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step == self.step:
            self.checkpoints.preempt()


def lora_model() -> Any:
    made = make_model()
    torch.manual_seed(3)
    return get_peft_model(made, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, task_type="CAUSAL_LM"))


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "lora with dropout"])
def test_stopped_in_mid_epoch_and_resumed_is_as_never_stopped(kind: str, tmp_path: Path) -> None:
    """The data has five and a bit steps an epoch; the run is stopped at step 7 of 12 and goes on in new objects."""

    def options(name: str, **changes: Any) -> dict[str, Any]:
        config = settings(
            tmp_path / name, max_steps=12, save_strategy="steps", save_steps=5, per_device_train_batch_size=3,
            packing=True, gradient_accumulation_steps=2, max_seq_len=32, **changes,
        )  # fmt: skip
        model = make_model() if kind == "full" else lora_model()
        return {"model": model, "args": config, "train_dataset": text_rows(130), "tokenizer": make_tokenizer()}

    whole = SFTTrainer(**options("whole"))
    whole.train()
    stop = StopAt(7)
    first = SFTTrainer(**options("broken"), callbacks=[stop])
    stop.of(first)
    with pytest.raises(SystemExit) as exit_code:
        first.train()
    assert exit_code.value.code == EXIT_PREEMPTED and first.loop.progress.step == 7
    second = SFTTrainer(**options("broken", resume=True))
    second.train()
    assert second.loop.progress == whole.loop.progress
    assert whole.loop.loader.sampler.order.steps_per_epoch not in (1, 7, 12), "the stop was to be in mid-epoch"
    assert losses(second) == losses(whole)
    for (name, a), (_, b) in zip(second.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name


@ranks(2)
def test_a_line_of_the_log_that_a_stop_cuts_in_two_is_about_all_its_steps(tmp_path: Path) -> None:
    """Lines are of steps 1 to 4 and 5 to 8; the run is stopped after step 6, in the background while it saves."""
    means = ("loss", "mean_token_accuracy", "entropy", "grad_norm", "num_tokens", "learning_rate", "epoch")

    def options(name: str, **changes: Any) -> dict[str, Any]:
        config = settings(
            tmp_path / name, max_steps=8, save_strategy="steps", save_steps=5, logging_steps=4, log_entropy=True,
            per_device_train_batch_size=2, **changes,
        )  # fmt: skip
        return {"model": make_model(), "args": config, "train_dataset": text_rows(60), "tokenizer": make_tokenizer()}

    whole = SFTTrainer(**options("whole"))
    whole.train()
    stop = StopAt(6)
    first = SFTTrainer(**options("broken", async_save=True), callbacks=[stop])
    stop.of(first)
    with pytest.raises(SystemExit):
        first.train()
    begun: list[Any] = []
    note = type("Note", (), {"on_train_begin": lambda *_, **__: begun.append(dataclasses.replace(second.loop.window))})
    second = SFTTrainer(**options("broken", resume=True), callbacks=[note()])
    second.train()
    expected, found = ([{k: r[k] for k in means} for r in t.state.log_history if "loss" in r] for t in (whole, second))
    assert found == expected and len(expected) == 2, "on every rank"
    (window,) = begun
    assert window.steps == 2 and window.tokens > 0 and window.seconds > 0, "throughput counts them, and their time"
    manifest = read_manifest(tmp_path / "broken" / "out" / "checkpoints" / "step-6")
    assert "ranks" not in manifest.states["progress"], "the same on every rank, so that any number can go on"


@pytest.mark.slow
@ranks(2)
def test_on_another_number_of_micro_batches_the_curve_goes_on(tmp_path: Path) -> None:
    """A checkpoint does not depend on how the global batch was cut."""
    share: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "lr_scheduler_type": "constant"}
    whole = losses(train(make_model(), settings(tmp_path / "whole", per_device_train_batch_size=4, **share)))
    half = settings(tmp_path / "part", per_device_train_batch_size=4, **{**share, "max_steps": 4})
    train(make_model(), half)
    rest = settings(
        tmp_path / "part", per_device_train_batch_size=1, gradient_accumulation_steps=4, resume=True, **share
    )  # fmt: skip
    resumed = train(make_model(seed=1), rest)
    assert losses(resumed) == pytest.approx(whole, abs=1e-4) and len(whole) == 8


# --- whole jobs -----------------------------------------------------------------------------------------------------


def command(place: Path, out: str, *more: str) -> list[str]:
    flags = {
        "num_processes": 2, "max_restarts": 2, "grace": 60, "model_name_or_path": place / "model",
        "dataset_name": place / "data", "report_to": "none", "progress": "plain",
        "output_dir": place / out, "max_steps": 24, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6,
        "max_seq_len": 64, "save_steps": 3, "save_total_limit": 2, "logging_steps": 1, "learning_rate": "5e-3",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "fullshard", "sft", "--use_cpu", *words, *more]


def start(place: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "FULLSHARD_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    log = (place / f"{out}.log").open("ab")
    return subprocess.Popen(command(place, out, *more), stdout=log, stderr=log, env=environment)


def steps_done(place: Path, out: str) -> int:
    path = place / out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for(condition: Callable[[], bool], job: subprocess.Popen[bytes], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert job.poll() is None, "the job ended too early"
        assert time.monotonic() < end, "the job got stuck"
        time.sleep(0.02)


def result(place: Path, out: str) -> tuple[list[float], dict[str, Any]]:
    records = [json.loads(line) for line in (place / out / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if "loss" in r], load_file(place / out / "model.safetensors")


@pytest.mark.slow
def test_killed_thrice_and_restarted_ends_the_same(tmp_path: Path) -> None:
    place = make_folder(tmp_path, rows=400)
    quiet = start(place, "quiet")
    assert quiet.wait(300) == 0, (place / "quiet.log").read_text()

    job = start(place, "disturbed")
    wait_for(lambda: steps_done(place, "disturbed") >= 5, job)
    os.kill(children_of(job.pid)[-1], signal.SIGKILL)  # one rank: the launcher starts all again, and they resume
    wait_for(lambda: "resumed at step" in (place / "disturbed.log").read_text(), job)
    wait_for(lambda: steps_done(place, "disturbed") >= 10, job)
    victims = children_of(job.pid)
    job.kill()  # the launcher: its ranks end with it
    job.wait(30)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in victims):
        assert time.monotonic() < end, "ranks outlived the launcher"
        time.sleep(0.05)

    refused = subprocess.run(command(place, "disturbed"), capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "holds an earlier run. --resume continues it" in refused.stderr

    job = start(place, "disturbed", "--resume")
    before = steps_done(place, "disturbed")
    wait_for(lambda: steps_done(place, "disturbed") >= max(13, before + 1), job)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 75
    stopped_at = steps_done(place, "disturbed")
    assert stopped_at < 24, "the signal came too late to show anything"

    last = start(place, "disturbed", "--resume")
    assert last.wait(300) == 0, (place / "disturbed.log").read_text()[-3000:]
    (left_alone, weights), (losses_after, weights_after) = result(place, "quiet"), result(place, "disturbed")
    assert len(left_alone) == 24 and losses_after == left_alone
    assert weights.keys() == weights_after.keys()
    assert all(torch.equal(weights[name], weights_after[name]) for name in weights)
