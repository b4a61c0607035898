"""The command line of `fullshard sft`: one YAML file and/or flags, flags over the file, into an `SFTConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.configfile import SUFFIXES, read_file, sort_keys
from fullshard.data.formats import find_files
from fullshard.errors import ConfigError
from fullshard.options import options_of, parse_flags
from fullshard.train.config import SFTConfig


@dataclass(frozen=True)
class Arguments:
    """A command line, understood."""

    config: SFTConfig
    notes: list[str]


def parse(words: Sequence[str]) -> Arguments:
    """Settings from `[run.yaml] [--flag value …]`."""
    options, notes = options_of(SFTConfig), list[str]()
    values: dict[str, Any] = {}
    left = list(words)
    if left and not left[0].startswith("-"):
        values = read_yaml(left.pop(0), notes)
    flags = parse_flags(left, options, "sft")
    if flags.rest:
        hint = "The file of settings comes first." if Path(flags.rest[0]).suffix in SUFFIXES else "Flags begin with --."
        raise ConfigError(f"sft: {flags.rest[0]!r} is not a flag. {hint}")
    return Arguments(SFTConfig(**{**values, **flags.values}), notes)


def read_yaml(path: str, notes: list[str]) -> dict[str, Any]:
    return sort_keys(read_file(path), options_of(SFTConfig), notes).values


def check_paths(config: SFTConfig) -> tuple[list[Path], list[Path]]:
    """What can be said about the run's paths before anything heavy is imported; returns the data files."""
    for name in ("model_name_or_path", "dataset_name"):
        if getattr(config, name) is None:
            raise ConfigError(f"{name} is missing; give --{name}.")
    check_model_folder(str(config.model_name_or_path))
    if config.tokenizer_name_or_path:
        check_model_folder(config.tokenizer_name_or_path, "tokenizer_name_or_path", "tokenizer_config.json")
    return find_files(str(config.dataset_name), config.splits, config.eval_strategy != "no")


def check_model_folder(name: str, option: str = "model_name_or_path", needs: str = "config.json") -> None:
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if path.is_dir() and not (path / needs).is_file():
        held = ", ".join(sorted(p.name for p in path.iterdir())[:6]) or "nothing"
        raise ConfigError(f"{option}: {path} has no {needs}; it holds {held}.")
    if path.is_file():
        raise ConfigError(f"{option}: {path} is a file; expected the folder that holds {needs}.")
    if looks_local and not path.exists():
        raise ConfigError(f"{option}: {path} does not exist.")
