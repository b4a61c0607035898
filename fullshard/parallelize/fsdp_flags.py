"""transformers' way to ask for sharding: `--fsdp "full_shard auto_wrap offload"` and `--fsdp_config FILE`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullshard.configfile import ConfigFile, read_file, sort_keys
from fullshard.errors import ConfigError
from fullshard.options import nearest, options_of
from fullshard.parallelize.settings import STRATEGIES, EngineSettings, overlay

WORDS: dict[str, dict[str, Any]] = {
    **{name.lower(): {"sharding_strategy": name} for name in STRATEGIES},
    "offload": {"offload_params": True},
    "auto_wrap": {},
}


def read_words(fsdp: str | bool | Iterable[str] | None) -> dict[str, Any]:
    """Option values of `--fsdp`'s words. "full shard" is read as "full_shard", as a guide prints it."""
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
            raise ConfigError(f"--fsdp {text!r}: unknown word {left[0]!r}{hint} The words are {', '.join(WORDS)}.")
        said, earlier = WORDS[word], values.get("sharding_strategy")
        if earlier is not None and said.get("sharding_strategy", earlier) != earlier:
            raise ConfigError(f"--fsdp {text!r} names two strategies; keep one")
        values |= said
        del left[:length]
    return values


def read_section(source: str | Path | Mapping[str, Any] | None, notes: list[str]) -> dict[str, Any]:
    """Option values of `--fsdp_config`: a file or mapping of the section's own keys, or a whole configuration file."""
    if not source:
        return {}
    mapping = isinstance(source, Mapping)
    file = ConfigFile(Path("fsdp_config"), dict(source)) if mapping else read_file(source)  # type: ignore[arg-type]
    options = options_of(EngineSettings)
    if "fsdp_config" in file.values:
        ours = {name for one in options for name in (one.section, *one.names) if not one.section or name == one.section}
        kept = {key: value for key, value in file.values.items() if key in ours or key.startswith(("fsdp_", "xla"))}
        if others := sorted(set(file.values) - set(kept)):
            notes.append(f"{file.path}: {', '.join(others)} are for `fullshard launch --config_file`; not read here")
        return sort_keys(ConfigFile(file.path, kept, file.lines), options, notes).values
    nested = ConfigFile(
        file.path, {"fsdp_config": file.values}, {("fsdp_config", *key): line for key, line in file.lines.items()}
    )
    return sort_keys(nested, options, notes).values


def read_trainer_flags(
    fsdp: str | bool | Iterable[str] | None, fsdp_config: str | Path | Mapping[str, Any] | None, notes: list[str]
) -> dict[str, Any]:
    """Option values of both; the file's strategy gives way to the words'."""
    return overlay(read_section(fsdp_config, notes), read_words(fsdp))
