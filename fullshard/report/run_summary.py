"""The outcome of a run in a few lines: what was trained, on what, for how long, with which result."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from fullshard.config.paths import looks_local, replace_text
from fullshard.report.records import is_number
from fullshard.report.run_record import Record, RunRecord
from fullshard.version import __version__

CAUSAL = "AutoModelForCausalLM"


def write_card(folder: Path, run_name: str | None, settings: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write README.md. `settings` are those that differ from their defaults; `facts` has the keys base, adapter (a
    bool), data, steps, ranks, metrics, versions and tags."""
    adapter = facts.get("adapter", False)
    front = {"library_name": "peft" if adapter else "transformers", "tags": facts.get("tags") or ["fullshard", "sft"]}
    if facts.get("base"):
        front["base_model"] = str(facts["base"])
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {run_name or folder.resolve().name}", ""]
    lines += [f"{'A LoRA adapter' if adapter else 'A model'} from supervised fine-tuning with fullshard {__version__}"]
    lines[-1] += f", starting from `{facts['base']}`." if facts.get("base") else "."
    lines += ["", "```python", *_how_to_load(folder, facts, adapter), "```", ""]
    lines += ["## Training", "", f"{facts['steps']} steps on {facts['data']}, {facts['ranks']} rank(s).", ""]
    if facts.get("metrics"):
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| {name} | {_number(value)} |" for name, value in facts["metrics"].items()]
        lines += [""]
    lines += ["## Settings", "", "| setting | value |", "|---|---|"]
    lines += [f"| `{name}` | `{value}` |" for name, value in settings.items()]
    lines += ["", "All other settings have their default values; `settings.json` lists every setting.", ""]
    lines += ["## Versions", "", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()), ""]
    replace_text(folder / "README.md", "\n".join(lines))


def _how_to_load(folder: Path, facts: dict[str, Any], adapter: bool) -> list[str]:
    base = facts.get("base") or ""
    kind = model_class(Path(base) if adapter else folder)
    if adapter and kind == CAUSAL:
        return [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{folder}")',
        ]
    load = f'model = {kind}.from_pretrained("{base if adapter else folder}")'
    if not adapter:
        return [f"from transformers import {kind}", "", load]
    return [
        "from peft import PeftModel", f"from transformers import {kind}", "", load,
        f'model = PeftModel.from_pretrained(model, "{folder}")',
    ]  # fmt: skip


def model_class(folder: Path) -> str:
    """The class of transformers that loads the model in a folder: the whole model's, where it takes more than text."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
    except (OSError, ValueError):
        names = ()
    return next((name for name in names if name.endswith("ForConditionalGeneration")), CAUSAL)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def title_of(run: RunRecord) -> str:
    """What was trained, how, and on what; the name of the run if nothing of that is known."""
    base, method, data = (_short(run.about.get(name)) for name in ("base", "method", "data"))
    method = method[:1].upper() + method[1:].partition(",")[0]  # the number of trained parameters follows
    trained = f"{method} of {base}" if method and base else method or base
    return f"{trained} on {data}" if trained and data else trained or run.name


def _short(value: Any) -> str:
    """A name; of a path on this machine the last part."""
    text = value if isinstance(value, str) else ""
    return Path(text).name or text if looks_local(text) else text


def summary_of(run: RunRecord) -> dict[str, Any]:
    """Names with values as text, for the top of a report; None where nothing is known."""
    about, tokens = run.about, run.last("num_tokens")
    return {
        "Status": status(run),
        "Base model": about.get("base"),
        "Method": about.get("method"),
        "Data": about.get("data"),
        "Hardware": about.get("hardware"),
        "Duration": _duration(run),
        "Steps": _steps(run),
        "Tokens": f"{tokens:,.0f}" if tokens is not None else None,
        "Training loss": _loss(run),
        "Evaluation loss": _evaluation(run),
        "Speed": _speed(run),
        "Peak memory": _memory(run),
        "Result": _result(run),
    }


def status(run: RunRecord) -> str:
    """Whether the run has ended, and how."""
    last = next(
        (e for e in reversed(run.events) if e.get("kind") in ("start", "resume", "end", "failed", "stopped")), None
    )
    if last is None:
        return "finished" if run.last("train_runtime") is not None else "unknown"
    words = {"start": "running, or interrupted", "resume": "running, or interrupted", "end": "finished"}
    kind = str(last["kind"])
    return words.get(kind) or f"{kind} at step {last['step']:,}: {last.get('text', '')}"


def seconds(run: RunRecord) -> float | None:
    """Time spent training, also before the run was resumed; None if it is not known."""
    total, began, latest = 0.0, None, None
    for event in run.events:
        if not is_number(event.get("time")):
            continue
        if event.get("kind") in ("start", "resume"):
            total += (latest - began) if began is not None and latest is not None else 0.0
            began = event["time"]
        latest = event["time"]
        if event.get("kind") in ("end", "failed", "stopped") and began is not None:
            total, began = total + latest - began, None
    if began is not None and latest is not None:
        total += max(latest, run.changed_at or latest) - began
    return total or run.last("train_runtime")


def _duration(run: RunRecord) -> str | None:
    spent = seconds(run)
    if spent is None:
        return None
    sessions = len(run.of_kind("resume"))
    again = f", resumed {sessions} time{'s' * (sessions > 1)}" if sessions else ""
    return f"{spent:.1f} s{again}" if spent < 60 else f"{timedelta(seconds=round(spent))}{again}"


def _steps(run: RunRecord) -> str | None:
    done = max((record["step"] for record in run.metrics), default=None)
    if done is None:
        return None
    total, skipped = run.about.get("steps"), run.last("skipped_steps")
    text = f"{done:,} of {total:,}" if is_number(total) else f"{done:,}"
    return text + (f", {skipped:,.0f} skipped" if skipped else "")


def _loss(run: RunRecord) -> str | None:
    last, mean = run.last("loss"), run.last("train_loss")
    parts = [f"{last:.4f} at the end"] if last is not None else []
    parts += [f"{mean:.4f} on average"] if mean is not None else []
    return ", ".join(parts) or None


def _evaluation(run: RunRecord) -> str | None:
    names = run.matching(r"eval_(.+_)?loss")
    values = [(step, value) for step, value in run.series(names[0]) if value is not None] if names else []
    if not values:
        return None
    best = min(values, key=lambda point: point[1])
    text = f"{values[-1][1]:.4f} at the end"
    return text + (f", best {best[1]:.4f} at step {best[0]:,}" if best[1] < values[-1][1] else "")


def _speed(run: RunRecord) -> str | None:
    return f"{run.speed:,.0f} tokens per second (median)" if run.speed is not None else None


def _memory(run: RunRecord) -> str | None:
    peak = run.last("memory_gib")
    return f"{peak:.2f} GiB on the first rank" if peak is not None else None


def _result(run: RunRecord) -> str:
    files: Record = {
        "adapter_model.safetensors": "adapter",
        "model.safetensors": "model",
        "model.safetensors.index.json": "model",
    }
    what = next((name for file, name in files.items() if (run.folder / file).is_file()), None)
    return f"{what} in {run.folder}" if what else f"none in {run.folder}"
