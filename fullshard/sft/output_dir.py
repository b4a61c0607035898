"""The output folder of a run: whether it may be written to, whether the run resumes the one in it, its lock.

A new run never writes into an earlier one by accident: it stops, lists the settings that differ, and offers to resume
or to overwrite. Checks only read, and need no torch. The first rank removes what an earlier run wrote, once everything
that the new run reads is loaded.

The lock is a record lock: the system releases it when the process ends, however it ends, and child processes do not
inherit it, so a killed run never keeps its folder locked. On a file system without locks nothing is detected, and no
run is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest import MANIFEST, published_steps
from fullshard.config.errors import ConfigError
from fullshard.config.options import counting_number, options_of
from fullshard.config.paths import Inputs, refuse_inputs, replace_text, within
from fullshard.config.redaction import hide_in
from fullshard.data.sources import DataSource
from fullshard.data.token_table import cache_root
from fullshard.lora.adapter_config import FIRST, WEIGHTS
from fullshard.sft.run_data import dataset_configs
from fullshard.sft.sft_config import SFTConfig

SETTINGS = "settings.json"
PLAN = "plan.json"
CHECKPOINTS = "checkpoints"
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
RUN_FILES = (
    f"{CHECKPOINTS}/step-*", f"{CHECKPOINTS}/.step-*.tmp", f"{FIRST}/*", "metrics.jsonl", "samples.jsonl",
    "events.jsonl", "data.json", "step.json",
    "runs/events.out.tfevents.*", "wandb/run-*", "wandb/offline-run-*", "wandb/latest-run", "wandb/debug*.log",
    "wandb.json", "report.html", "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors",
    "adapter_base.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "trainer_state.json", "*_results.json", PLAN,
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", SETTINGS,
)  # fmt: skip
"""What a run writes into its folder; overwriting removes these and nothing else. The settings, which mark a folder as
that of a run, are removed last."""
OVERWRITE_MARK = ".overwritten"
"""Marks an earlier run to be removed once everything is loaded, in case the job is restarted before that."""
MOST_NAMED = 4
"""The most names in a message."""
LOCK = ".lock"

_own: dict[tuple[int, int], list[int]] = {}
"""The locks of this process: the file handle, and how often each lock was taken. Closing a second handle of the same
file would release the lock."""


def is_restart(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher has restarted this job after a crash."""
    text = (os.environ if environment is None else environment).get(RESTART_VARIABLE, "0")
    return (counting_number(text) or 0) > 0


def output_path(config: SFTConfig) -> Path:
    """The path of the output folder."""
    return Path(config.output_dir).expanduser()


def named_checkpoint(config: SFTConfig) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names, if it names one."""
    text = (config.resume_from_checkpoint or "").strip()
    return None if text.lower() in ("", "true", "yes", "false", "no", "none") else Path(text).expanduser()


def resumes(config: SFTConfig) -> bool:
    """Whether the run resumes the one in its folder."""
    if config.resume or config.resumes_newest:
        return True
    named = named_checkpoint(config)
    if named is not None and not config.overwrite and within(named, output_path(config)):
        return True
    # A run that is restarted before it has removed the earlier one starts from the beginning again.
    return is_restart() and not (config.overwrite and (output_path(config) / OVERWRITE_MARK).exists())


def first_adapter(config: SFTConfig) -> Path | None:
    """The folder of the initial adapter values of the run to resume, where it has one."""
    named = named_checkpoint(config)
    places = [] if named is None else [named, named.parent, named.parent.parent]
    folders = (place / FIRST for place in (*places, output_path(config)))
    return next((place for place in folders if (place / WEIGHTS).is_file()), None)


# --- checks ---------------------------------------------------------------------------------------------------------


def input_paths(
    config: SFTConfig, model: Any, adapter: str | None, data: Iterable[DataSource | None], tokenizer: Any = None
) -> dict[str, list[Path]]:
    """The existing paths that a run reads, by option. For a model or tokenizer in memory: the folder it was loaded
    from, if `overwrite` is on."""
    named = {
        "model_name_or_path": _origin(model, config), "adapter_name_or_path": adapter,
        "tokenizer_name_or_path": config.tokenizer_name_or_path or _origin(tokenizer, config),
        "chat_template_path": config.chat_template_path, "sample_prompts": config.sample_prompts,
        "fsdp_config": config.fsdp_config if isinstance(config.fsdp_config, str) else None,
    }  # fmt: skip
    inputs = {name: [Path(text).expanduser()] for name, text in named.items() if text is not None}
    inputs["dataset_settings"] = [
        Path(own.chat_template_path).expanduser() for own in dataset_configs(config) if own.chat_template_path
    ]
    inputs["dataset_name"] = [file for source in data if source is not None for file in source.files]
    existing = {name: [path for path in paths if path.exists()] for name, paths in inputs.items()}
    return {name: paths for name, paths in existing.items() if paths}


def _origin(thing: Any, config: SFTConfig) -> str | None:
    if thing is None or isinstance(thing, str | Path):
        return None if thing is None else str(thing)
    name = getattr(getattr(thing, "config", thing), "name_or_path", None)
    return name if config.overwrite and isinstance(name, str) and name else None


def check_output_dir(config: SFTConfig, inputs: Inputs) -> None:
    """Refuse an output folder that cannot be used; nothing is changed."""
    check_output_path(config, inputs)
    check_contents(config, inputs)


def check_contents(config: SFTConfig, inputs: Inputs) -> None:
    """Refuse a folder because of what it holds: another run, or files that are not a run's."""
    folder = output_path(config)
    refuse_occupied(folder)
    if resumes(config):
        _check_checkpoint(config, folder)
        _check_base_weights(config, named_checkpoint(config) or folder)
        return
    if (named := named_checkpoint(config)) is not None:
        _check_named(named)
        _check_base_weights(config, named)
    contents = [path for path in _listed(folder) if not _is_own(path, config)]
    if not contents:
        return
    earlier = read_settings(folder)
    if config.overwrite:
        _check_removal(config, folder, inputs, earlier is not None)
    elif earlier is None:
        raise ConfigError(
            f"output_dir {folder} is not empty ({_names(contents)}) and holds no earlier run. Choose another folder, "
            f"or --overwrite to write beside what is there."
        )
    else:
        raise ConfigError(
            f"output_dir {folder} holds an earlier run. --resume continues it, --overwrite replaces it. "
            f"{describe_changes(earlier, config)}"
        )


def check_output_path(config: SFTConfig, inputs: Inputs) -> None:
    """Refuse a path that a run must not, or cannot, write to, whatever the folder holds."""
    folder = output_path(config)
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
    elif not published_steps(folder / CHECKPOINTS) and not is_restart():
        raise ConfigError(f"there is no checkpoint in {folder / CHECKPOINTS} to resume from; leave --resume out.")


def _check_named(named: Path) -> None:
    if not (named / MANIFEST).is_file() and not any(published_steps(p) for p in (named, named / CHECKPOINTS)):
        raise ConfigError(
            f"resume_from_checkpoint: {named} {'holds no checkpoint' if named.exists() else 'does not exist'}; "
            f"expected a checkpoint's folder, or true for the newest in output_dir."
        )


def _check_base_weights(config: SFTConfig, place: Path) -> None:
    """Refuse to resume with frozen weights in another form: the checkpoint refers to those of the run it belongs to."""
    settings = next((found for folder in (place, *place.parents[:2]) if (found := read_settings(folder))), None) or {}
    if settings.get("dequantize", config.dequantize) != config.dequantize:
        raise ConfigError(
            f"dequantize is {config.dequantize}, and the run to resume ({place}) had {settings['dequantize']}: its "
            f"checkpoints refer to weights in that form; set it as there, or give its adapter (adapter_name_or_path)."
        )


def _check_removal(config: SFTConfig, folder: Path, inputs: Inputs, earlier: bool) -> None:
    """Refuse to overwrite files that no run wrote, or that this run reads."""
    removals = run_files(folder)
    if removals and not earlier:
        raise ConfigError(
            f"output_dir {folder} holds {_names(removals)}, which a run would replace, but no earlier run "
            f"({SETTINGS}): --overwrite removes only what a run of fullshard wrote. Move them away, or choose "
            f"another folder."
        )
    named = named_checkpoint(config)
    kept = {**inputs, "cache_dir": [cache_root(config.cache_dir)], "resume_from_checkpoint": [named] if named else []}
    for name, path, one in ((name, path, one) for name, paths in kept.items() for path in paths for one in removals):
        if within(path, one):
            raise ConfigError(f"{name}: {path} is in {one}, which --overwrite removes; choose another folder.")


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_own(path: Path, config: SFTConfig) -> bool:
    """Whether an entry of the folder belongs to this run already, or is an empty folder."""
    empty = path.is_dir() and not any(path.iterdir())
    return path.name in (LOCK, OVERWRITE_MARK) or empty or within(cache_root(config.cache_dir), path)


def _names(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")


def run_files(folder: Path) -> list[Path]:
    """The paths in a folder that a run would write."""
    return [path for pattern in RUN_FILES for path in sorted(folder.glob(pattern))]


# --- settings -------------------------------------------------------------------------------------------------------


HARMLESS = frozenset({
    "output_dir", "overwrite", "resume", "resume_from_checkpoint", "save_strategy", "save_steps", "save_total_limit",
    "logging_strategy", "logging_steps", "logging_first_step", "log_level", "progress", "report_to", "run_name",
    "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "eval_on_start", "per_device_eval_batch_size",
    "preview", "preview_rows", "eval_samples", "sample_prompts", "sample_max_new_tokens",
    "cache_dir", "ddp_timeout", "dataloader_num_workers", "dataloader_pin_memory", "save_dtype", "async_save",
    "torch_empty_cache_steps", "disable_tqdm", "logging_dir", "hub_token", "hub_revision", "hub_always_push", "project",
    "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "include_num_input_tokens_seen", "eval_delay",
})  # fmt: skip
"""Settings whose change in a resumed run does not change training."""


PER_NODE = frozenset({
    "cache_dir", "dataloader_num_workers", "dataloader_pin_memory", "disable_tqdm", "hub_token", "local_rank",
    "log_level", "log_level_replica", "logging_dir", "preview", "preview_rows", "progress",
})  # fmt: skip
"""Settings that ranks may have different values of."""


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in this folder; None if it holds no run."""
    try:
        return dict(json.loads((folder / SETTINGS).read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def changed_settings(earlier: Mapping[str, Any], config: SFTConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the earlier run's and change training: (then, now)."""
    now, unused = config.to_dict(), {one.name for one in options_of(type(config)) if one.no_op}
    return {
        name: (earlier[name], now[name])
        for name in now
        if name not in HARMLESS | unused and name in earlier and earlier[name] != now[name]
    }


def settings_that_train(config: SFTConfig) -> dict[str, Any]:
    """The settings that must be equal on all ranks: all but those of a node, or of one rank's output."""
    return {name: value for name, value in config.to_dict().items() if name not in PER_NODE}


def describe_changes(earlier: Mapping[str, Any], config: SFTConfig) -> str:
    """The changed settings as a sentence."""
    differences = changed_settings(earlier, config)
    if not differences:
        return "The settings are the same."
    return "Changed since: " + ", ".join(f"{name} {then} → {now}" for name, (then, now) in differences.items()) + "."


# --- changes, by the first rank alone -------------------------------------------------------------------------------


def lock_output_dir(config: SFTConfig) -> FolderLock:
    """Create the folder and lock it for this run; what is in it stays."""
    folder = output_path(config)
    lock = FolderLock(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take()
        if not config.overwrite:
            (folder / OVERWRITE_MARK).unlink(missing_ok=True)
        elif not is_restart() and run_files(folder):
            (folder / OVERWRITE_MARK).touch()
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be used: {error.strerror or error}.") from None
    return lock


def remove_earlier_run(config: SFTConfig) -> str | None:
    """Remove what an earlier run wrote, with `overwrite`; returns a note on files that stay."""
    folder = output_path(config)
    if not config.overwrite:
        return None
    try:
        for path in run_files(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in (CHECKPOINTS, FIRST, "runs", "wandb"):
            if (folder / name).is_dir() and not (folder / name).is_symlink() and not any((folder / name).iterdir()):
                (folder / name).rmdir()
        (folder / OVERWRITE_MARK).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be used: {error.strerror or error}.") from None
    foreign = [path for path in _listed(folder) if not _is_own(path, config)]
    return f"output_dir {folder}: {_names(foreign)} were not written by a run and stay as they are" if foreign else None


def remove_checkpoints(config: SFTConfig) -> None:
    """Remove the checkpoints in the run's folder, for a training that starts again in it."""
    for path in (output_path(config) / CHECKPOINTS).glob("step-*"):
        shutil.rmtree(path)


def write_settings(config: SFTConfig, facts: Mapping[str, Any], plan: Mapping[str, Any] | None = None) -> None:
    """Write the resolved settings to settings.json, and what was planned to plan.json."""
    text = json.dumps({"settings": config.to_dict(), **hide_in(facts)}, indent=1, default=str)
    if plan is not None:
        replace_text(output_path(config) / PLAN, json.dumps(hide_in(plan), default=str))
    replace_text(output_path(config) / SETTINGS, text)


# --- the lock -------------------------------------------------------------------------------------------------------


class FolderLock:
    """The lock of one run's folder, for the first rank alone. The process that holds it may take it again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._identity: tuple[int, int] | None = None

    def take(self) -> None:
        """Take the lock; an error names the process that holds it."""
        identity = _identity_of(self.path)
        if identity in _own:
            _own[identity][1] += 1
            self._identity = identity
            return
        while True:
            file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            if not _locked(file, fcntl.LOCK_EX):
                os.close(file)
                refuse_occupied(self.path.parent)
                continue  # it was released meanwhile
            status = os.fstat(file)
            taken = (status.st_dev, status.st_ino)
            if _identity_of(self.path) == taken:  # else its last owner removed the file meanwhile
                break
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}".encode())
        self._identity = taken
        _own[taken] = [file, 1]

    def release(self) -> None:
        """Release the lock, if this was the last to hold it. Calling it again changes nothing."""
        if self._identity is None:
            return
        identity, self._identity = self._identity, None
        _own[identity][1] -= 1
        if _own[identity][1] == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(_own.pop(identity)[0])


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder that another run is writing to."""
    if (owner := lock_owner(folder)) is not None:
        raise ConfigError(
            f"output_dir: {folder} is in use by another run ({owner}); wait until it has ended, or choose another "
            f"folder."
        )


def lock_owner(folder: Path) -> str | None:
    """The other process that holds the lock of a folder, in words; None if there is none. Reading rights are enough."""
    path = folder / LOCK
    if _identity_of(path) in _own:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locked(file, fcntl.LOCK_SH):  # shared: several processes may ask at once
            return None
        return os.read(file, 200).decode(errors="replace") or "a process that has just started"
    finally:
        os.close(file)


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _locked(file: int, kind: int) -> bool:
    """Take a lock if it is free. Returns false if another process has it."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
