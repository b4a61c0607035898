"""Settings from what a user hands to the trainer: our class, a dict, or the arguments of transformers' or TRL's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from fullshard.errors import ConfigError
from fullshard.options import convert, nearest, options_of
from fullshard.train.config import SFTConfig


@functools.cache
def _by_name() -> dict[str, str]:
    return {name: o.name for o in options_of(SFTConfig) for name in o.names}


def config_of(args: Any, **more: Any) -> tuple[SFTConfig, list[str]]:
    """Settings from what a user hands to the trainer, with notes: an `SFTConfig`, a mapping, transformers'
    `TrainingArguments` or TRL's `SFTConfig` (fields of the same name are taken), or None. `more` overrules."""
    given: dict[str, Any] = {}
    notes: list[str] = []
    if isinstance(args, SFTConfig):
        given = args.to_dict()
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
    config = make_config(values)
    if section:
        config.fsdp_config = section  # transformers' arguments hold the file's content
    return config, notes


def make_config(values: dict[str, Any]) -> SFTConfig:
    """A config from values of any right type, such as "1e-4" for a number."""
    options = {o.name: o for o in options_of(SFTConfig)}
    return SFTConfig(**{name: convert(options[name], value, name) for name, value in values.items()})


def _from_training_arguments(args: Any) -> tuple[dict[str, Any], list[str]]:
    if not dataclasses.is_dataclass(args):
        raise ConfigError(f"args is {type(args).__name__}; expected an SFTConfig, TrainingArguments or a dict.")
    taken, left = {}, []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        plain = getattr(value, "value", value)  # transformers' enums
        if field.name in _by_name() and not (field.name == "fsdp" and not plain):
            taken[field.name] = ",".join(plain) if isinstance(plain, list) else plain
        elif field.default is not dataclasses.MISSING and value != field.default and _meant(field.name, value):
            left.append(field.name)
    kwargs = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    if "use_reentrant" in kwargs:
        taken["use_reentrant"] = kwargs["use_reentrant"]
    taken = {k: v for k, v in taken.items() if v is not None}
    if taken.get("report_to") in ("all", ""):
        del taken["report_to"]  # transformers' defaults: nobody has asked for anything
    notes = [f"{type(args).__name__}: {', '.join(left)} are not used here"] if left else []
    return taken, notes


def _meant(name: str, value: Any) -> bool:
    """Whether a difference from the default is the user's: transformers fills some fields in itself."""
    filled = ("logging_dir", "gradient_checkpointing_kwargs", "accelerator_config", "model_init_kwargs", "disable_tqdm",
              "fsdp_config", "local_rank", "log_level_replica", "do_eval", "do_train")  # fmt: skip
    return name not in filled and not name.startswith(("_", "trackio", "torch_compile_", "hub_")) and bool(value)
