"""A run's data in its steps: how text becomes tokens, which rows a step has, how many steps there are."""

from __future__ import annotations

import math
from typing import Any

from fullshard import runtime
from fullshard.data import chat
from fullshard.data.encode import TextSettings
from fullshard.data.loader import Collator, Loader, Order
from fullshard.data.tokens import TokenTable
from fullshard.train.config import SFTConfig


def text_settings(config: SFTConfig, tokenizer: Any) -> TextSettings:
    return TextSettings(
        max_length=config.max_seq_len,
        packing=config.packing,
        add_special_tokens=config.add_special_tokens,
        append_concat_token=config.append_concat_token,
        assistant_only_loss=config.assistant_only_loss,
        text_field=config.dataset_text_field,
        template=chat.choose_template(tokenizer, config.chat_template_format),
        overflow=config.overflow,
    )


def make_loader(config: SFTConfig, table: TokenTable, pad_token_id: int, flash: bool) -> Loader:
    """This rank's steps. Flash attention takes packed rows as one, without padding."""
    collator = Collator(pad_token_id, isolate=config.packing, flatten=config.packing and flash)
    size, workers = config.per_device_train_batch_size, config.dataloader_num_workers
    return Loader(table, order_of(config, table), collator, size, runtime.rank(), runtime.world_size(), workers)


def order_of(config: SFTConfig, table: TokenTable) -> Order:
    """The order of rows: a function of the seed and the global batch size alone."""
    batch = config.per_device_train_batch_size * runtime.world_size() * config.gradient_accumulation_steps
    seed = config.data_seed if config.data_seed is not None else config.seed
    shuffle = config.train_sampling_strategy == "random"
    return Order(len(table), batch, seed, shuffle, config.dataloader_drop_last)


def total_steps(config: SFTConfig, table: TokenTable) -> int:
    if config.max_steps > 0:
        return config.max_steps
    return max(1, math.ceil(config.num_train_epochs * order_of(config, table).steps_per_epoch))


def describe_data(name: str, table: TokenTable, config: SFTConfig) -> str:
    facts = table.facts
    fill = f", rows {facts['tokens'] / (facts['rows'] * config.max_seq_len):.0%} full" if config.packing else ""
    line = f"{name} data: {facts['documents']:,} documents in {facts['rows']:,} rows, {facts['tokens']:,} tokens, "
    line += f"{facts['targets']:,} of them learnt{fill}"
    if facts["long"]:
        done = {"truncate": "cut off", "split": "split", "drop": "left out"}[config.overflow]
        line += f"; {facts['long']:,} documents longer than {config.max_seq_len} tokens were {done}"
        line += f" ({facts['cut']:,} tokens lost; overflow split keeps them)" if facts["cut"] else ""
    return line
