"""The host does not wait for the device between log lines: it reads the values of a step after issuing the next one.

On CPUs nothing runs ahead, but the order is the same. What would wait on a GPU are operations that give numbers of the
device to Python; they are counted. `tests/gpu/test_host_ahead.py` has torch itself look for waits.
"""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import TrainerCallback

from fullshard.config.errors import TrainingError
from fullshard.device import accelerator
from fullshard.device.torch_private import local_of
from fullshard.distributed.torch_devices import update_guard
from fullshard.distributed.watchdog import rank_state, watch
from fullshard.distributed.watchdog.diagnosis import Failure
from fullshard.sft import optimizer_step
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import settings, train
from tests.sft.tiny import make_model

KINDS: dict[str, dict[str, Any]] = {
    "full": {"gradient_accumulation_steps": 2},
    "lora": {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.1, "lora_target_modules": "all-linear"},
    "qlora": {
        "use_peft_lora": True, "lora_r": 4, "lora_target_modules": "all-linear", "use_4bit_quantization": True,
        "use_nested_quant": True, "packing": True,
    },
}  # fmt: skip
READS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
ON_HOST = ("data/loader.py", "in known_rows", "in documents_of", "in trained_tokens", "accelerator.py")
"""What reads batches, which are in host memory, and `HostCopy.read`."""


class Reads(TorchFunctionMode):
    """Collects where numbers of the device get to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS:
            frames = traceback.extract_stack()[:-1]
            where = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
            if "/fullshard/" in "".join(where) and not any(known in line for line in where for known in ON_HOST):
                self.found.append(f"{name} at {where[-1]}")
        return function(*args, **(kwargs or {}))


class Events(TrainerCallback):
    """The order in which updates are issued and values are read, inside `with`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._plain = accelerator.HostCopy.read

    def __enter__(self) -> Events:
        def read(copied: Any) -> Any:
            self.seen.append(f"read {1 + sum(event.startswith('read') for event in self.seen)}")
            return self._plain(copied)

        accelerator.HostCopy.read = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        accelerator.HostCopy.read = self._plain  # type: ignore[method-assign]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"update {state.global_step + 1}")


@ranks(1)
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "lora", "qlora"])
def test_a_step_between_log_lines_reads_nothing(kind: str, tmp_path: Path) -> None:
    config = settings(tmp_path, max_steps=5, logging_steps=4, per_device_train_batch_size=2, **KINDS[kind])
    events, reads = Events(), Reads()
    trainer = SFTTrainer(
        model=make_model(), args=config, train_dataset=text_rows(60), tokenizer=make_tokenizer(), callbacks=[events]
    )
    trainer.prepare()
    with events, reads:
        trainer.train()
    assert reads.found == []
    updates = ["update 1", "update 2", "read 1", "update 3", "read 2", "update 4", "read 3"]
    assert events.seen == [*updates, "read 4", "update 5", "read 5"], "the fourth and the last are logged"
    assert [record["step"] for record in trainer.state.log_history if "loss" in record] == [4, 5]


@ranks(1)
def test_values_do_not_depend_on_when_they_are_read(tmp_path: Path) -> None:
    shared = {"max_steps": 6, "per_device_train_batch_size": 2}
    often = train(make_model(), settings(tmp_path / "often", **shared))
    seldom = train(make_model(), settings(tmp_path / "seldom", logging_steps=3, **shared))
    skipping = train(make_model(), settings(tmp_path / "skipping", on_nonfinite_loss="skip", **shared))
    each = [record["loss"] for record in often.state.log_history if "loss" in record]
    means = [record["loss"] for record in seldom.state.log_history if "loss" in record]
    assert means == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3], abs=1e-12)
    assert seldom.loop.progress == often.loop.progress == skipping.loop.progress
    assert seldom.state.total_flos == often.state.total_flos > 0
    for a, b, c in zip(seldom.model.parameters(), often.model.parameters(), skipping.model.parameters(), strict=True):
        assert torch.equal(local_of(a), local_of(b)) and torch.equal(local_of(a), local_of(c))


@ranks(1)
@pytest.mark.parametrize("changes", [{"optim": "lion_32bit"}, {"on_nonfinite_loss": "skip"}])
def test_what_cannot_skip_on_the_device_reads_first(changes: dict[str, str], tmp_path: Path) -> None:
    config = settings(tmp_path, max_steps=2, logging_steps=10, **changes)
    with Events() as events:
        train(make_model(), config, callbacks=[events])
    assert events.seen == ["read 1", "update 1", "read 2", "update 2"]


@ranks(2)
def test_a_nonfinite_loss_that_is_read_late_has_changed_nothing(tmp_path: Path) -> None:
    """Row 9 has a NaN embedding. It is in step 3, whose values are read when step 4 has been issued."""
    rows = [{"input_ids": [11, 12, 13, 14 + i]} for i in range(16)]
    rows[9] = {"input_ids": [11, 7, 13, 14]}

    def trained(steps: int) -> Any:
        model = make_model()
        with torch.no_grad():
            model.model.embed_tokens.weight[7] = torch.nan
        config = settings(
            tmp_path / str(steps), max_steps=steps, per_device_train_batch_size=2, lr_scheduler_type="constant",
            train_sampling_strategy="sequential", logging_steps=10, weight_decay=0.1,
        )  # fmt: skip
        trainer = SFTTrainer(model=model, args=config, train_dataset=rows, tokenizer=make_tokenizer())
        if steps == 2:
            trainer.train()
        else:
            with pytest.raises(
                TrainingError, match=r"step 3: the loss is nan; it came from rows 8, 9 of .*not changed"
            ):
                trainer.train()
        return trainer

    stopped, expected = trained(4), trained(2)
    assert stopped.loop.progress.step == stopped.state.global_step == 2
    assert stopped.loop.progress.loss_steps == 2 and stopped.loop.progress == expected.loop.progress
    for p, q in zip(stopped.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(local_of(p).nan_to_num(), local_of(q).nan_to_num())
        mine, others = stopped.optimizer.state[p], expected.optimizer.state[q]
        assert mine["step"] == others["step"] == 2 and torch.equal(
            local_of(mine["exp_avg"]), local_of(others["exp_avg"])
        )


def test_no_update_from_collectives_that_were_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is set before communicators are aborted, so the device sees it after the collective."""
    monkeypatch.setattr(optimizer_step.runtime, "world_size", lambda: 2)
    monkeypatch.setattr(rank_state, "current", rank_state.RankState())
    monkeypatch.setattr("fullshard.fsdp.checks.watch.raise_failure", lambda: None)  # looked before the rank is lost
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    assert update_guard(torch.optim.AdamW([weight], lr=0.1)) is None
    guard, finite = update_guard(optimizer), torch.ones(7, dtype=torch.float64)
    assert guard is not None
    guard.step(finite)
    after_first = copy.deepcopy(weight.data)
    assert not torch.equal(after_first, torch.ones(3))
    rank_state.set_failure(Failure("rank 1 is gone", True, "here"))
    guard.step(finite)
    assert torch.equal(weight.data, after_first) and optimizer.state[weight]["step"] == 1
    watch.forget()
    guard.reset()
    guard.step(finite)
    assert not torch.equal(weight.data, after_first)
