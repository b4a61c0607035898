"""Settings of a run from where users write them: the command line of `fullshard sft` and its YAML file, a dict, or the
arguments of transformers' and TRL's trainers. All of them become an `SFTConfig`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.configfile import SUFFIXES, read_file, sort_keys
from fullshard.errors import ConfigError
from fullshard.options import convert, nearest, options_of, parse_flags
from fullshard.train.config import SFTConfig

# --- the command line -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    config: SFTConfig
    notes: list[str]
    """What was interpreted, for the user to read."""


def parse(words: Sequence[str]) -> Arguments:
    """Settings from `[run.yaml] [--flag value …]`; flags override the file."""
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
    """The settings in a YAML or JSON file."""
    return sort_keys(read_file(path), options_of(SFTConfig), notes).values


# --- the `args` of a trainer ----------------------------------------------------------------------------------------

FILLED_IN = (
    "logging_dir", "gradient_checkpointing_kwargs", "accelerator_config", "model_init_kwargs", "disable_tqdm",
    "fsdp_config", "local_rank", "log_level_replica", "do_eval", "do_train",
)  # fmt: skip
"""Fields that transformers sets by itself, so that a value other than the default does not come from the user."""
FILLED_IN_PREFIXES = ("_", "trackio", "torch_compile_", "hub_")


@functools.cache
def _by_name() -> dict[str, str]:
    return {name: o.name for o in options_of(SFTConfig) for name in o.names}


def config_of(args: Any, **more: Any) -> tuple[SFTConfig, list[str]]:
    """The settings in a trainer's `args`, with notes for the user. `more` overrides them.

    `args` is an `SFTConfig`, a mapping, transformers' `TrainingArguments` or TRL's `SFTConfig` (fields of the same name
    are taken), or None.
    """
    given: dict[str, Any] = {}
    notes: list[str] = []
    if isinstance(args, SFTConfig):
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    elif isinstance(args, dict):
        given = dict(args)
    elif args is not None:
        given, notes = _from_training_arguments(args)
    values: dict[str, Any] = {}
    for name, value in {**given, **{k: v for k, v in more.items() if v is not None}}.items():
        if name not in _by_name():
            raise ConfigError(f"unknown setting {name!r}{nearest(name, _by_name())}")
        values[_by_name()[name]] = value
    section = values.pop("fsdp_config") if isinstance(values.get("fsdp_config"), dict) else None
    options = {o.name: o for o in options_of(SFTConfig)}
    config = SFTConfig(**{name: convert(options[name], value, name) for name, value in values.items()})
    if section:
        config.fsdp_config = section  # transformers' arguments hold the file's content
    return config, notes


def _from_training_arguments(args: Any) -> tuple[dict[str, Any], list[str]]:
    if not dataclasses.is_dataclass(args):
        raise ConfigError(f"args is {type(args).__name__}; expected an SFTConfig, TrainingArguments or a dict.")
    taken, unused = {}, []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        plain = getattr(value, "value", value)  # transformers' enums
        if field.name in _by_name() and not (field.name == "fsdp" and not plain):
            taken[field.name] = ",".join(plain) if isinstance(plain, list) else plain
        elif field.default is not dataclasses.MISSING and value != field.default and _set_by_user(field.name, value):
            unused.append(field.name)
    kwargs = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    if "use_reentrant" in kwargs:
        taken["use_reentrant"] = kwargs["use_reentrant"]
    taken = {k: v for k, v in taken.items() if v is not None}
    if taken.get("report_to") in ("all", ""):
        del taken["report_to"]  # transformers' defaults, not the user's choice
    notes = [f"{type(args).__name__}: {', '.join(unused)} are not used here"] if unused else []
    return taken, notes


def _set_by_user(name: str, value: Any) -> bool:
    return name not in FILLED_IN and not name.startswith(FILLED_IN_PREFIXES) and bool(value)
