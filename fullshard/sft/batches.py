"""The data of a run: tokenized data sets, the rows of each step, and the number of steps."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from fullshard.config.errors import ConfigError
from fullshard.data.chat_template import template_of
from fullshard.data.encode import TextSettings
from fullshard.data.loader import (
    Batch,
    BatchSampler,
    Collator,
    GlobalBatch,
    Loader,
    RowOrder,
    Step,
    TableSampler,
    TokenRows,
    load_table,
    row_of,
)
from fullshard.data.node_stream import Pages
from fullshard.data.pretokenized import IGNORED
from fullshard.data.row_formats import bad_kinds
from fullshard.data.sources import DataSource, hold_back
from fullshard.data.stream import Stream, StreamSampler
from fullshard.data.token_table import TokenTable, unused_columns
from fullshard.distributed import data_ranks, engines, runtime
from fullshard.distributed.ranks import agree
from fullshard.models.token_loss import known_count
from fullshard.parallel.data_loader import RankLoader
from fullshard.sft.adapter import Say
from fullshard.sft.run_data import dataset_configs, dataset_templates, row_reading
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.vocabulary import beyond_training, check_rows_fit

EVALUATION = "evaluation"
"""The names of data that `eval_packing` applies to begin with this."""


def load_data(
    config: SFTConfig, model: Any, tokenizer: Any, train: DataSource | None,
    evaluation: DataSource | dict[str, DataSource] | None, say: Say,
) -> tuple[TokenTable | Stream | None, TokenTable | dict[str, TokenTable] | None]:  # fmt: skip
    """The tokens of the training and the evaluation data, checked against the model. All ranks must call it."""
    if config.val_size and train is not None:
        train, evaluation = hold_back(train, config.val_size, config.seed, config.streaming)
    table = functools.partial(checked_table, config, model, tokenizer, say)
    rows: TokenTable | Stream | None = None
    if train is not None and config.streaming:
        rows = make_stream(config, train, tokenizer, functools.partial(check_rows_fit, model))
    elif train is not None:
        rows = table("training", train)
    if isinstance(evaluation, dict):
        return rows, {name: table(f"{EVALUATION} ({name})", source) for name, source in evaluation.items()}
    return rows, table(EVALUATION, evaluation) if evaluation is not None else None


def checked_table(config: SFTConfig, model: Any, tokenizer: Any, say: Say, name: str, source: DataSource) -> TokenTable:
    """The tokens of a data set, checked against the model; its `name` is training, or begins with evaluation. All ranks
    must call it."""
    table = make_table(config, source, tokenizer, name)
    say(describe_data(name, table.facts, config))
    agree(functools.partial(check_rows_fit, model, table), f"check of the {name} data")
    if not name.startswith(EVALUATION) and (line := beyond_training(model, tokenizer, table)):
        say(line)
    return table


def text_settings(config: SFTConfig, tokenizer: Any, name: str = "training") -> TextSettings:
    """How rows of this data become tokens; `name` as for `checked_table`."""
    packs = config.packing if not name.startswith(EVALUATION) or config.eval_packing is None else config.eval_packing
    as_given = config.skip_prepare_dataset
    splits = packs and config.packing_strategy == "bfd_split"
    own, main = dataset_templates(config), template_of(tokenizer)
    sets = zip(dataset_configs(config), own, strict=True)
    return TextSettings(
        max_length=None if as_given else config.max_length,
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
        reading=row_reading(config),
        data_sets=tuple((row_reading(each), main if template is None else template.text) for each, template in sets),
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


def make_loader(config: SFTConfig, data: TokenTable | Stream, collator: Any, seen: bool = False) -> StepLoader:
    """This rank's batches of the training data, step by step."""
    size, workers = config.per_device_train_batch_size, config.dataloader_num_workers
    collator = with_fixed_shapes(config, collator, data, size)
    return StepLoader(make_sampler(config, data), data, collator, size, workers, seen)


def make_evaluation_loader(config: SFTConfig, data: TokenTable, collator: Any, seen: bool = False) -> StepLoader:
    """This rank's batches of every row once, in order; every rank takes part in every batch."""
    size = config.per_device_eval_batch_size
    order = RowOrder(len(data), size * data_ranks.data_devices(), seed=0, shuffle=False)
    return StepLoader(TableSampler(data, order), data, with_fixed_shapes(config, collator, data, size), size, 0, seen)


def with_fixed_shapes(config: SFTConfig, collator: Any, data: TokenTable | Stream, size: int) -> Any:
    """The collator for batches of `size` rows per device, all of one shape where each shape is a program of its own.

    Rows have the length of the longest one. With `pad_to_multiple_of` there may be several lengths.
    """
    if not engines.current().compiles_steps or not isinstance(collator, Collator):
        return collator
    longest = longest_row(config, data)
    least = 1 if config.pad_to_multiple_of else longest
    return dataclasses.replace(collator, rows=size * runtime.addressable_device_count(), length=least)


def make_collator(
    config: SFTConfig, pad_token_id: int, flash: bool, marks_padding: bool, seen: bool = False, collate: Any = None,
    block: int | None = None,
) -> Any:  # fmt: skip
    """What makes tensors of rows. FlashAttention takes packed rows as one, without padding. `marks_padding` is for
    routers of experts, which see padding too. Packed rows are padded to whole blocks of the attention, `block` tokens:
    their length then hardly ever changes.

    With `seen`, a script's own code gets the batches: they are as transformers' are. `collate` is a script's collator.
    """
    if collate is not None:
        return RowCollator(collate)
    apart = config.keeps_apart
    flatten = config.padding_free or (apart and flash)
    multiple: Any = config.pad_to_multiple_of or (1 if seen else block if apart and not flatten else None)
    mask = "attention_mask" if seen and not apart else "real_tokens" if marks_padding else None
    return Collator(pad_token_id, apart, flatten, multiple, mask)


def longest_row(config: SFTConfig, data: TokenTable | Stream) -> int:
    """The tokens of the longest row, or the most that a row may have where the data is streamed."""
    return int(data.row_sizes[:].max()) if isinstance(data, TokenTable) else config.max_length or 1


def describe_shapes(config: SFTConfig, data: TokenTable | Stream) -> str:
    """One line on the shapes of batches where each shape is a program of its own."""
    if config.pad_to_multiple_of:
        return f"XLA compiles a program for each length of rows: multiples of {config.pad_to_multiple_of} tokens."
    line = f"all rows are padded to {longest_row(config, data)} tokens: XLA compiles a program for each shape"
    if isinstance(data, TokenTable):
        padding = 1 - data.row_sizes[:].mean() / data.row_sizes[:].max()
        line += f" ({padding:.0%} is padding{'; packing fills rows' if padding > 0.3 and not config.packing else ''})"
    return f"{line}."


def make_sampler(config: SFTConfig, data: TokenTable | Stream) -> BatchSampler:
    """The rows of each step: a function of the data, the seed and the global batch size alone."""
    batch = config.per_device_train_batch_size * data_ranks.data_devices() * config.gradient_accumulation_steps
    seed = config.data_seed if config.data_seed is not None else config.seed
    shuffle = config.train_sampling_strategy == "random"
    if isinstance(data, Stream):
        return StreamSampler(data, batch, seed, shuffle, config.dataloader_drop_last)
    return TableSampler(data, RowOrder(len(data), batch, seed, shuffle, config.dataloader_drop_last))


def total_steps(config: SFTConfig, steps: Steps | None) -> int:
    """The number of optimizer steps of the run."""
    if config.max_steps > 0 or steps is None:
        return max(1, config.max_steps)
    if steps.steps_per_epoch is None:
        raise ConfigError("the length of the data is unknown; set max_steps.")
    return max(1, math.ceil(config.num_train_epochs * steps.steps_per_epoch))


def describe_data(name: str, facts: dict[str, Any], config: SFTConfig) -> str:
    """One line of dataset statistics: documents, rows, tokens, and everything that was dropped or truncated."""
    length = config.max_length or 0
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
        line += f"; {facts['bad']:,} rows were left out: {bad_kinds(facts)}"
        line += "".join(f"\n  {row}" for row in facts.get("bad_rows", ()))
    return line


def trained_tokens(labels: Any) -> int:
    """The number of labels that contribute to the loss."""
    if labels is None:
        return 0
    total = known_count(labels)
    return total if total is not None else int((labels[..., 1:] != IGNORED).sum())


# --- loaders --------------------------------------------------------------------------------------------------------


UNKNOWN_COUNT = -1
"""In a `GlobalBatch`: trained tokens, or tokens, that are counted in the batches of all ranks."""


class UnknownRows:
    """The rows of a script's own loader: unknown."""

    def documents(self, row: int) -> Any:
        """Never called: only a table's rows are read."""
        raise AssertionError("the rows of a script's data loader are its own")


UNKNOWN_ROWS = UnknownRows()


class Steps(Protocol):
    """This rank's batches, step by step."""

    @property
    def batch(self) -> int:
        """Rows in a global batch."""

    @property
    def steps_per_epoch(self) -> int | None:
        """None if the length of the data is unknown."""

    def steps(self, start: int, end: int, position: dict[str, Any] | None = None) -> Generator[Step, None, None]:
        """The steps `start` to `end` - 1; `position` is the data position to resume from."""

    def next_epoch(self, pick: GlobalBatch) -> tuple[dict[str, Any] | None, int]:
        """Leave out the rest of a pick's epoch: the position after it, and the number of steps left out."""


@dataclass(frozen=True)
class RowCollator:
    """A script's own collator: it gets rows as TRL's preparation gives them."""

    function: Callable[[list[dict[str, Any]]], Any]

    def __call__(self, table: TokenRows, rows: Sequence[int]) -> Batch:
        return dict(self.function([row_of(table, row) for row in rows]))


class StepLoader(Loader):
    """This rank's batches of a data set of the run, step by step; for a script, one pass in micro-batches."""

    def __init__(
        self, sampler: BatchSampler, data: TokenTable | Stream, collator: Any, size: int, workers: int, seen: bool
    ) -> None:
        rows = size * runtime.addressable_device_count()
        super().__init__(
            sampler, collator, rows, data_ranks.data_rank(), data_ranks.data_size(), workers, repeats_rows=seen
        )
        self.dataset, self.batch_size, self.collate_fn = data, size, collator
        self.batch = sampler.batch
        self._epoch = 0

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps in an epoch; None for a stream."""
        return self.sampler.order.steps_per_epoch if isinstance(self.sampler, TableSampler) else None

    def load(self, pick: GlobalBatch) -> Step:
        """The batches of a global batch, with its epoch as transformers counts it."""
        if (length := self.steps_per_epoch) is not None:  # as transformers counts: by micro-batches
            epoch, index = divmod(pick.number, length)
            each = -(-self.batch // (self.world * self.size))
            pick = dataclasses.replace(pick, epoch=epoch + min(1.0, (index + 1) * each / len(self)))
        return super().load(pick)

    def next_epoch(self, pick: GlobalBatch) -> tuple[dict[str, Any] | None, int]:
        """Leave out the rest of a pick's epoch; an error for a stream."""
        if self.steps_per_epoch is None:
            raise ConfigError(
                "a callback has set control.should_epoch_stop, but the data is streamed, and where its next epoch "
                "begins is known only at the end of this one; leave streaming out, or stop training instead."
            )
        return None, -(pick.number + 1) % self.steps_per_epoch

    def one_epoch(self) -> Iterator[Step]:
        """Every row once."""
        assert self.steps_per_epoch is not None
        return self.steps(0, self.steps_per_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next."""
        self._epoch = epoch

    def __len__(self) -> int:
        """The number of this rank's micro-batches in an epoch."""
        if not isinstance(self.sampler, TableSampler):
            raise TypeError("the length of a stream is unknown")
        order = self.sampler.order
        rows = order.rows // order.batch * order.batch if order.drop_last else order.rows
        whole, rest = divmod(rows, order.batch)
        each = self.world * self.size
        return whole * -(-order.batch // each) + -(-rest // each)

    def __iter__(self) -> Iterator[Batch]:
        length = self.steps_per_epoch
        start, end = (0, sys.maxsize) if length is None else (self._epoch * length, (self._epoch + 1) * length)
        self._epoch += 1
        for step in self.steps(start, end):
            yield from step.batches


class ScriptLoader:
    """A script's own `DataLoader` as the steps of a run: its batches are divided over the ranks in turn."""

    def __init__(self, loader: Any, accumulates: int, what: str) -> None:
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"{what} returned a {type(loader).__name__}; expected a torch.utils.data.DataLoader, or what "
                f"super().{what}() returns."
            )
        self.accumulates = accumulates
        self.loader = loader if isinstance(loader, RankLoader) else RankLoader.of(loader)
        self.batch = (loader.batch_size or 1) * data_ranks.data_size() * accumulates
        try:
            self.steps_per_epoch: int | None = max(1, -(-len(self.loader) // accumulates))
        except TypeError:
            self.steps_per_epoch = None

    def steps(self, start: int, end: int, position: dict[str, Any] | None = None) -> Generator[Step, None, None]:
        """The steps `start` to `end` - 1, epoch after epoch."""
        length, number = self.steps_per_epoch, start
        epoch, index = divmod(start, length) if length else (0, start)
        while number < end:
            self.loader.set_epoch(epoch, index * self.accumulates)
            before = number
            for step in self._epoch(number, index):
                yield step
                number += 1
                if number >= end:
                    return
            if number == before and index == 0:
                raise ConfigError("the script's data loader has no batches.")
            epoch, index = epoch + 1, 0

    def _epoch(self, number: int, index: int) -> Iterator[Step]:
        """The steps of one pass over the loader, from step `index` of it on."""
        length, group = self.steps_per_epoch, list[tuple[Batch, bool]]()
        for batch in self.loader:
            share = self.loader.share
            group.append((dict(batch), share is not None and share.rows == 0))
            if share is not None:
                share.weight = 1.0  # the loop weights by trained tokens
            if len(group) == self.accumulates:
                yield self._step(number, index, length, group)
                number, index, group = number + 1, index + 1, []
        if group:
            yield self._step(number, index, length, group)

    def _step(self, number: int, index: int, length: int | None, group: list[tuple[Batch, bool]]) -> Step:
        epoch = (number + 1) / length if length else 0.0
        ends = length is not None and index + 1 == length
        pick = GlobalBatch(number, np.arange(0), UNKNOWN_ROWS, UNKNOWN_COUNT, UNKNOWN_COUNT, epoch, ends)
        return Step(pick, [[] if stands_in else [0] for _, stands_in in group], [batch for batch, _ in group])

    def next_epoch(self, pick: GlobalBatch) -> tuple[dict[str, Any] | None, int]:
        """Leave out the rest of a pick's epoch."""
        return None, -(pick.number + 1) % self.steps_per_epoch if self.steps_per_epoch else 0

    def one_epoch(self) -> Iterator[Step]:
        """Every batch once."""
        self.loader.set_epoch(0)
        return self._epoch(0, 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)
