"""What a run records for its report: events, data statistics, one measured step; and the report itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config.errors import TrainingError
from fullshard.data.token_table import TokenTable
from fullshard.distributed import runtime
from fullshard.planner.traffic import step_traffic
from fullshard.report import html_report
from fullshard.report.reporter import MOST, EventLog
from fullshard.report.run_record import RunRecord, read_run
from fullshard.report.run_summary import status
from fullshard.report.step_record import StepRecord
from fullshard.sft.run_folder import histogram
from tests.data.tiny import text_rows
from tests.pool import ranks
from tests.sft.runs import settings, train
from tests.sft.tiny import make_model


def kinds(record: RunRecord) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in record.events]


def counted(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_a_run_records_what_its_report_shows(tmp_path: Path) -> None:
    long = [{"text": "the red bird " * 40}, {"text": ""}]
    changes = {"max_steps": 6, "packing": True, "run_name": "a <run>", "save_strategy": "steps", "save_steps": 4}
    trainer = train(
        make_model(), settings(tmp_path, **changes), text_rows(60) + long, eval_dataset=text_rows(9, seed=3)
    )
    trainer.save_model()
    record = read_run(tmp_path / "out")
    assert not record.missing and record.name == "a <run>" and status(record) == "finished"
    assert record.about["method"].startswith("full fine-tuning, ") and record.about["steps"] == 6
    assert record.about["hardware"] == "1 × CPU rank" and record.changed == trainer.args.changed()
    assert kinds(record) == [("start", 0), ("checkpoint", 4), ("checkpoint", 6), ("end", 6)]
    assert record.checkpoints == (4, 6) and len(record.metrics) == 7
    table = trainer.parts.train
    assert isinstance(table, TokenTable)
    training, evaluation = record.data
    assert [training[name] for name in ("rows", "tokens", "long", "cut", "empty")] == [
        len(table), int(table.row_sizes[:].sum()), 1, table.facts["cut"], 1
    ]  # fmt: skip
    assert training["fill"] == table.row_sizes[:].sum() / (len(table) * 48) and evaluation["documents"] == 9
    assert sum(training["row_lengths"]["rows"]) == len(table)
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<h1>Full fine-tuning on user-provided data</h1>\n<p class="muted">a &lt;run&gt;</p>' in page
    assert "packing" in page


def test_a_step_is_measured(tmp_path: Path) -> None:
    """Against the sizes of the tensors themselves: AdamW has two moments of each parameter, and a step count."""
    trainer = train(make_model(), settings(tmp_path, max_steps=5))
    measured = read_run(tmp_path / "out").measured
    assert measured is not None and measured["step"] == 4 and measured["counted"] is True
    timeline, parameters = measured["timeline"], list(trainer.model.parameters())
    size = counted(parameters)
    assert set(timeline["shards"]) == {size} and set(timeline["gathered"]) == {0}
    assert set(timeline["optimizer"]) == {2 * size + 4 * len(parameters)}
    assert timeline["gradients"][0] == 0 and max(timeline["gradients"]) == timeline["gradients"][-1] == size
    moments = [m for i, m in enumerate(timeline["moment"]) if i == 0 or timeline["moment"][i - 1] != m]
    assert moments == ["forward", "loss", "backward", "optimizer step"]
    units = [unit.name for unit in trainer.model._fullshard_engine.units]
    assert list(measured["units"]) == units and set(timeline["unit"]) == set(units)
    assert {count for unit in measured["units"].values() for count in unit.values()} == {0}, "one rank sends nothing"
    assert trainer.model.meter.observer is None


@ranks(2)
def test_what_two_ranks_send_is_counted_by_unit(tmp_path: Path) -> None:
    trainer = train(make_model(), settings(tmp_path, max_steps=5, per_device_train_batch_size=2))
    engine = trainer.model._fullshard_engine
    runtime.barrier()
    if runtime.is_main():
        units = read_run(tmp_path / "out").measured["units"]  # type: ignore[index]
        planned = step_traffic(trainer.model.plan, gpus_per_node=2, direct=True)
        assert planned.units == {name: one["gather_sent"] + one["reduce_sent"] for name, one in units.items()}
        for unit in engine.units:
            found = units[unit.name]
            pieces = sum(p.plan.shard_bytes for p in unit.parameters)
            # Forward and backward; the root stays gathered in between.
            assert found["gathers"] == (1 if unit.name == "" else 2) and found["reduces"] == 1
            assert found["gather_sent"] == found["gathers"] * pieces
            # Each rank sends the other's half of the gradients, and a flag for each parameter.
            assert found["reduce_sent"] - pieces in (4 * len(unit.parameters), 0)
    runtime.barrier()


def test_a_fault_in_measuring_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepRecord, "_gradients", lambda self: 1 / 0)
    trainer = train(make_model(), settings(tmp_path, max_steps=5))
    assert trainer.state.global_step == 5 and not (tmp_path / "out" / "step.json").exists()
    assert [e["text"] for e in read_run(tmp_path / "out").of_kind("warning")] == [
        "step.json is not written: division by zero"
    ]


def test_a_report_that_fails_does_not_lose_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_report, "render", lambda record: 1 / 0)
    trainer = train(make_model(), settings(tmp_path, max_steps=1))
    trainer.save_model()
    out = tmp_path / "out"
    assert (out / "model.safetensors").exists() and not (out / "report.html").exists()
    assert "report.html: division by zero" in read_run(out).of_kind("warning")[-1]["text"]


class Breaks:
    """A callback that raises at a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("no more\nlines")


def test_a_run_that_fails_and_is_resumed(tmp_path: Path) -> None:
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(RuntimeError, match="no more"):
        train(make_model(), settings(tmp_path, **changes), callbacks=[Breaks()])
    assert status(read_run(tmp_path / "out")) == "failed at step 3: RuntimeError: no more"
    assert "failed at step 3: RuntimeError: no more" in (tmp_path / "out" / "report.html").read_text()
    train(make_model(), settings(tmp_path, resume=True, **changes))
    record = read_run(tmp_path / "out")
    found = kinds(record)
    assert found[:4] == [("start", 0), ("checkpoint", 2), ("failed", 3), ("resume", 2)] and found[-1] == ("end", 4)
    assert status(record) == "finished"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_among_the_events(tmp_path: Path) -> None:
    def broken() -> Any:
        model = make_model()
        with torch.no_grad():
            model.lm_head.weight[5] = torch.nan
        return model

    with pytest.raises(TrainingError):
        train(broken(), settings(tmp_path, max_steps=3))
    assert "TrainingError: step 1: " in status(read_run(tmp_path / "out"))
    train(broken(), settings(tmp_path, max_steps=3, on_nonfinite_loss="skip", overwrite=True))
    record = read_run(tmp_path / "out")
    assert [e["text"][:14] for e in record.of_kind("warning")] == [f"step {n} skipped" for n in (1, 2, 3)]
    assert [line["loss"] for line in record.metrics[:3]] == [None] * 3


def test_warnings_are_recorded_while_a_log_is_in_use(tmp_path: Path) -> None:
    logger = runtime.get_logger()
    before = list(logger.handlers)
    log = EventLog(tmp_path)
    logger.warning("early %d", 1)
    assert not (tmp_path / "events.jsonl").exists(), "the folder is not the run's yet"
    log.on_train_begin(None, type("State", (), {"global_step": 0}), None)
    for number in range(MOST + 5):
        logger.warning("warning %d", number)
    logger.info("no warning")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines[:3]] == ["", "early 1", "warning 0"] and len(lines) == MOST + 1
    other = EventLog(tmp_path / "other")
    logger.warning("of the other")
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == len(lines)
    del log, other
    assert set(logger.handlers) <= set(before)


def test_lengths_are_counted_in_bars() -> None:
    for sizes in ([7], [1, 1, 2], list(range(1000)), [3, 2048]):
        found = histogram(np.array(sizes))
        edges, rows = found["edges"], found["rows"]
        assert len(edges) == len(rows) + 1 <= 26 and edges[0] == min(sizes) and edges[-1] > max(sizes)
        assert rows == [sum(low <= size < high for size in sizes) for low, high in itertools.pairwise(edges)]
    assert histogram(np.array([], dtype=np.int64)) == {"edges": [], "rows": []}
