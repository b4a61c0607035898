"""Which tokens a token attends to, as flex attention takes it: never a mask of length × length.

Every mask of a causal model is an interval: a token attends to itself and back to the first token of its document, of
its attention window or of its chunk. One integer per token says where the interval begins, and a `BlockMask` (which
blocks of 128 × 128 tokens are computed) follows from these. Masks are made once per batch, not per layer, and nothing
is read back from the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils

BLOCK = 128
"""Tokens in a block, in both directions: what flex attention's kernels take."""
Layout = Callable[[torch.Tensor], Any]
"""What makes a mask of the first token that each token attends to."""


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """For each token, the index in its row at which its document begins. A document begins where positions jump."""
    return _last_start(positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1)


def window_starts(starts: torch.Tensor, window: int) -> torch.Tensor:
    """The first token inside the attention window; `starts` are those of the documents."""
    index = torch.arange(starts.shape[1], device=starts.device, dtype=starts.dtype)
    return torch.maximum(starts, index - (window - 1))


def chunk_starts(starts: torch.Tensor, chunk: int) -> torch.Tensor:
    """The first token of the chunk; chunks are counted from the start of each document."""
    index = torch.arange(starts.shape[1], device=starts.device, dtype=starts.dtype)
    return index - (index - starts) % chunk


def _last_start(begins: torch.Tensor) -> torch.Tensor:
    index = torch.arange(begins.shape[1], device=begins.device)
    return torch.where(begins, index, 0).cummax(1).values.int()


def masks_by_layer(config: Any, positions: torch.Tensor, layout: Layout) -> Any:
    """The masks that keep packed documents apart; a dict by layer type if the model has several types."""
    text = config.get_text_config()
    starts = document_starts(positions)
    by_type = {"full_attention": starts}
    if isinstance(window := getattr(text, "sliding_window", None), int):
        by_type["sliding_attention"] = window_starts(starts, window)
    if isinstance(chunk := getattr(text, "attention_chunk_size", None), int):
        by_type["chunked_attention"] = chunk_starts(starts, chunk)
    if types := set(getattr(text, "layer_types", None) or ()):
        return {name: layout(by_type[name]) if name in by_type else None for name in types}
    return layout(by_type.get("sliding_attention", starts))


# --- layouts --------------------------------------------------------------------------------------------------------


def dense_mask(starts: torch.Tensor) -> torch.Tensor:
    """[rows, 1, queries, keys]: True where a token may attend."""
    index = torch.arange(starts.shape[1], device=starts.device)
    return ((index <= index[:, None]) & (index >= starts[:, :, None]))[:, None]


def block_mask(starts: torch.Tensor) -> BlockMask:
    """The mask for flex attention. `starts` must not decrease along a row, so that both kinds of blocks are found from
    the first and the last token of a block of queries."""
    length = starts.shape[1]
    begins = torch.arange(0, length, BLOCK, device=starts.device)  # of each block
    first = starts[:, begins, None]  # [rows, blocks of queries, 1]
    last = starts[:, (begins + (BLOCK - 1)).clamp(max=length - 1), None]
    queries, keys = begins[:, None], begins[None, :]
    touched = (keys <= queries) & (keys + (BLOCK - 1) >= first)
    # A block that ends behind the row is not computed without the mask.
    full = (keys < queries) & (keys >= last) & (queries + BLOCK <= length)
    mask = BlockMask.from_kv_blocks(
        *_listed(touched & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=interval(starts),
        seq_lengths=(length, length),
    )  # fmt: skip
    vars(mask)["starts"] = starts  # for those who look for the tensors of a batch, such as the compiler
    return mask


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, and their indices, these first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def interval(starts: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The rule behind a `BlockMask`."""

    def attends(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= starts[row, query])

    return attends


def dense_of(mask: BlockMask) -> torch.Tensor:
    """The same mask as `dense_mask` makes it, for where flex attention does not run."""
    device = mask.kv_num_blocks.device
    rows, (queries, keys) = mask.kv_num_blocks.shape[0], mask.seq_lengths
    row = torch.arange(rows, device=device)[:, None, None, None]
    query, key = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    return mask.mask_mod(row, row, query, key)


# --- masks that a model makes itself ----------------------------------------------------------------------------------


def mask_of_model(*, always: bool, **mask_args: Any) -> Any:
    """transformers' mask function for our attention: what a model that has no mask yet gives to its layers.

    None stands for plain causal attention. Padding at the end needs no mask: no real token comes after it. With
    `always`, plain causal attention is a `BlockMask` too, for scores that only flex attention changes. Anything else
    (a cache, padding at the start, tokens that see later ones) is transformers' own dense mask.
    """
    length, window = mask_args["q_length"], mask_args.get("local_size")
    plain = mask_args.get("allow_is_causal_skip", True) and not mask_args.get("use_vmap", False)
    offsets = (mask_args.get("q_offset", 0), mask_args.get("kv_offset", 0))
    square = "cache_position" not in mask_args and length == mask_args["kv_length"] and _zero(*offsets)
    if plain and square and ends_with_padding(mask_args.get("attention_mask")):
        if window is None or length <= window:
            return _causal(mask_args) if always else None
        if (starts := _local_starts(mask_args, window)) is not None:
            return block_mask(starts)
    return masking_utils.sdpa_mask(**{**mask_args, "allow_is_causal_skip": plain and not always})


def _zero(*offsets: Any) -> bool:
    return all(isinstance(offset, int) and offset == 0 for offset in offsets)


def _row_starts(mask_args: dict[str, Any]) -> torch.Tensor:
    return torch.zeros(mask_args["batch_size"], mask_args["q_length"], dtype=torch.int32, device=mask_args["device"])


def _causal(mask_args: dict[str, Any]) -> BlockMask:
    return block_mask(_row_starts(mask_args))


def _local_starts(mask_args: dict[str, Any], window: int) -> torch.Tensor | None:
    """Where windows or chunks begin in rows of one document; None if the model's configuration does not tell which."""
    config = mask_args.get("config")
    windows = getattr(config, "sliding_window", None) == window
    if windows == (getattr(config, "attention_chunk_size", None) == window):
        return None
    return (window_starts if windows else chunk_starts)(_row_starts(mask_args), window)


def ends_with_padding(mask: torch.Tensor | None) -> bool:
    """Whether all padding of a batch is at the end of its rows. Reads the mask, which our own batches do not have."""
    return mask is None or (mask.dim() == 2 and not bool((mask[:, 1:] & ~mask[:, :-1]).any()))


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its row: a document begins where positions do not go on."""
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


@contextlib.contextmanager
def known_rows(positions: torch.Tensor | None) -> Iterator[None]:
    """Inside, models do not ask the device whether the positions of a batch restart, which are given here in host
    memory; None if they are those of whole rows."""
    if positions is not None and positions.dim() != 2:
        yield
        return
    are_packed = positions is not None and bool(document_numbers(positions)[:, -1].any())
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = document_numbers if are_packed else lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before
