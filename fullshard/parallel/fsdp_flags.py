"""The sharding flags of transformers' Trainer: `--fsdp "full_shard auto_wrap offload"` and `--fsdp_config FILE`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullshard.config.configfile import ConfigFile, read_file, sort_keys
from fullshard.config.errors import ConfigError
from fullshard.config.options import nearest, options_of
from fullshard.distributed import engines
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.settings import STRATEGIES, EngineSettings, overlay

WORDS: dict[str, dict[str, Any]] = {
    **{name.lower(): {"sharding_strategy": name} for name in STRATEGIES},
    "offload": {"offload_params": True},
    "auto_wrap": {},
}


def settings_from_trainer_flags(
    fsdp: str | bool | Iterable[str] | None = None,
    fsdp_config: str | Path | Mapping[str, Any] | None = None,
    *,
    notes: list[str] | None = None,
    base: EngineSettings | None = None,
) -> EngineSettings:
    """The settings of both flags, on top of `base` (the environment's by default).

    Where `--fsdp` and the file name different strategies, `--fsdp` wins. Keys that were not taken literally are
    reported in `notes`.
    """
    base = EngineSettings.from_environment() if base is None else base
    values = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    notes = notes if notes is not None else []
    flags = overlay(read_section(fsdp_config, notes), read_words(fsdp))
    settings = EngineSettings(**overlay(values, {name: value for name, value in flags.items() if name in values}))
    if any(name.startswith("xla") for name in flags):
        notes.extend(engines.current().sharding_notes(settings))
    return settings


def read_words(fsdp: str | bool | Iterable[str] | None) -> dict[str, Any]:
    """The option values of `--fsdp`. "full shard" is read as "full_shard": a guide prints it that way."""
    if fsdp is None or isinstance(fsdp, bool):
        return {}
    text = fsdp if isinstance(fsdp, str) else " ".join(str(getattr(word, "value", word)) for word in fsdp)
    values: dict[str, Any] = {}
    left = text.lower().replace(",", " ").replace("-", "_").split()
    if left in (["true"], ["false"], []):
        return {}
    while left:
        for length in (3, 2, 1):
            word = "_".join(left[:length])
            if word in WORDS:
                break
        else:
            hint = nearest(left[0], WORDS)
            raise ConfigError(f"--fsdp {text!r}: unknown word {left[0]!r}{hint} Expected words: {', '.join(WORDS)}.")
        options, earlier = WORDS[word], values.get("sharding_strategy")
        if earlier is not None and options.get("sharding_strategy", earlier) != earlier:
            raise ConfigError(f"--fsdp {text!r} names two strategies; keep one")
        values |= options
        del left[:length]
    return values


def read_section(source: str | Path | Mapping[str, Any] | None, notes: list[str]) -> dict[str, Any]:
    """The option values of `--fsdp_config`: the keys of the section alone, or a whole configuration file.

    Values of ignored options are included, so that the launcher can report them.
    """
    if not source:
        return {}
    mapping = isinstance(source, Mapping)
    file = ConfigFile(Path("fsdp_config"), dict(source)) if mapping else read_file(source)  # type: ignore[arg-type]
    options = (*options_of(EngineSettings), *(one for one in IGNORED_OPTIONS if one.section))
    if "fsdp_config" in file.values:
        ours = {name for one in options for name in (one.section, *one.names) if not one.section or name == one.section}
        kept = {key: value for key, value in file.values.items() if key in ours or key.startswith(("fsdp_", "xla"))}
        if others := sorted(set(file.values) - set(kept)):
            notes.append(
                f"{file.path}: {', '.join(others)}: ignored here; they apply to `fullshard launch --config_file`"
            )
        return sort_keys(ConfigFile(file.path, kept, file.lines), options, notes).values
    nested = ConfigFile(
        file.path, {"fsdp_config": file.values}, {("fsdp_config", *key): line for key, line in file.lines.items()}
    )
    return sort_keys(nested, options, notes).values
