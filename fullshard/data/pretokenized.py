"""Pre-tokenized rows: `input_ids`, and the columns that determine the loss mask.

`labels` take precedence over masks, as in TRL. Padding according to `attention_mask` is removed. The documents of rows
that are packed already are told apart by `seq_lengths` or `position_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fullshard.data.messages import list_of
from fullshard.data.raw_row import BadRow, names, short

IGNORED = -100
"""The label of tokens that do not contribute to the loss: the default `ignore_index` of cross-entropy."""
MASKS = ("assistant_masks", "completion_mask")
COLUMNS = ("labels", *MASKS, "attention_mask", "position_ids", "seq_lengths")
"""Columns that are read in addition to `input_ids`."""


def read_tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    """The `Document` fields of a row without nulls."""
    ids = _integers(row["input_ids"], "input_ids")
    if not all(0 <= n < 2**31 for n in ids):
        raise BadRow(f"`input_ids` holds {short(next(n for n in ids if not 0 <= n < 2**31))}, which is not a token id.")
    begin, end = _document_range(row, ids)
    fields: dict[str, Any] = {"input_ids": ids[begin:end]}
    sizes = _lengths(row, begin, end, len(ids))
    if len(sizes) > 1:
        fields["seq_lengths"] = sizes
    if "labels" in row:
        return {**fields, "labels": _labels(row["labels"], ids)[begin:end]}
    masks = {name: _mask(row[name], name, len(ids))[begin:end] for name in MASKS if name in row}
    if "assistant_masks" in masks:
        pairs = zip(fields["input_ids"], masks["assistant_masks"], strict=True)
        fields["labels"] = tuple(token if trained else IGNORED for token, trained in pairs)
    if "completion_mask" in masks:
        fields["completion_mask"] = masks["completion_mask"]
    return fields


def check_prepared(row: Mapping[str, Any]) -> None:
    """Raise `BadRow` for rows that skip_prepare_dataset cannot use as they are."""
    if "input_ids" not in row:
        raise BadRow(
            f"skip_prepare_dataset is on, but the row has no `input_ids`; its columns are {names(row)}. Leave "
            f"skip_prepare_dataset out to have rows tokenized."
        )
    if "labels" not in row and (masks := [name for name in MASKS if name in row]):
        raise BadRow(
            f"skip_prepare_dataset is on, and the row has `{masks[0]}` but no labels, so that all tokens would be "
            f"trained. Add a 'labels' column (-100 for tokens without loss), or leave skip_prepare_dataset out."
        )


def _labels(value: Any, ids: Sequence[int]) -> tuple[int, ...]:
    labels = _integers(value, "labels")
    if len(labels) != len(ids):
        raise BadRow(f"{len(ids)} input_ids but {len(labels)} labels; expected as many.")
    for i, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(f"labels[{i}] is {short(label)}; expected {IGNORED} or its token, {token}.")
    return labels


def _mask(value: Any, what: str, size: int) -> tuple[int, ...]:
    mask = tuple(int(n) if isinstance(n, bool) else n for n in list_of(value, what, "zeros and ones"))
    if not all(type(n) is int and n in (0, 1) for n in mask):
        raise BadRow(f"`{what}` is {short(value)}; expected a list of zeros and ones.")
    if len(mask) != size:
        raise BadRow(f"{size} input_ids but {len(mask)} values in `{what}`; expected as many.")
    return mask


def _document_range(row: Mapping[str, Any], ids: Sequence[int]) -> tuple[int, int]:
    """Where the tokens begin and end, without padding."""
    if "attention_mask" not in row:
        return 0, len(ids)
    mask = _mask(row["attention_mask"], "attention_mask", len(ids))
    if not any(mask):
        raise BadRow("`attention_mask` is all zeros; expected 1 where there is a token.")
    begin, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if not all(mask[begin:end]):
        raise BadRow("`attention_mask` has zeros between ones; only padding before or after a document can be removed.")
    return begin, end


def _lengths(row: Mapping[str, Any], begin: int, end: int, size: int) -> tuple[int, ...]:
    """The lengths of the documents in a row, padding excluded."""
    lengths: tuple[int, ...] = (end - begin,)
    if "position_ids" in row:
        positions = _integers(row["position_ids"], "position_ids")
        if len(positions) != size:
            raise BadRow(f"{size} input_ids but {len(positions)} position_ids; expected as many.")
        lengths = _restarts(positions[begin:end])
    if "seq_lengths" in row:
        row_lengths = _integers(row["seq_lengths"], "seq_lengths")
        if sum(row_lengths) != end - begin or min(row_lengths) < 1:
            raise BadRow(
                f"`seq_lengths` is {short(row_lengths)}, with {end - begin} tokens in the row; expected the length of "
                f"each document."
            )
        if "position_ids" in row and row_lengths != lengths:
            raise BadRow(
                f"`seq_lengths` is {short(row_lengths)}, but `position_ids` restart after {short(lengths)} tokens."
            )
        lengths = row_lengths
    return lengths


def _restarts(positions: Sequence[int]) -> tuple[int, ...]:
    """The number of positions from each 0 to the next."""
    starts = [i for i, position in enumerate(positions) if position == 0]
    lengths = tuple(b - a for a, b in pairwise([*starts, len(positions)]))
    if [n for length in lengths for n in range(length)] != list(positions):
        raise BadRow(f"`position_ids` is {short(positions)}; expected 0, 1, 2, … in each document.")
    return lengths


def _integers(value: Any, what: str) -> tuple[int, ...]:
    numbers = list_of(value, what, "integers")
    if not all(type(n) is int for n in numbers):
        raise BadRow(f"`{what}` is {short(value)}; expected a list of integers.")
    return tuple(numbers)
