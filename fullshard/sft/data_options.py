"""The settings of the data: which data sets, how their rows are read, tokenized and packed, and in which order.

Part of `SFTConfig`. Names are those of PEFT's training script and of TRL's `SFTConfig`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_bool, as_int, option

OTHER_LENGTHS = ("max_seq_len", "max_seq_length")
"""Other names of `max_length`."""
DATASET_KWARGS = ("skip_prepare_dataset", "add_special_tokens", "append_concat_token")
"""The settings that `dataset_kwargs` may hold."""


def _multiple(value: Any) -> int | None:
    if value is None or str(value).lower() in ("auto", "none", "null"):
        return None
    try:
        if as_int(value) > 0:
            return as_int(value)
    except (ValueError, TypeError):
        pass
    raise ConfigError(f"pad_to_multiple_of is {value!r}; expected 1 or more, or auto.")


@dataclass
class DataOptions:
    """Settings of the data."""

    dataset_name: str | None = option(
        None,
        metavar="a file, a folder, or a name on the hub; several with commas",
        elsewhere=("dataset", "datasets", "data", "train_file", "dataset_path"),
    )
    """The training data."""
    dataset_config_name: str | None = option(None, elsewhere=("dataset_config",))
    """The configuration of a data set on the hub that has several; for a folder, a subfolder."""
    dataset_weights: str | None = option(None, metavar="numbers, one per data set")
    """The proportions of several data sets in a mix, by rows. Without weights the data sets are concatenated."""
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When one pass over a weighted mix ends: when every data set has been used up (smaller ones repeat), or when the
    first one has."""
    dataset_columns: str | None = option(None, metavar="name=column,…")
    """Names of columns that differ from the usual ones, such as prompt=question,completion=answer."""
    prompt_format: str | None = option(None, metavar="text with {column} in it")
    """A format string that makes the prompt from a row's columns; the answer is the row's `completion` or `output`."""
    dataset_settings: dict[str, Any] | None = option(None, metavar="a mapping, or JSON")  # noqa: RUF009 - a field
    """Options for one of several data sets, by its name: how its rows are read and formatted."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What counts as one row of a .txt file."""
    splits: str = option("train,test", elsewhere=("dataset_train_split", "dataset_test_split", "split"))
    """Names of the training and the evaluation split: file names in the folder, or splits on the hub."""
    val_size: float = option(0.0, elsewhere=("val_set_size",))
    """Hold out this many rows of the training data for evaluation; below 1 it is a fraction. `seed` chooses the rows;
    with streaming they are the first ones."""
    dataset_text_field: str = option("text", elsewhere=("text_field", "text_column"))
    """The column with plain text."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be used: stop and show it, or skip and count it."""
    streaming: bool = option(False, elsewhere=("dataset_streaming",))
    """Read and tokenize the data during training instead of before it: for data sets larger than memory or disk. Rows
    come in file order, shuffled within a buffer of `shuffle_buffer_size`. Needs `max_steps`."""
    shuffle_buffer_size: int = 4096
    """Rows that are tokenized, packed and shuffled together with streaming."""
    packing: bool = option(False, elsewhere=("sample_packing", "neat_packing"))
    """Put several documents into one row, to avoid padding. Documents cannot attend to each other; whether the model
    ensures that is tested first."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """How documents are packed: best-fit decreasing; the same with long documents split instead of truncated (as with
    `overflow` split); or concatenated and cut into rows of `max_length` tokens, in which documents are not kept
    apart."""
    eval_packing: bool | None = None
    """Pack the evaluation data; as `packing` if not set."""
    padding_free: bool = False
    """Concatenate the rows of a batch instead of padding them. Documents are kept apart as with packing."""
    trust_packing: bool = False
    """Allow packing when it cannot be tested whether the model isolates documents, as with custom model code."""
    max_length: int | None = option(
        1024,
        aliases=OTHER_LENGTHS,
        flags=OTHER_LENGTHS,
        elsewhere=("cutoff_len", "sequence_len", "seq_len", "seq_length", "block_size", "context_length"),
    )
    """The maximum number of tokens in a row. `overflow` decides what happens to longer documents. none: no maximum."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """What to do with documents longer than `max_length`. The tokens lost are counted."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which tokens of a document that is truncated are kept: the first or the last."""
    append_concat_token: bool | None = None
    """End each document with the EOS token. If not set: texts and completions end with it, and conversations end as
    their chat template does."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens (such as BOS) to each document. If not set: to texts and completions; a
    conversation has those of its chat template."""
    eos_token: str | None = None
    """The token that ends texts and completions, and generated answers; the tokenizer's EOS token if not set."""
    pad_token: str | None = None
    """The padding token; the tokenizer's own if not set."""
    skip_prepare_dataset: bool = False
    """Use pre-tokenized rows (`input_ids`, `labels`) as they are: neither truncated nor packed."""
    dataset_kwargs: dict[str, Any] | str | None = option(  # noqa: RUF009 - a field
        None, kind=dict, metavar="name=value,…, or JSON"
    )
    """The settings `skip_prepare_dataset`, `add_special_tokens` and `append_concat_token`, as TRL takes them."""
    assistant_only_loss: bool = False
    """In conversations, compute the loss on the assistant's turns only."""
    completion_only_loss: bool | None = option(None, elsewhere=("train_on_inputs", "train_on_prompt"))
    """In rows with a prompt, compute the loss on the completion only; true if not set."""
    last_turn_only_loss: bool = option(False, aliases=("mask_history",), flags=("mask_history",))
    """In conversations, compute the loss on the assistant's last turn only."""
    preview: bool = False
    """Show a few rows as the model will see them, with the loss mask, and dataset statistics; then stop."""
    preview_rows: int = 3
    """The number of rows that `preview` shows."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """The order of rows: shuffled in each epoch, or sequential."""
    shuffle_dataset: bool = False
    """Shuffle the rows before they are tokenized and packed, once; `seed` determines the order."""
    data_seed: int | None = None
    """The seed for the order of rows; `seed` if not set."""
    dataloader_drop_last: bool = False
    """Drop the last batch of an epoch if it is incomplete."""
    dataloader_num_workers: int = 0
    """The number of processes that tokenize, and of threads that prepare batches."""
    dataset_num_proc: int | None = None
    """The number of processes that tokenize; `dataloader_num_workers` if not set."""
    pad_to_multiple_of: int | str | None = option(None, kind=object, metavar="a whole number, or auto")
    """Pad batches to a multiple of this many tokens; 8 if not set, or auto."""
    dataloader_pin_memory: bool = True
    """Copy batches to the GPU through pinned memory."""
    cache_dir: str | None = option(None, metavar="a folder")
    """The folder for tokenized data; `FULLSHARD_CACHE` or the user's cache folder if not set."""

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_data(self) -> None:
        """Raise if settings of the data contradict each other. Settings in `dataset_kwargs` become the run's own."""
        settings: Any = self.dataset_kwargs or {}
        for name, value in settings.items():
            if name not in DATASET_KWARGS:
                raise ConfigError(f"dataset_kwargs has {name!r}; expected {', '.join(DATASET_KWARGS)}.")
            setattr(self, name, as_bool(value))
        self.dataset_kwargs = None
        self.pad_to_multiple_of = _multiple(self.pad_to_multiple_of)
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length is {self.max_length}; a row needs at least 2 tokens to predict one.")
        if self.max_length is None and (self.packing or self.eval_packing):
            raise ConfigError("packing needs max_length, which is none: it is the length of packed rows.")
        if self.streaming and self.shuffle_dataset and self.dataset_name is not None:
            raise ConfigError(
                "shuffle_dataset reads all rows first, and streaming does not; leave it out: rows are shuffled in "
                "buffers of shuffle_buffer_size."
            )
        if self.val_size >= 1 and self.val_size != int(self.val_size):
            raise ConfigError(f"val_size is {self.val_size:g}; expected a number of rows, or a fraction below 1.")
        if self.streaming and 0 < self.val_size < 1:
            raise ConfigError(
                f"val_size is {self.val_size:g}: a fraction of a stream is unknown; give a number of rows, which are "
                f"then the first."
            )

    # --- derived settings -------------------------------------------------------------------------------------------

    @property
    def keeps_apart(self) -> bool:
        """Whether batches may have rows of several documents, which the model must keep apart."""
        packs = (self.packing or bool(self.eval_packing)) and self.packing_strategy != "wrapped"
        return packs or self.padding_free

    @property
    def tokenizing_processes(self) -> int:
        """The number of processes that tokenize; 0 is this process."""
        if self.dataset_num_proc is None:
            return self.dataloader_num_workers
        return self.dataset_num_proc if self.dataset_num_proc > 1 else 0
