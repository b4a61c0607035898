"""Folders of runs for tests, with the files that a run writes and values that are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\"'><svg onload=alert(3)>",
    "javascript:alert(4)",
    "{{constructor.constructor('alert(5)')()}}",
    "a.b['c'] \\ \u2028 \u202e\x1b[31m\x00",
    "__proto__",
)
"""Texts that would do harm as markup, code, a path in an object, or a control sequence."""


def training_record(step: int) -> dict[str, Any]:
    return {
        "step": step, "loss": 2.5 * math.exp(-step / 40) + 0.01 * math.sin(step),
        "learning_rate": 1e-3 * (1 - step / 200), "grad_norm": 1.0 + 0.3 * math.cos(step),
        "mean_token_accuracy": 1 - 0.5 * math.exp(-step / 30), "num_tokens": 300 * step,
        "tokens_per_second": 3000.0 + step, "memory_gib": 0.5, "epoch": step / 100,
    }  # fmt: skip


def evaluation_record(step: int) -> dict[str, Any]:
    return {"step": step, "eval_loss": 2.6 * math.exp(-step / 40) + 0.1, "eval_runtime": 0.5, "epoch": step / 100}


CLOSING = {"train_runtime": 27.5, "train_loss": 0.5, "train_steps_per_second": 3.6}


def synthetic_metrics(steps: int = 100, every: int = 5) -> list[dict[str, Any]]:
    """The lines of a run that has finished."""
    lines = [evaluation_record(0)]
    for step in range(every, steps + 1, every):
        lines += [training_record(step), *([evaluation_record(step)] if step % (4 * every) == 0 else [])]
    return [*lines, {"step": steps, **CLOSING}]


def synthetic_run(folder: Path, metrics: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    """A folder with the settings, metrics and samples of a run. The default metrics are `synthetic_metrics`."""
    folder.mkdir(parents=True)
    given = {
        "model_name_or_path": "model",
        "learning_rate": 1e-3,
        "max_steps": 100,
        "output_dir": str(folder),
        **settings,
    }
    about = {"settings": given, "ranks": 1, "versions": {"torch": "2.13.0", "fullshard": "0.1.0"}}
    (folder / "settings.json").write_text(json.dumps(about))
    write_lines(folder / "metrics.jsonl", synthetic_metrics() if metrics is None else metrics)
    write_lines(folder / "samples.jsonl", [
        {"step": step, "prompt": prompt, "answer": answer, "reference": "Paris"}
        for prompt in ("Which city?", "Where?") for step, answer in ((0, "The the"), (100, "Paris"))
    ])  # fmt: skip
    return folder


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def hostile_run(folder: Path) -> Path:
    """A run whose name, settings, metrics, data and samples are `HOSTILE`."""
    lines = [{**line, **{text: float(i) for i, text in enumerate(HOSTILE)}} for line in synthetic_metrics()]
    lines += [{"step": 100, f"eval_{text}_loss": 1.0} for text in HOSTILE]
    synthetic_run(folder, lines, **{text: text for text in HOSTILE}, model_name_or_path=HOSTILE[0], run_name=HOSTILE[1])
    about = json.loads((folder / "settings.json").read_text())
    about |= {"name": HOSTILE[1], "base": HOSTILE[0], "data": HOSTILE[2], "method": HOSTILE[3], "hardware": HOSTILE[5]}
    about |= {"versions": {HOSTILE[0]: HOSTILE[1]}, "notes": list(HOSTILE), "changed": about["settings"]}
    (folder / "settings.json").write_text(json.dumps(about))
    write_lines(folder / "samples.jsonl", [
        {"step": step, "prompt": text, "answer": text, "reference": text} for text in HOSTILE for step in (0, 50, 100)
    ])  # fmt: skip
    return folder


def full_run(folder: Path) -> Path:
    """A run with every file that one writes: events, data statistics, one measured step."""
    synthetic_run(folder)
    about = json.loads((folder / "settings.json").read_text())
    about |= {
        "name": "first",
        "base": "model",
        "data": "data",
        "method": "LoRA",
        "hardware": "2 × CPU rank",
        "ranks": 2,
    }
    about |= {"steps": 100, "changed": about["settings"]}
    (folder / "settings.json").write_text(json.dumps(about))
    kinds = {"start": 0, "checkpoint": 50, "warning": 60, "end": 100}
    write_lines(folder / "events.jsonl", [
        {"time": 1.7e9 + step, "step": step, "kind": kind, "text": "slow data" if kind == "warning" else ""}
        for kind, step in kinds.items()
    ])  # fmt: skip
    lengths = {"edges": [10, 20, 30, 40], "rows": [5, 20, 9]}
    data = {"name": "training", "source": "train.jsonl", "documents": 34, "rows": 34, "tokens": 900, "targets": 400}
    (folder / "data.json").write_text(json.dumps({"data_sets": [{**data, "row_length": 40, "row_lengths": lengths}]}))
    moments = ["forward"] * 6 + ["loss"] + ["backward"] * 6 + ["optimizer step"] * 2
    count = len(moments)
    timeline = {
        "moment": moments, "unit": ["layers.0"] * count, "operation": ["gather"] * count, "shards": [3e6] * count,
        "gathered": [1e6 * (i % 3) for i in range(count)], "gradients": [5e5] * count, "optimizer": [6e6] * count,
    }  # fmt: skip
    units = {name: {"gather_sent": 1e6, "reduce_sent": 1e5} for name in ("", "layers.0", "layers.1")}
    (folder / "step.json").write_text(json.dumps({"step": 3, "counted": True, "timeline": timeline, "units": units}))
    return folder
