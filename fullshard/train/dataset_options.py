"""Settings that one of several data sets has for itself (`dataset_settings`): how its rows are read and written out.

Each data set is described by a whole configuration, the run's with its own settings over it. Nothing here imports
torch; where data lies is said in `data/find_dataset.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fullshard.data.chat_template import Template, choose
from fullshard.data.find_dataset import names_of
from fullshard.data.row_formats import Reading, reading_of
from fullshard.errors import ConfigError
from fullshard.options import convert, nearest, options_of
from fullshard.train.config import SFTConfig

TEMPLATE = ("chat_template_format", "chat_template_path")
OWN = ("dataset_columns", "dataset_text_field", "prompt_format", "on_bad_row", "sample_by", *TEMPLATE)
"""Options that a data set may have for itself."""


def configs_of(config: SFTConfig) -> list[SFTConfig]:
    """The settings of each data set that `dataset_name` names; [] where none has any for itself."""
    given = config.dataset_settings or {}
    if not given:
        return []
    names = names_of(config.dataset_name or "")
    for name in given:
        if name not in names:
            raise ConfigError(
                f"dataset_settings names {name!r}{nearest(str(name), names)}; expected one of the data sets in "
                f"dataset_name ({', '.join(names) or 'none'})."
            )
    return [_own(config, name) for name in names]


def _own(config: SFTConfig, name: str) -> SFTConfig:
    given = (config.dataset_settings or {}).get(name) or {}
    options = {option.name: option for option in options_of(SFTConfig)}
    if not isinstance(given, dict):
        raise ConfigError(f"dataset_settings: {name} is {given!r}; expected options and their values.")
    for key in given:
        if key not in OWN:
            raise ConfigError(
                f"dataset_settings: {name}: a data set cannot have its own {key!r}{nearest(str(key), OWN)}; expected "
                f"{', '.join(OWN)}."
            )
    values = {key: convert(options[key], value, f"dataset_settings: {name}: {key}") for key, value in given.items()}
    if values.get("chat_template_format") == "none":
        raise ConfigError(f"dataset_settings: {name}: chat_template_format is none; leave it out for the run's own.")
    if "chat_template_format" in values:
        values.setdefault("chat_template_path", None)
    return dataclasses.replace(config, **values, dataset_settings=None)


def reading(config: SFTConfig) -> Reading:
    """How rows are read under these settings."""
    return reading_of(config.dataset_text_field, config.dataset_columns, config.on_bad_row, config.prompt_format)


def templates_of(config: SFTConfig) -> list[Template | None]:
    """The template of each data set's own; None for that of the run."""
    return [
        choose(own.chat_template_format, own.chat_template_path)
        if any(getattr(own, name) != getattr(config, name) for name in TEMPLATE)
        else None
        for own in configs_of(config)
    ]


def needed(templates: Sequence[Template | None]) -> list[str]:
    """What the templates of data sets would like to be single tokens."""
    return list(dict.fromkeys(mark for template in templates if template for mark in template.markers))
