"""The command line of `fullshard sft`: one YAML file and/or flags, flags over the file, into an `SFTConfig`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.configfile import SUFFIXES, read_file, sort_keys
from fullshard.data.find_dataset import check_first_rows, find_data, names_of, split_names
from fullshard.data.sources import DataSource, chain, mix, numbered
from fullshard.errors import ConfigError
from fullshard.options import as_list, options_of, parse_flags
from fullshard.paths import Inputs, held, looks_local
from fullshard.train import run_dir
from fullshard.train.config import REPORT_TO, SFTConfig
from fullshard.train.dataset_options import configs_of, reading
from fullshard.train.prompts import read_prompts
from fullshard.train.start import check_template_path, starting_point


@dataclass(frozen=True)
class Arguments:
    """A command line, understood."""

    config: SFTConfig
    notes: list[str]


class Data(NamedTuple):
    """What a run trains on, and what it is evaluated on, if that is given apart."""

    train: DataSource
    evaluation: DataSource | None


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


def check_paths(config: SFTConfig) -> Data:
    """What can be said about the run's paths before anything heavy is imported; returns the data, yet unread."""
    model, earlier = starting_point(config.model_name_or_path, config.adapter_name_or_path)
    for name, value in (("model_name_or_path", model or earlier), ("dataset_name", config.dataset_name)):
        if value is None:
            raise ConfigError(f"{name} is missing; give --{name}.")
    if model is not None:
        check_model_folder(str(model))
    if config.tokenizer_name_or_path:
        check_model_folder(config.tokenizer_name_or_path, "tokenizer_name_or_path", "tokenizer_config.json")
    for each in (config, *configs_of(config)):
        if each.chat_template_path:
            check_template_path(each.chat_template_path)
    if config.sample_prompts:
        read_prompts(config.sample_prompts)
    check_report_to(config.report_to)
    return find(config)


def check_report_to(named: str) -> None:
    """What is asked for by name must be installed."""
    for name in as_list(named):
        if name in REPORT_TO and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"report_to names {name}, which is not installed; pip install {name}, or leave report_to out: "
                f"metrics.jsonl is always written."
            )


def inputs_of(config: SFTConfig, data: Data) -> Inputs:
    """What the run reads here; as far as paths can tell."""
    model, adapter = starting_point(config.model_name_or_path, config.adapter_name_or_path)
    return run_dir.inputs_of(config, model, adapter, data)


def find(config: SFTConfig) -> Data:
    """The data that the settings name: several sets one after the other, or mixed by their weights. Evaluation data is
    that of all sets which have some; with `val_size` it is held back from the training data later on."""
    splits = split_names(config.splits)
    evaluates = config.eval_strategy != "no" and not config.val_size
    names = names_of(str(config.dataset_name))
    if not names:
        raise ConfigError("dataset_name is empty; expected a file, a folder or a name on the hub.")
    weights = _weights(config.dataset_weights, names)
    own = configs_of(config)
    sets = [
        find_data(name, splits, evaluates, config.dataset_config_name, config.streaming, each.sample_by)
        for name, each in zip(names, own or [config] * len(names), strict=True)
    ]
    evaluation = [second for _, second in sets if second is not None]
    if evaluates and not evaluation:
        missing = f"has no split {splits[1]!r}" if len(splits) > 1 else f"is asked for the split {splits[0]!r} alone"
        raise ConfigError(
            f"evaluation is on (eval_strategy {config.eval_strategy}), but {config.dataset_name} {missing}; name one "
            f"in splits, or hold rows back with val_size."
        )
    for (first, second), each in zip(sets, own or [config] * len(sets), strict=True):
        for source in filter(None, (first, second)):
            check_first_rows(source, reading(each))
    if own:
        sets = [(numbered(a, i), None if b is None else numbered(b, i)) for i, (a, b) in enumerate(sets)]
    train, evaluation = [first for first, _ in sets], [second for _, second in sets if second is not None]
    mixed = mix(train, weights, config.stopping_strategy) if weights else chain(train)
    return Data(mixed, chain(evaluation) if evaluation else None)


def _weights(text: str | None, names: list[str]) -> list[float]:
    if text is None:
        return []
    try:
        weights = [float(word) for word in as_list(text)]
    except ValueError:
        weights = []
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"dataset_weights is {text!r}; expected numbers above 0, one per data set.")
    if len(weights) != len(names):
        raise ConfigError(
            f"dataset_weights has {len(weights)} numbers, dataset_name {len(names)} data sets ({', '.join(names)}); "
            f"expected one each."
        )
    return weights


def check_model_folder(name: str, option: str = "model_name_or_path", needs: str = "config.json") -> None:
    path = Path(name).expanduser()
    if path.is_dir() and not (path / needs).is_file():
        raise ConfigError(f"{option}: {path} has no {needs}; it holds {held(path)}.")
    if path.is_file():
        raise ConfigError(f"{option}: {path} is a file; expected the folder that holds {needs}.")
    if looks_local(name) and not path.exists():
        raise ConfigError(f"{option}: {path} does not exist.")
