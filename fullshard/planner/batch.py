"""The largest batch of a run, which its memory depends on.

It follows from the data of a run that begins, from rows on this machine, or from the longest that settings allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config.errors import UserError, first_line
from fullshard.data.find_dataset import names_of
from fullshard.data.loader import Collator, Step, cached_table
from fullshard.data.sources import hold_back
from fullshard.data.token_table import TokenTable
from fullshard.models.attention import is_own
from fullshard.models.attention_masks import BLOCK
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.rope_scaling import longest_document
from fullshard.models.router_loss import has_router_loss
from fullshard.sft.base_model import uses_flash
from fullshard.sft.batches import StepLoader, Steps, make_collator, text_settings
from fullshard.sft.run_data import find_run_data
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.vocabulary import prepared_tokenizer, read_tokenizer

CONTEXT = 2048
"""Tokens of a row if neither the settings nor the model limit them."""


@dataclass(frozen=True)
class BatchShape:
    """The batches of a step on one rank."""

    rows: int
    """Sequences in a micro-batch."""
    length: int
    """Tokens in a sequence."""
    accumulation: int = 1
    """Micro-batches in a step."""
    packed: bool = False
    """Whether a row holds several documents that must not attend to each other."""
    routing_imbalance: float = 1.0
    """How many times the mean of tokens the busiest expert of a mixture gets."""

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.rows * self.length

    def scale(self, step: Step, quadratic: bool = False) -> float:
        """How much more activation memory this batch needs than a step does; `quadratic` is whether attention keeps a
        value for each pair of tokens."""
        shapes = [batch["input_ids"].shape for batch in step.batches]
        tokens, length = max(rows * length for rows, length in shapes), max(length for _, length in shapes)
        return max(1.0, self.tokens / tokens * (max(1.0, self.length / length) if quadratic else 1.0))


def bounds_batches(config: SFTConfig) -> bool:
    """Whether the largest batch of the engine's own data loader is known before it is loaded."""
    return not config.streaming or (config.max_length is not None and not config.skip_prepare_dataset)


def largest_shape(config: SFTConfig, model: Any, lengths: Sequence[int]) -> BatchShape:
    """The shape of a micro-batch of the longest rows, as the data loader pads them."""
    block = BLOCK if is_own(get_causal_lm(model).config) else None
    collator = make_collator(config, 0, uses_flash(get_causal_lm(model)), has_router_loss(model), block=block)
    return _padded_shape(config, collator, sorted(lengths)[-config.per_device_train_batch_size :])


def largest_in_data(config: SFTConfig, steps: Steps | None) -> BatchShape | None:
    """The shape of the largest micro-batch of a run's training data; None if it cannot be known."""
    collator, rows = getattr(steps, "collate_fn", None), config.per_device_train_batch_size
    if not isinstance(steps, StepLoader) or not isinstance(collator, Collator):
        return None
    if isinstance(steps.dataset, TokenTable):
        return _padded_shape(config, collator, np.sort(steps.dataset.row_sizes[:])[-rows:].tolist())
    if bounds_batches(config) and config.max_length is not None:
        return _padded_shape(config, collator, [config.max_length] * rows)
    return None


def _padded_shape(config: SFTConfig, collator: Collator, longest: Sequence[int]) -> BatchShape:
    """The shape of a micro-batch of these rows."""
    length = collator.padded(sum(longest) if collator.flatten else max(longest))
    rows = 1 if collator.flatten else config.per_device_train_batch_size
    return BatchShape(rows, length, config.gradient_accumulation_steps, config.keeps_apart)


def evaluation_shape(config: SFTConfig, batch: BatchShape) -> BatchShape | None:
    """The largest batch of evaluations, of rows like the longest that are trained; None if there are none."""
    if config.eval_strategy == "no":
        return None
    trained, rows = config.per_device_train_batch_size, config.per_device_eval_batch_size
    packed = batch.packed and config.eval_packing is not False
    if batch.rows == 1 < trained:  # the rows of a batch are one
        return replace(batch, rows=1, length=batch.length * rows // trained, accumulation=1, packed=packed)
    return replace(batch, rows=rows, accumulation=1, packed=packed)


def assumed_length(config: SFTConfig, model: Any) -> tuple[int, str]:
    """The length of rows if the data is not looked at, and where it comes from."""
    if config.max_length is not None:
        return config.max_length, "max_length"
    context = longest_document(get_causal_lm(model).config)
    return (context, "the model's context") if context is not None else (CONTEXT, "neither data nor model limit it")


def lengths_of_data(config: SFTConfig, model: Any, adapter: Any) -> tuple[Sequence[int] | None, str]:
    """The lengths of all rows of the training data, if it is here and has been tokenized for this run; and a note for
    the user. Nothing is downloaded or tokenized."""
    if config.dataset_name is None:
        return None, "no data was named"
    places = [*names_of(config.dataset_name), config.tokenizer_name_or_path or str(model or adapter)]
    if not all(Path(place).expanduser().exists() for place in places):
        return None, f"{config.dataset_name} and its tokenizer are not both on this machine"
    try:
        tokenizer = read_tokenizer(config, model, Path(adapter).expanduser() if adapter is not None else None)
        prepared_tokenizer(config, tokenizer)
        source = find_run_data(config).train
        if config.val_size:
            source, _ = hold_back(source, config.val_size, config.seed, config.streaming)
        settings = text_settings(config, tokenizer)
        table = None if config.streaming else cached_table(source, tokenizer, settings, config.cache_dir)
    except UserError as error:
        return None, f"{config.dataset_name} cannot be read ({first_line(error)})"
    if table is None:
        return None, f"{config.dataset_name} has not been tokenized yet, which fullshard sft with --preview does"
    return table.row_sizes[:].tolist(), f"they are those of {config.dataset_name}"
