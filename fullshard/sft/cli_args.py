"""Settings of a run from where users write them: the command line of `fullshard sft` and its YAML file, a dict, or the
arguments of transformers' and TRL's trainers. All of them become an `SFTConfig`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullshard.config.configfile import SUFFIXES, read_file, sort_keys
from fullshard.config.errors import ConfigError
from fullshard.config.options import Option, names_of, nearest, options_of, parse_flags
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.unused_options import named_settings, notes_without_effect, turn_on_lora

# --- the command line -----------------------------------------------------------------------------------------------


@dataclass
class CommandConfig(SFTConfig):
    """The settings of `fullshard sft`. They are those of scripts, with these defaults of PEFT's training script."""

    learning_rate: float = 5e-5
    gradient_checkpointing: bool | str = False
    bf16: bool | None = False
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = "auto"
    add_special_tokens: bool | None = False
    report_to: str = "auto"
    logging_steps: float | None = None


def command_options() -> tuple[Option, ...]:
    """The options of `fullshard sft`."""
    return tuple(one for one in options_of(CommandConfig) if not one.script_only)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    config: SFTConfig
    notes: list[str]
    """What was interpreted, for the user to read."""


def parse(words: Sequence[str], command: str = "sft") -> Arguments:
    """Settings from `[run.yaml] [--flag value …]`; flags override the file. `command` names itself in errors."""
    notes, values = list[str](), dict[str, Any]()
    left = list(words)
    if left and not left[0].startswith("-"):
        values = read_yaml(left.pop(0), notes)
    flags = parse_flags(left, command_options(), command)
    if flags.rest:
        hint = "The file of settings comes first." if Path(flags.rest[0]).suffix in SUFFIXES else "Flags begin with --."
        raise ConfigError(f"{command}: {flags.rest[0]!r} is not a flag. {hint}")
    values |= flags.values
    if note := turn_on_lora(values):
        notes.append(note)
    config = CommandConfig(**values)
    return Arguments(config, notes + notes_without_effect(config, named_settings(values, CommandConfig)))


def read_yaml(path: str, notes: list[str]) -> dict[str, Any]:
    """The settings in a YAML or JSON file."""
    return sort_keys(read_file(path), command_options(), notes).values


# --- the `args` of a trainer ----------------------------------------------------------------------------------------

LIBRARIES = ("transformers", "trl")
"""Packages whose classes of settings are taken whole. Fields that a script's own subclass adds are the script's."""


def config_of(args: Any, **more: Any) -> tuple[SFTConfig, list[str]]:
    """The settings in a trainer's `args`, with notes for the user. `more` overrides them.

    `args` is an `SFTConfig`, a mapping, transformers' `TrainingArguments` or TRL's `SFTConfig`, or None.
    """
    more = {name: value for name, value in more.items() if value is not None}
    if isinstance(args, SFTConfig):
        config = copy.copy(args)
        for name, value in more.items():
            setattr(config, name, value)
        SFTConfig.__post_init__(config)  # the script may have changed it since
    else:
        values = args if isinstance(args, dict) else {} if args is None else _from_training_arguments(args)
        config = SFTConfig(**{**values, **more})
        config._script_args = None if isinstance(args, dict) else args
    named = {one.name for one in options_of(SFTConfig) if _is_set(config, one)}
    return config, notes_without_effect(config, named, script=True)


def _from_training_arguments(args: Any) -> dict[str, Any]:
    """Every setting of the object, whatever its value. One that is not known here must be at its default."""
    if not dataclasses.is_dataclass(type(args)):
        raise ConfigError(f"args is {type(args).__name__}; expected an SFTConfig, TrainingArguments or a dict.")
    names, taken, unknown = names_of(SFTConfig), {}, []
    for field in dataclasses.fields(args):
        if field.name in names:
            taken[field.name] = getattr(args, field.name)
        elif field.init and _owner(type(args), field.name) in LIBRARIES:
            unknown.append(field.name)
    if taken.get("torch_compile") is False:
        del taken["torch_compile"]  # their default, which leaves it open here
    if unknown:
        plain = type(args)(output_dir=args.output_dir)  # what the class fills in was not set by the user
        for name in unknown:
            if getattr(args, name) != getattr(plain, name):
                raise ConfigError(
                    f"{type(args).__name__} has {name}={getattr(args, name)!r}, a setting that is not supported here; "
                    f"leave it out.{nearest(name, names)}"
                )
    return taken


def _owner(kind: type, name: str) -> str:
    """The package of the class that a field comes from."""
    owner = next(base for base in reversed(kind.__mro__) if name in inspect.get_annotations(base))
    return owner.__module__.partition(".")[0]


def _is_set(config: SFTConfig, one: Option) -> bool:
    """Whether the user has set an option; transformers fills in some."""
    filled_in = ("do_train", "do_eval", "do_predict", "local_rank")
    return one.name not in filled_in and getattr(config, one.name) != one.default
