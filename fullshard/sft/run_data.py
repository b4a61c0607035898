"""The data that the settings name: the data sets and how they are combined, the options that one of several has for
itself (`dataset_settings`), and the prompts in a file for sample generations.

Each data set is described by a whole configuration: the run's, with its own settings over it. Nothing here imports
torch, so that wrong data are reported before anything starts. How a name becomes files is in `data/find_dataset.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_list, convert, nearest, options_of
from fullshard.data.chat_template import Template, choose
from fullshard.data.find_dataset import check_first_rows, find_data, is_stream, names_of, source_of, split_names
from fullshard.data.messages import messages_of, template_kwargs_of, tools_of
from fullshard.data.raw_row import BadRow
from fullshard.data.row_formats import Reading, reading_of
from fullshard.data.sources import DataSource, chain, mix, numbered, shuffled
from fullshard.sft.sft_config import SFTConfig

TEMPLATE = ("chat_template_format", "chat_template_path")
OWN = ("dataset_columns", "dataset_text_field", "prompt_format", "on_bad_row", "sample_by", *TEMPLATE)
"""Options that a data set may have for itself."""
EXPECTED = (
    'expected {"messages": [{"role": …, "content": …}, …]} or {"prompt": …}, and "reference", "tools" and '
    '"chat_template_kwargs" if there are any'
)


class RunData(NamedTuple):
    """The training data, and the evaluation data if there is a split for it."""

    train: DataSource
    evaluation: DataSource | None


def find_run_data(config: SFTConfig, check_rows: bool = False) -> RunData:
    """The data that the settings name: several data sets one after the other, or mixed by their weights.

    The evaluation data is that of all data sets which have some; with `val_size` it is split off the training data
    later. With `check_rows`, data without rows, and files that begin with a row that cannot be used, are refused.
    """
    splits = split_names(config.splits)
    evaluates = config.eval_strategy != "no" and not config.val_size
    names = names_of(str(config.dataset_name))
    if not names:
        raise ConfigError("dataset_name is empty; expected a file, a folder or a name on the hub.")
    weights = _weights(config.dataset_weights, names)
    own = dataset_configs(config)
    sets = [
        find_data(name, splits, evaluates, config.dataset_config_name, config.streaming, each.sample_by)
        for name, each in zip(names, own or [config] * len(names), strict=True)
    ]
    evaluation = [second for _, second in sets if second is not None]
    if evaluates and not evaluation:
        missing = f"has no split {splits[1]!r}" if len(splits) > 1 else f"is asked for the split {splits[0]!r} alone"
        raise ConfigError(
            f"evaluation is on (eval_strategy {config.eval_strategy}), but {config.dataset_name} {missing}; name one "
            f"in splits, or hold out rows with val_size."
        )
    for (first, second), each in zip(sets, own or [config] * len(sets), strict=True):
        for source in filter(None, (first, second) if check_rows else ()):
            check_first_rows(source, row_reading(each))
    if own:
        sets = [(numbered(a, i), None if b is None else numbered(b, i)) for i, (a, b) in enumerate(sets)]
    train, evaluation = [first for first, _ in sets], [second for _, second in sets if second is not None]
    mixed = mix(train, weights, config.stopping_strategy) if weights else chain(train)
    test = chain(evaluation) if evaluation else None
    if config.shuffle_dataset:
        return RunData(shuffled(mixed, config.seed), None if test is None else shuffled(test, config.seed))
    return RunData(mixed, test)


# --- data of a script -----------------------------------------------------------------------------------------------


def script_source(
    data: Any, name: str, config: SFTConfig, formatting: Callable[[Any], str] | None = None
) -> DataSource:
    """The source of data that a script gives; `formatting` makes the text of each row."""
    shuffles = config.shuffle_dataset
    if shuffles and hasattr(data, "shuffle") and not isinstance(data, list | str | Path):
        data, shuffles = data.shuffle(seed=config.seed), False  # as `datasets` does it, and so TRL
    if formatting is not None:
        data = _formatted(data, formatting, config.dataset_text_field)
    source = source_of(data, name, config.sample_by, config.skip_prepare_dataset and config.streaming)
    return shuffled(source, config.seed) if shuffles else source


def _formatted(data: Any, formatting: Callable[[Any], str], text_field: str) -> Any:
    """Rows of text, as the script's function formats them."""

    def text(row: Any) -> dict[str, str]:
        if "input_ids" in row:
            raise ConfigError("formatting_func: the rows are tokenized already (input_ids); leave it out.")
        return {text_field: formatting(row)}

    if not is_stream(data):
        return [text(row) for row in data]
    columns = data.column_names or list(next(iter(data), {}))
    return data.map(text, remove_columns=[column for column in columns if column != text_field])


def stream_if_iterable(config: SFTConfig, train_dataset: Any, notes: list[str]) -> SFTConfig:
    """The settings for this training data: an iterable dataset is streamed, in its own order."""
    if config.streaming or not is_stream(train_dataset):
        return config
    notes.append("train_dataset is iterable: it is streamed, in its own order.")
    return dataclasses.replace(config, streaming=True, train_sampling_strategy="sequential")


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


# --- options of one data set ----------------------------------------------------------------------------------------


def dataset_configs(config: SFTConfig) -> list[SFTConfig]:
    """The settings of each data set that `dataset_name` names; [] where none has its own."""
    settings = config.dataset_settings or {}
    if not settings:
        return []
    names = names_of(config.dataset_name or "")
    for name in settings:
        if name not in names:
            raise ConfigError(
                f"dataset_settings names {name!r}{nearest(str(name), names)}; expected one of the data sets in "
                f"dataset_name ({', '.join(names) or 'none'})."
            )
    return [_own(config, name) for name in names]


def _own(config: SFTConfig, name: str) -> SFTConfig:
    own = (config.dataset_settings or {}).get(name) or {}
    options = {option.name: option for option in options_of(SFTConfig)}
    if not isinstance(own, dict):
        raise ConfigError(f"dataset_settings: {name} is {own!r}; expected options and their values.")
    for key in own:
        if key not in OWN:
            raise ConfigError(
                f"dataset_settings: {name}: a data set cannot have its own {key!r}{nearest(str(key), OWN)}; expected "
                f"{', '.join(OWN)}."
            )
    values = {key: convert(options[key], value, f"dataset_settings: {name}: {key}") for key, value in own.items()}
    if values.get("chat_template_format") == "none":
        raise ConfigError(f"dataset_settings: {name}: chat_template_format is none; leave it out for the run's own.")
    if "chat_template_format" in values:
        values.setdefault("chat_template_path", None)
    return dataclasses.replace(config, **values, dataset_settings=None)


def row_reading(config: SFTConfig) -> Reading:
    """How rows are read under these settings."""
    return reading_of(
        config.dataset_text_field, config.dataset_columns, config.on_bad_row, config.prompt_format,
        config.skip_prepare_dataset,
    )  # fmt: skip


def dataset_templates(config: SFTConfig) -> list[Template | None]:
    """The chat template of each data set that has its own settings; None for the run's template."""
    return [
        choose(own.chat_template_format, own.chat_template_path)
        if any(getattr(own, name) != getattr(config, name) for name in TEMPLATE)
        else None
        for own in dataset_configs(config)
    ]


def template_markers(templates: Sequence[Template | None]) -> list[str]:
    """The strings that the templates of data sets need as single tokens."""
    return list(dict.fromkeys(mark for template in templates if template for mark in template.markers))


# --- prompts of sample generations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A conversation to answer, and the expected answer where there is one."""

    messages: tuple[dict[str, Any], ...]
    reference: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    """The tools that the chat template describes to the model."""
    template_kwargs: dict[str, Any] | None = None
    """Additional variables for the chat template."""


def read_prompts(name: str) -> list[Question]:
    """The prompts in a file. An assistant's turn at the end of a conversation becomes the reference."""
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"sample_prompts: {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"sample_prompts: {path} is not UTF-8 text.") from None
    json_lines = path.suffix in (".jsonl", ".json", ".ndjson")
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompts.append(_from_json(line, f"{path}:{number}") if json_lines else _user_turn(line.strip()))
    if not prompts:
        raise ConfigError(f"sample_prompts: {path} holds no prompt.")
    return prompts


def _user_turn(text: str, reference: str | None = None) -> Question:
    return Question(({"role": "user", "content": text},), reference)


def _from_json(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"sample_prompts: {where} is not JSON ({error}); {EXPECTED}.") from None
    row = row if isinstance(row, dict) else {}
    messages, prompt, reference = row.get("messages"), row.get("prompt"), row.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise ConfigError(f"sample_prompts: {where}: reference is {reference!r}; expected text.")
    if isinstance(prompt, str) and prompt.strip():
        return _user_turn(prompt, reference)
    try:
        turns = messages_of(messages, "messages")
        tools, template_kwargs = tools_of(row.get("tools")), template_kwargs_of(row.get("chat_template_kwargs"))
    except BadRow as bad:
        raise ConfigError(f"sample_prompts: {where}: {EXPECTED}; got {line[:120]} ({bad.why})") from None
    if turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]
        reference = reference or answer
    if not turns:
        raise ConfigError(f"sample_prompts: {where} holds an answer without a prompt.")
    return Question(tuple(turns), reference, tools, template_kwargs)
