"""What an adapter's folder says about itself, read without PEFT and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullshard.errors import WeightsError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FIRST = "initial_adapter"
"""The folder in a run's own with an adapter as it began, where its first values were taken out of the weights."""


def taken_from_weights(start: Any) -> bool:
    """Whether a way to begin (`init_lora_weights`) takes the adapter's first values out of the weights."""
    return isinstance(start, str) and (start.startswith("pissa") or start == "olora")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    place = Path(folder).expanduser()
    return (place / CONFIG).is_file() and not (place / "config.json").is_file()


def read_config(folder: str | Path) -> dict[str, Any]:
    """An adapter's configuration as it is written."""
    file = Path(folder).expanduser() / CONFIG
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{file} is not an adapter's configuration: expected an object.")
    return found
