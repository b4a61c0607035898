"""Columns that mean something to other trainers: which of them stop a row here, and which are named as not used.

What a row's own shape reads is said in `row_formats.py`. Nothing that would change what is trained elsewhere is passed
over in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fullshard.data.messages import ROLES
from fullshard.data.raw_row import BadRow, short

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
VERDICTS = ("label", "kto_tag")
"""Whether a completion is a good one, in rows of unpaired preferences."""
NOTED = (
    "prompt", "completion", "chosen", "rejected", "tools", "functions", "system", "weight", "label", "labels",
    "kto_tag", "attention_mask", "position_ids", "seq_lengths", "assistant_masks", "completion_mask",
    "chat_template_kwargs", *MEDIA,
)  # fmt: skip
"""Columns that other trainers read. Where a row has one that its shape does not read, that is said once."""
PREFERENCES = (
    "preferences (`chosen` and `rejected`), which DPO and reward models are trained on. SFT can learn the chosen side "
    "alone: name it by dataset_columns, messages=chosen where it is a whole conversation, completion=chosen beside a "
    "`prompt` (where it is a whole text, by dataset_text_field). Trainers for preferences, such as TRL's DPOTrainer, "
    "take the model and these rows as they are"
)


def check(row: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuse rows that ask for another kind of training. `read` are the columns that the row's shape reads; the row has
    no nulls."""
    paired = "chosen" in row and "rejected" in row and "chosen" not in read
    if paired and not (read and _is_answered(row)):
        raise BadRow(f"the row holds {PREFERENCES}.")
    for name in VERDICTS if "completion" in row or "messages" in row or "conversations" in row else ():
        if isinstance(row.get(name), bool) or str(row.get(name)).lower() in ("true", "false"):
            raise BadRow(
                f"`{name}` is {short(row[name])}: an unpaired preference (KTO), in which a completion may be a bad "
                f"example. SFT would learn it all the same: keep the good rows, without this column."
            )


def _is_answered(row: Mapping[str, Any]) -> bool:
    """Whether the row's own conversation or completion is whole, so that preferences only stand beside it."""
    turns = row.get("messages", row.get("conversations"))
    if isinstance(turns, list | tuple) and turns and isinstance(turns[-1], Mapping):
        return ROLES.get(str(turns[-1].get("role", turns[-1].get("from"))).lower()) == "assistant"
    return turns is not None or "completion" in row or "input_ids" in row


def check_conversation(row: Mapping[str, Any]) -> None:
    """Refuse columns without which a conversation says something else."""
    if media := [name for name in MEDIA if name in row and not _is_empty(row[name])]:
        raise BadRow(f"`{media[0]}`: pictures and sound cannot be trained on; expected rows of text.")
    if "functions" in row and "tools" not in row:
        raise BadRow("`functions` is an older name of `tools`; say so by dataset_columns tools=functions.")


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) and not value


def unused(row: Mapping[str, Any], read: Collection[str]) -> tuple[str, ...] | None:
    """Columns with a meaning elsewhere that this row's shape does not read; None where there are none."""
    found = [name for name in NOTED if name in row and name not in read and not _is_empty(row[name])]
    found += [name for name in row if isinstance(name, str) and name.startswith("train_on_")]
    return tuple(found) or None
