"""Conversion of a PiSSA or OLoRA adapter to plain LoRA on the original base weights.

Training uses W - s·B₀A₀ + s·BA, where A₀ and B₀ are the initial adapter. On W itself that is a LoRA adapter of twice
the rank, [B, -B₀] and [A; A₀], which PEFT loads, merges and serves like any other. A run therefore saves A₀ and B₀ when
it starts, as PEFT's guide recommends.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fullshard.config.errors import WeightsError
from fullshard.lora.adapter_config import CONFIG, FIRST, WEIGHTS, read_config


def first_of(checkpoint: Path) -> Path | None:
    """The folder with the initial adapter of a checkpoint's run; None if it is not beside the checkpoint."""
    above = checkpoint.absolute().parent
    return next((p / FIRST for p in (above.parent, above) if (p / FIRST / WEIGHTS).is_file()), None)


def make_plain(folder: Path, first: Path) -> None:
    """Convert the adapter in `folder` to plain LoRA, in place, using the initial adapter in `first`."""
    values, initial, config = load_file(folder / WEIGHTS), load_file(first / WEIGHTS), read_config(folder)
    pairs = {key: key.rpartition(".lora_")[2] for key in values if key.endswith((".lora_A.weight", ".lora_B.weight"))}
    if odd := [key for key in pairs if key not in initial or initial[key].shape != values[key].shape]:
        raise WeightsError(f"{first} is not the initial adapter of {folder}: it does not match {', '.join(odd[:3])}")
    for key, kind in pairs.items():
        dim, sign = (0, 1) if kind.startswith("A") else (1, -1)
        values[key] = torch.cat([values[key], sign * initial[key].to(values[key].dtype)], dim=dim)
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_doubled(config), indent=2, sort_keys=True) + "\n")


def _doubled(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with twice the rank and the same scale (alpha / r, or alpha / √r)."""
    factor = math.sqrt(2) if config.get("use_rslora") else 2
    return config | {
        "init_lora_weights": True,
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {name: 2 * value for name, value in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {name: factor * value for name, value in (config.get("alpha_pattern") or {}).items()},
    }
