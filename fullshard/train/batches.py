"""The data of a run: tokenized data sets, the rows of each step, and the number of steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from fullshard import runtime
from fullshard.data.chat_template import template_of
from fullshard.data.encode import TextSettings
from fullshard.data.loader import BatchSampler, Collator, Loader, RowOrder, TableSampler, load_table
from fullshard.data.shared_pages import Pages
from fullshard.data.sources import DataSource, hold_back
from fullshard.data.stream import Stream, StreamSampler
from fullshard.data.token_table import TokenTable, unused_columns
from fullshard.ranks import agree
from fullshard.train.adapter import Say
from fullshard.train.config import SFTConfig
from fullshard.train.dataset_options import configs_of, reading, templates_of
from fullshard.train.model import check_rows

EVALUATION = "evaluation"
"""The names of data that `eval_packing` applies to begin with this."""


def load_data(
    config: SFTConfig, model: Any, tokenizer: Any, train: DataSource | None, evaluation: DataSource | None, say: Say
) -> tuple[TokenTable | Stream | None, TokenTable | None]:
    """The tokens of the training and the evaluation data, checked against the model. All ranks must call it."""
    if config.val_size and train is not None:
        train, evaluation = hold_back(train, config.val_size, config.seed, config.streaming)
    table = functools.partial(checked_table, config, model, tokenizer, say)
    rows: TokenTable | Stream | None = None
    if train is not None and config.streaming:
        rows = make_stream(config, train, tokenizer, functools.partial(check_rows, model))
    elif train is not None:
        rows = table("training", train)
    return rows, table(EVALUATION, evaluation) if evaluation is not None else None


def checked_table(config: SFTConfig, model: Any, tokenizer: Any, say: Say, name: str, source: DataSource) -> TokenTable:
    """The tokens of a data set, checked against the model; its `name` is training, or begins with evaluation. All ranks
    must call it."""
    table = make_table(config, source, tokenizer, name)
    say(describe_data(name, table.facts, config))
    agree(functools.partial(check_rows, model, table), f"check of the {name} data")
    return table


def text_settings(config: SFTConfig, tokenizer: Any, name: str = "training") -> TextSettings:
    """How rows of this data become tokens; `name` as for `checked_table`."""
    packs = config.packing if not name.startswith(EVALUATION) or config.eval_packing is None else config.eval_packing
    as_given = config.skip_prepare_dataset
    splits = packs and config.packing_strategy == "bfd_split"
    own, main = templates_of(config), template_of(tokenizer)
    sets = zip(configs_of(config), own, strict=True)
    return TextSettings(
        max_length=None if as_given else config.max_seq_len,
        packing=packs and not as_given,
        wrapped=config.packing_strategy == "wrapped",
        keep_rows=as_given and config.keeps_apart,
        add_special_tokens=config.add_special_tokens,
        append_concat_token=config.append_concat_token,
        assistant_only_loss=config.assistant_only_loss,
        completion_only_loss=config.completion_only_loss,
        last_turn_only_loss=config.last_turn_only_loss,
        template=main,
        overflow="split" if splits else config.overflow,
        truncation_mode=config.truncation_mode,
        reading=reading(config),
        data_sets=tuple((reading(each), main if template is None else template.text) for each, template in sets),
    )


def make_table(config: SFTConfig, source: DataSource, tokenizer: Any, name: str = "training") -> TokenTable:
    """The tokens of a data set, from the cache or tokenized now. All ranks must call it."""
    text = text_settings(config, tokenizer, name)
    return load_table(source, tokenizer, text, config.cache_dir, config.tokenizing_processes, config.progress)


def make_stream(
    config: SFTConfig, source: DataSource, tokenizer: Any, check: Callable[[TokenTable], None] = lambda page: None
) -> Stream:
    """A data set that is tokenized during training; `check` refuses tokens that the model cannot take."""
    text = text_settings(config, tokenizer)
    pages = Pages(source, tokenizer, text, config.shuffle_buffer_size, config.tokenizing_processes)
    return Stream(pages, config.cache_dir, check)


def make_loader(config: SFTConfig, data: TokenTable | Stream, pad_token_id: int, flash: bool) -> Loader:
    """This rank's batches, step by step. FlashAttention takes packed rows as one, without padding."""
    apart = config.keeps_apart
    flatten = config.padding_free or (apart and flash)
    collator = Collator(pad_token_id, apart, flatten, config.pad_to_multiple_of)
    size, workers = config.per_device_train_batch_size, config.dataloader_num_workers
    return Loader(feed_of(config, data), collator, size, runtime.rank(), runtime.world_size(), workers)


def feed_of(config: SFTConfig, data: TokenTable | Stream) -> BatchSampler:
    """The rows of each step: a function of the data, the seed and the global batch size alone."""
    batch = config.per_device_train_batch_size * runtime.world_size() * config.gradient_accumulation_steps
    seed = config.data_seed if config.data_seed is not None else config.seed
    shuffle = config.train_sampling_strategy == "random"
    if isinstance(data, Stream):
        return StreamSampler(data, batch, seed, shuffle, config.dataloader_drop_last)
    return TableSampler(data, RowOrder(len(data), batch, seed, shuffle, config.dataloader_drop_last))


def total_steps(config: SFTConfig, data: TokenTable | Stream) -> int:
    """The number of optimizer steps of the run."""
    if config.max_steps > 0:
        return config.max_steps
    feed = feed_of(config, data)
    assert isinstance(feed, TableSampler), "the length of a stream is unknown"
    return max(1, math.ceil(config.num_train_epochs * feed.order.steps_per_epoch))


def describe_data(name: str, facts: dict[str, Any], config: SFTConfig) -> str:
    """One line of dataset statistics: documents, rows, tokens, and everything that was dropped or truncated."""
    length = config.max_seq_len or 0
    packs = facts.get("packing", config.packing)
    fill = f", rows {facts['tokens'] / max(1, facts['rows'] * length):.1%} full" if packs else ""
    line = f"{name} data: {facts['documents']:,} documents in {facts['rows']:,} rows, {facts['tokens']:,} tokens, "
    line += f"{facts['targets']:,} of them trained{fill}"
    if facts["long"]:
        overflow = facts.get("overflow", config.overflow)
        done = {"truncate": "truncated", "split": "split", "drop": "dropped"}[overflow]
        line += f"; {facts['long']:,} documents longer than {length} tokens were {done}"
        line += f" ({facts['cut']:,} tokens lost; overflow split keeps them)" if facts["cut"] else ""
    if facts["empty"]:
        line += f"; {facts['empty']:,} empty rows were dropped"
    if facts["masked"]:
        line += f"; {facts['masked']:,} documents without trained tokens were dropped"
    if facts["packed"] and not config.keeps_apart:
        line += f"; {facts['packed']:,} packed rows were split into their documents (packing keeps them together)"
    for name, count in unused_columns(facts).items():
        line += f"; `{name}` is not used (in {count:,} rows)"
    if facts["bad"]:
        line += f"; {facts['bad']:,} rows in an unknown format were dropped"
        line += "".join(f"\n  {row}" for row in facts.get("bad_rows", ()))
    return line
