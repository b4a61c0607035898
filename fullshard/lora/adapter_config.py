"""Adapter folders: file names and `adapter_config.json`, read without importing PEFT or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullshard.config.errors import WeightsError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FIRST = "initial_adapter"
"""The folder in a run's output folder with the initial adapter, if that was computed from the weights."""


def taken_from_weights(method: Any) -> bool:
    """Whether an `init_lora_weights` method subtracts the initial adapter from the base weights (PiSSA, OLoRA)."""
    return isinstance(method, str) and (method.startswith("pissa") or method == "olora")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder contains an adapter rather than a model."""
    path = Path(folder).expanduser()
    return (path / CONFIG).is_file() and not (path / "config.json").is_file()


def read_config(folder: str | Path) -> dict[str, Any]:
    """The contents of an adapter's `adapter_config.json`."""
    file = Path(folder).expanduser() / CONFIG
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{file} is not an adapter configuration: expected a JSON object.")
    return config
