"""An adapter that was taken out of the weights (PiSSA, OLoRA) as plain LoRA on the weights as they were.

The run trains W - s·B₀A₀ + s·BA. On W itself that is an adapter of twice the rank, [B, -B₀] and [A; A₀], which PEFT
loads, merges and serves like any other. So a run writes A₀ and B₀ down when it begins, as PEFT's guide has it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fullshard.errors import WeightsError
from fullshard.lora.adapter_config import CONFIG, FIRST, WEIGHTS, read_config


def first_of(checkpoint: Path) -> Path | None:
    """The adapter that the run of a checkpoint began with; None where it is not beside the checkpoint."""
    above = checkpoint.absolute().parent
    return next((p / FIRST for p in (above.parent, above) if (p / FIRST / WEIGHTS).is_file()), None)


def make_plain(folder: Path, first: Path) -> None:
    """Rewrite the adapter's files in `folder` by those it began with."""
    values, began, config = load_file(folder / WEIGHTS), load_file(first / WEIGHTS), read_config(folder)
    pairs = {key: key.rpartition(".lora_")[2] for key in values if key.endswith((".lora_A.weight", ".lora_B.weight"))}
    if odd := [key for key in pairs if key not in began or began[key].shape != values[key].shape]:
        raise WeightsError(f"{first} is not what the adapter began with: it does not fit {', '.join(odd[:3])}")
    for key, kind in pairs.items():
        side, sign = (0, 1) if kind.startswith("A") else (1, -1)
        values[key] = torch.cat([values[key], sign * began[key].to(values[key].dtype)], dim=side)
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_doubled(config), indent=2, sort_keys=True) + "\n")


def _doubled(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with twice the rank and the same scale, alpha / r or alpha / √r."""
    alpha = math.sqrt(2) if config.get("use_rslora") else 2
    return config | {
        "init_lora_weights": True,
        "r": 2 * config["r"],
        "lora_alpha": alpha * config["lora_alpha"],
        "rank_pattern": {name: 2 * value for name, value in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {name: alpha * value for name, value in (config.get("alpha_pattern") or {}).items()},
    }
