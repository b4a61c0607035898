"""The model card of a result: what it is, how it was trained, and how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullshard.paths import replace_text
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
