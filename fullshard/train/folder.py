"""The folder of a run: what may be written where, and whether it goes on with an earlier run.

A new run never writes into an earlier one by accident: it stops, says what differs, and offers to resume or to
overwrite. Checks only read and need no torch; the first rank makes changes once all ranks are there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.train.config import HARMLESS, SFTConfig
from fullshard.weights.adapter_config import FIRST, WEIGHTS

SETTINGS = "settings.json"
CHECKPOINTS = "checkpoints"
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
WRITTEN = (
    SETTINGS, CHECKPOINTS, FIRST, "metrics.jsonl", "samples.jsonl", "runs", "wandb", "wandb.json", "report.html",
    "README.md",
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
"""What a run leaves in its folder; overwriting removes these and nothing else."""


def restarted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher has started this job again after a crash."""
    text = (os.environ if environment is None else environment).get(RESTART_VARIABLE, "0")
    return text.isdigit() and int(text) > 0


def resumes(config: SFTConfig) -> bool:
    """Whether the run is to go on from a checkpoint, if there is one."""
    asked = (config.resume_from_checkpoint or "").lower() not in ("", "false", "none", "no")
    return config.resume or asked or restarted()


def first_adapter(config: SFTConfig) -> Path | None:
    """What the adapter of a run that is gone on with began with, where that was written down."""
    asked = config.resume_from_checkpoint or ""
    places = (Path(asked), Path(asked).parent, Path(asked).parent.parent, Path(config.output_dir))
    found = (place.expanduser() / FIRST for place in places)
    return next((place for place in found if (place / WEIGHTS).is_file()), None)


def check_folder(config: SFTConfig) -> None:
    """Refuse a folder that cannot be used; nothing is changed."""
    folder = Path(config.output_dir).expanduser()
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"output_dir: {existing} is a file; expected a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: {existing} cannot be written; choose another or change its permissions.")
    held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if not held or config.overwrite or resumes(config):
        return
    earlier = read_settings(folder)
    if earlier is None:
        shown = ", ".join(held[:4]) + (", …" if len(held) > 4 else "")
        raise ConfigError(
            f"output_dir {folder} is not empty ({shown}) and holds no earlier run. Choose another folder, or "
            f"--overwrite to "
            f"replace the files that a run writes."
        )
    raise ConfigError(
        f"output_dir {folder} holds an earlier run. --resume goes on with it, --overwrite starts anew. "
        f"{describe_changes(earlier, config)}"
    )


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in this folder; None where there is none."""
    try:
        return dict(json.loads((folder / SETTINGS).read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def changes(earlier: Mapping[str, Any], config: SFTConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from the earlier run's and matter: (then, now)."""
    now = config.to_dict()
    return {
        name: (earlier[name], now[name])
        for name in now
        if name not in HARMLESS and name in earlier and earlier[name] != now[name]
    }


def describe_changes(earlier: Mapping[str, Any], config: SFTConfig) -> str:
    found = changes(earlier, config)
    if not found:
        return "The settings are the same."
    return "Changed since: " + ", ".join(f"{name} {then} → {now}" for name, (then, now) in found.items()) + "."


def prepare_folder(config: SFTConfig) -> None:
    """Make the folder ready; for the first rank alone."""
    folder = Path(config.output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if config.overwrite and not restarted():
            for pattern in WRITTEN:
                for path in folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be used: {error.strerror or error}.") from None


def write_settings(config: SFTConfig, facts: Mapping[str, Any]) -> None:
    """Write down the resolved settings; for the first rank alone."""
    folder = Path(config.output_dir).expanduser()
    text = json.dumps({"settings": config.to_dict(), **facts}, indent=1, default=str)
    part = folder / f"{SETTINGS}.part"
    part.write_text(text)
    part.rename(folder / SETTINGS)
