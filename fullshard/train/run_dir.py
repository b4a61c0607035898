"""The folder of a run: what may be written where, and whether it goes on with an earlier run.

A new run never writes into an earlier one by accident: it stops, says what differs, and offers to resume or to
overwrite. Checks only read and need no torch. What an earlier run wrote is removed by the first rank, once everything
that the new one reads is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest import MANIFEST, published_steps
from fullshard.data.sources import DataSource
from fullshard.data.token_table import cache_root
from fullshard.errors import ConfigError
from fullshard.lora.adapter_config import FIRST, WEIGHTS
from fullshard.paths import Inputs, refuse_inputs, replace_text, within
from fullshard.train.config import HARMLESS, SFTConfig
from fullshard.train.dataset_options import configs_of
from fullshard.train.run_lock import LOCK, FolderLock, refuse_occupied

SETTINGS = "settings.json"
CHECKPOINTS = "checkpoints"
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
WRITTEN = (
    f"{CHECKPOINTS}/step-*", f"{CHECKPOINTS}/.step-*.tmp", f"{FIRST}/*", "metrics.jsonl", "samples.jsonl",
    "runs/events.out.tfevents.*", "wandb/run-*", "wandb/offline-run-*", "wandb/latest-run", "wandb/debug*.log",
    "wandb.json", "report.html", "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors",
    "adapter_base.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", SETTINGS,
)  # fmt: skip
"""What a run writes into its folder; overwriting removes these and nothing else. The settings, by which a run's folder
is known, go last."""
DOOMED = ".overwritten"
"""Marks an earlier run that is to be removed once everything is loaded, for a job that is restarted before that."""
NAMED = 4
"""Names that a message lists."""


def restarted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher has started this job again after a crash."""
    text = (os.environ if environment is None else environment).get(RESTART_VARIABLE, "0")
    return text.isdigit() and int(text) > 0


def place_of(config: SFTConfig) -> Path:
    return Path(config.output_dir).expanduser()


def named_checkpoint(config: SFTConfig) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names, if it names one."""
    text = (config.resume_from_checkpoint or "").strip()
    return None if text.lower() in ("", "true", "yes", "false", "no", "none") else Path(text).expanduser()


def resumes(config: SFTConfig) -> bool:
    """Whether the run goes on with the one in its folder."""
    if config.resume or config.resumes_newest:
        return True
    named = named_checkpoint(config)
    if named is not None and not config.overwrite and within(named, place_of(config)):
        return True
    # Restarted before it had removed the earlier run, it begins anew again.
    return restarted() and not (config.overwrite and (place_of(config) / DOOMED).exists())


def first_adapter(config: SFTConfig) -> Path | None:
    """What the adapter of a run that is gone on with began with, where that was written down."""
    named = named_checkpoint(config)
    places = [] if named is None else [named, named.parent, named.parent.parent]
    found = (place / FIRST for place in (*places, place_of(config)))
    return next((place for place in found if (place / WEIGHTS).is_file()), None)


# --- checks ---------------------------------------------------------------------------------------------------------


def inputs_of(
    config: SFTConfig, model: Any, adapter: str | None, data: Iterable[DataSource | None], tokenizer: Any = None
) -> dict[str, list[Path]]:
    """What a run reads. Of a model or a tokenizer in memory, where it came from, if that is to be overwritten."""
    named = {
        "model_name_or_path": _origin(model, config), "adapter_name_or_path": adapter,
        "tokenizer_name_or_path": config.tokenizer_name_or_path or _origin(tokenizer, config),
        "chat_template_path": config.chat_template_path, "sample_prompts": config.sample_prompts,
        "fsdp_config": config.fsdp_config if isinstance(config.fsdp_config, str) else None,
    }  # fmt: skip
    found = {name: [Path(text).expanduser()] for name, text in named.items() if text is not None}
    found["dataset_settings"] = [
        Path(own.chat_template_path).expanduser() for own in configs_of(config) if own.chat_template_path
    ]
    found["dataset_name"] = [file for source in data if source is not None for file in source.files]
    return {name: there for name, paths in found.items() if (there := [path for path in paths if path.exists()])}


def _origin(thing: Any, config: SFTConfig) -> str | None:
    if thing is None or isinstance(thing, str | Path):
        return None if thing is None else str(thing)
    name = getattr(getattr(thing, "config", thing), "name_or_path", None)
    return name if config.overwrite and isinstance(name, str) and name else None


def check_folder(config: SFTConfig, inputs: Inputs) -> None:
    """Refuse a folder that cannot be used; nothing is changed."""
    folder = place_of(config)
    check_place(config, inputs)
    refuse_occupied(folder)
    if resumes(config):
        _check_checkpoint(config, folder)
        return
    if (named := named_checkpoint(config)) is not None:
        _check_named(named)
    there = [path for path in _listed(folder) if not _is_own(path, config)]
    if not there:
        return
    earlier = read_settings(folder)
    if config.overwrite:
        _check_removal(config, folder, inputs, earlier is not None)
    elif earlier is None:
        raise ConfigError(
            f"output_dir {folder} is not empty ({_names(there)}) and holds no earlier run. Choose another folder, or "
            f"--overwrite to write beside what is there."
        )
    else:
        raise ConfigError(
            f"output_dir {folder} holds an earlier run. --resume goes on with it, --overwrite starts anew. "
            f"{describe_changes(earlier, config)}"
        )


def check_place(config: SFTConfig, inputs: Inputs) -> None:
    """Refuse a folder that a run must not, or cannot, write to, whatever it holds."""
    folder = place_of(config)
    refuse_inputs(folder, "output_dir", inputs)
    existing = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    if not existing.is_dir():
        raise ConfigError(f"output_dir: {existing} is a file; expected a folder.")
    for place in (existing, folder / CHECKPOINTS):
        if os.path.exists(place) and not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"output_dir: {place} cannot be written; choose another or change its permissions.")


def _check_checkpoint(config: SFTConfig, folder: Path) -> None:
    if (named := named_checkpoint(config)) is not None:
        _check_named(named)
    elif not published_steps(folder / CHECKPOINTS) and not restarted():
        raise ConfigError(f"there is no checkpoint in {folder / CHECKPOINTS} to resume from; leave --resume out.")


def _check_named(named: Path) -> None:
    if not (named / MANIFEST).is_file() and not any(published_steps(p) for p in (named, named / CHECKPOINTS)):
        raise ConfigError(
            f"resume_from_checkpoint: {named} {'holds no checkpoint' if named.exists() else 'does not exist'}; "
            f"expected a checkpoint's folder, or true for the newest in output_dir."
        )


def _check_removal(config: SFTConfig, folder: Path, inputs: Inputs, earlier: bool) -> None:
    """Refuse to overwrite what no run wrote, and what is still needed."""
    doomed = written_in(folder)
    if doomed and not earlier:
        raise ConfigError(
            f"output_dir {folder} holds {_names(doomed)}, which a run would replace, but no earlier run ({SETTINGS}): "
            f"--overwrite removes only what a run of fullshard wrote. Move them away, or choose another folder."
        )
    named = named_checkpoint(config)
    kept = {**inputs, "cache_dir": [cache_root(config.cache_dir)], "resume_from_checkpoint": [named] if named else []}
    for name, path, one in ((name, path, one) for name, paths in kept.items() for path in paths for one in doomed):
        if within(path, one):
            raise ConfigError(f"{name}: {path} lies in {one}, which --overwrite removes; choose another place.")


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_own(path: Path, config: SFTConfig) -> bool:
    """Whether a thing in the folder belongs to this run already, or is nothing."""
    empty = path.is_dir() and not any(path.iterdir())
    return path.name in (LOCK, DOOMED) or empty or within(cache_root(config.cache_dir), path)


def _names(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def written_in(folder: Path) -> list[Path]:
    """What is there under a name that runs write to."""
    return [path for pattern in WRITTEN for path in sorted(folder.glob(pattern))]


# --- settings -------------------------------------------------------------------------------------------------------


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


# --- changes, by the first rank alone -------------------------------------------------------------------------------


def open_folder(config: SFTConfig) -> FolderLock:
    """Make the folder and hold it for this run; what is in it stays."""
    folder = place_of(config)
    lock = FolderLock(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take()
        if not config.overwrite:
            (folder / DOOMED).unlink(missing_ok=True)
        elif not restarted() and written_in(folder):
            (folder / DOOMED).touch()
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be used: {error.strerror or error}.") from None
    return lock


def remove_earlier(config: SFTConfig) -> str | None:
    """Remove what an earlier run wrote, if it is to be overwritten; what stays, in words."""
    folder = place_of(config)
    if not config.overwrite:
        return None
    try:
        for path in written_in(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in (CHECKPOINTS, FIRST, "runs", "wandb"):
            if (folder / name).is_dir() and not (folder / name).is_symlink() and not any((folder / name).iterdir()):
                (folder / name).rmdir()
        (folder / DOOMED).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be used: {error.strerror or error}.") from None
    foreign = [path for path in _listed(folder) if not _is_own(path, config)]
    return f"output_dir {folder}: {_names(foreign)} did not come from a run and stay as they are" if foreign else None


def write_settings(config: SFTConfig, facts: Mapping[str, Any]) -> None:
    """Write down the resolved settings."""
    text = json.dumps({"settings": config.to_dict(), **facts}, indent=1, default=str)
    replace_text(place_of(config) / SETTINGS, text)
