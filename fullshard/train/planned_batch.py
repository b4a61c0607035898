"""The largest micro-batch of a run, for its plan: from the rows of its data where they are known, else full rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fullshard.capacity.step_trace import BatchShape
from fullshard.data.loader import cached_table
from fullshard.data.sources import hold_back
from fullshard.errors import UserError
from fullshard.models.attention import is_own
from fullshard.models.attention_masks import BLOCK
from fullshard.models.inner_model import causal
from fullshard.models.rope_scaling import longest_document
from fullshard.models.router_loss import has_router_loss
from fullshard.settings.sft_config import SFTConfig
from fullshard.train.batches import make_collator, text_settings
from fullshard.train.dataset_options import find
from fullshard.train.model import prepared_tokenizer, read_tokenizer
from fullshard.train.read_model import uses_flash

CONTEXT = 2048
"""Tokens of a row if neither the settings nor the model limit them."""


def largest_shape(config: SFTConfig, model: Any, lengths: Sequence[int]) -> BatchShape:
    """The shape of a micro-batch of the longest rows, as the data loader pads them."""
    rows = config.per_device_train_batch_size
    block = BLOCK if is_own(causal(model).config) else None
    collator = make_collator(config, 0, uses_flash(causal(model)), has_router_loss(model), block=block)
    longest = sorted(lengths)[-rows:]
    length = collator.padded(int(sum(longest) if collator.flatten else longest[-1]))
    return BatchShape(1 if collator.flatten else rows, length, config.gradient_accumulation_steps, config.keeps_apart)


def assumed_length(config: SFTConfig, model: Any) -> tuple[int, str]:
    """The length of rows if the data is not looked at, and where it comes from."""
    if config.max_length is not None:
        return config.max_length, "max_length"
    context = longest_document(causal(model).config)
    return (context, "the model's context") if context is not None else (CONTEXT, "neither data nor model limit it")


def lengths_of_data(config: SFTConfig, place: Any, adapter: Any) -> tuple[Sequence[int] | None, str]:
    """The lengths of all rows of the training data, if it is here and has been tokenized for this run; and a note for
    the user."""
    if config.dataset_name is None:
        return None, "no data was named"
    try:
        tokenizer = read_tokenizer(config, place, adapter)
        prepared_tokenizer(config, tokenizer)
        source = find(config).train
        if config.val_size:
            source, _ = hold_back(source, config.val_size, config.seed, config.streaming)
        table = None if config.streaming else cached_table(source, tokenizer, text_settings(config, tokenizer), config.cache_dir)
    except UserError as error:
        return None, f"the data cannot be read here ({error})"
    if table is None:
        return None, "the data has not been tokenized yet (fullshard sft … --preview does that)"
    return np.asarray(table.row_sizes).tolist(), f"rows are those of {config.dataset_name}"
