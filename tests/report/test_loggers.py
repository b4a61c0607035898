"""TensorBoard and Weights & Biases: what they are handed, a resumed run, and faults that stop nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import ConfigError
from fullshard.distributed.terminal_text import visible
from fullshard.report import loggers
from fullshard.report.records import Sample
from fullshard.report.reporter import Reporter, sample_text
from fullshard.sft import checked_run
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer

SAMPLES = [Sample(2, "say\n<hi>", "hi\x1b[2J", "hi"), Sample(2, "and?", "", None)]
FAKE = """
calls, fails = [], set()

class Table:
    def __init__(self, columns, data):
        self.rows = [columns, *data]

class Run:
    def __getattr__(self, name):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
            if name in fails:
                raise RuntimeError(f"{name} failed\\nand more")
        return call

def init(**options):
    calls.append(("init", (), options))
    if "init" in fails:
        raise RuntimeError("no network")
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of that name that notes what it is asked."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    import wandb

    yield wandb
    sys.modules.pop("wandb", None)


def opener(config: SFTConfig) -> loggers.OpenLoggers:
    return loggers.opener(config.report_to, config.to_dict(), config.run_name)


def run(folder: Path, step: int, **settings: Any) -> Reporter:
    reporter = Reporter(folder, 10, "quiet", opener(SFTConfig(**settings)))
    reporter.start(step)
    reporter.log(step + 2, {"loss": 1.5, "eval_loss": 2.5, "note": "text"})
    reporter.samples(step + 2, SAMPLES)
    reporter.close()
    return reporter


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as reader

    run(tmp_path, 0, report_to="tensorboard", learning_rate=3e-4)
    events = reader.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert events.Scalars("train/loss")[0].value == 1.5 and events.Scalars("eval/loss")[0].step == 2
    texts = {tag: events.Tensors(tag)[0] for tag in events.Tags()["tensors"]}
    said = texts["samples/1/text_summary"]
    assert said.step == 2 and b"**prompt**\n\n    say\n    <hi>\n\n**answer**" in said.tensor_proto.string_val[0]
    assert b"| learning_rate | `0.0003` |" in texts["settings/text_summary"].tensor_proto.string_val[0]


def test_weights_and_biases(tmp_path: Path, wandb: Any) -> None:
    run(tmp_path, 0, report_to="wandb", run_name="mine", learning_rate=3e-4)
    first = wandb.calls[0][2]
    assert (first["project"], first["name"], first["resume"]) == ("fullshard", "mine", "allow")
    assert first["dir"] == str(tmp_path) and first["config"]["learning_rate"] == 3e-4
    logged = [args[0] for name, args, _ in wandb.calls if name == "log"]
    assert logged[0] == {"step": 2, "train/loss": 1.5, "eval/loss": 2.5}
    assert logged[1]["samples"].rows[1:] == [[2, "say\n<hi>", "hi\x1b[2J", "hi"], [2, "and?", "", ""]]
    assert ("define_metric", ("*",), {"step_metric": "step"}) in wandb.calls and wandb.calls[-1][0] == "finish"
    wandb.calls.clear()
    run(tmp_path, 2, report_to="all")
    assert wandb.calls[0][2]["id"] == first["id"], "the same run goes on"
    assert wandb.calls[0][2]["name"] == tmp_path.name


def test_a_logger_that_fails_is_disabled(tmp_path: Path, wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    wandb.fails.add("log")
    reporter = run(tmp_path, 0, report_to="wandb")
    answers = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(reporter.history) == 1 and len(answers) == 2, "the run's own files have it all"
    assert [name for name, _, _ in wandb.calls].count("log") == 1, "it is not asked again"
    wandb.fails.add("init")
    run(tmp_path, 0, report_to="wandb")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "report_to WeightsAndBiases: log failed; training continues without it",
        "report_to wandb: no network; training continues without it",
    ]


def test_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word where nobody asked for it; what is named is an error before anything is done."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for given in ("auto", "all", "none"):
        checked_run.check_report_to(given)
        assert opener(SFTConfig(report_to=given))(tmp_path, 0) == []
    assert SFTConfig().report_to == "none" and not caplog.records
    with pytest.raises(ConfigError, match="report_to names wandb, which is not installed; pip install wandb"):
        SFTTrainer(args=SFTConfig(report_to="none,wandb"))
    with pytest.raises(ConfigError, match=r"report_to names dagshub, .* pip install dagshub mlflow"):
        SFTTrainer(args=SFTConfig(report_to=["dagshub"]))
    with pytest.raises(ConfigError, match="report_to names mlfow; did you mean mlflow"):
        SFTConfig(report_to="mlfow")


def test_which_loggers_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"tensorboard", "wandb"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in own else None)
    monkeypatch.setattr(loggers, "LOGGERS", {name: lambda *given, name=name: name for name in loggers.LOGGERS})
    for given, opened in {"auto": ["tensorboard"], "all": ["tensorboard", "wandb"], "wandb": ["wandb"]}.items():
        assert opener(SFTConfig(report_to=given))(tmp_path, 0) == opened


def test_samples_in_files_and_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 9, "prompt": "of a run that was broken off"}) + "\n")
    for mode in ("plain", "json"):
        reporter = Reporter(tmp_path, 10, mode)
        reporter.start(0)
        reporter.samples(2, SAMPLES)
        reporter.close()
        printed = capsys.readouterr().out
        records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert records == [s.record() for s in SAMPLES]
        if mode == "json":
            assert [json.loads(line) for line in printed.splitlines()] == records
        else:
            assert printed == visible("\n".join(map(sample_text, SAMPLES))) + "\n"
    assert visible(sample_text(SAMPLES[0])).splitlines() == [
        "sample at step 2",
        "  prompt     say",
        "             <hi>",
        "  answer     hi\\x1b[2J",
        "  reference  hi",
    ]
    long = sample_text(Sample(1, "x" * 400 + "end", "a", None))
    assert "…" in long and "xend" in long and len(long) < 400 and "reference" not in long
