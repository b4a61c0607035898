"""Columns that other trainers use: some make a row an error here, others are reported as unused.

`row_formats.py` defines the columns that are read. No column that another trainer would use is ignored silently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fullshard.data.messages import ROLES
from fullshard.data.raw_row import BadRow, short

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
QUALITY_LABELS = ("label", "kto_tag")
"""Columns that tell whether a completion is good, in unpaired preference data (KTO)."""
REPORTED = (
    "text", "messages", "conversations", "prompt", "completion",
    "chosen", "rejected", "tools", "functions", "system", "weight", "label", "labels",
    "kto_tag", "attention_mask", "position_ids", "seq_lengths", "assistant_masks", "completion_mask",
    "chat_template_kwargs", "loss_mask", "loss_weights", "token_type_ids", "documents",
)  # fmt: skip
"""Columns that other trainers read. One that is not read here is reported once."""
PREFERENCES = (
    "preferences (`chosen` and `rejected`), the data format of DPO and reward models. SFT can train on the chosen side "
    "alone: set dataset_columns to messages=chosen if it is a whole conversation, to completion=chosen if there is a "
    "`prompt`, or set dataset_text_field to chosen if it is a whole text. Preference trainers, such as TRL's "
    "DPOTrainer, use these rows unchanged"
)


def check_columns(row: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise `BadRow` for rows made for another kind of training. `read` are the columns that are read; `row` has no
    nulls."""
    if media := [name for name in MEDIA if name in row and name not in read and not _is_empty(row[name])]:
        raise BadRow(
            f"`{media[0]}`: the data is vision-related, or has sound; only text is supported, with a vision-language "
            f"model too. Remove the column to train on the text alone.",
            kind="images, video or audio",
        )
    paired = "chosen" in row and "rejected" in row and "chosen" not in read
    if paired and not (read and _is_answered(row)):
        raise BadRow(f"the row holds {PREFERENCES}.", kind="preferences")
    for name in QUALITY_LABELS if "completion" in row or "messages" in row or "conversations" in row else ():
        if isinstance(row.get(name), bool) or str(row.get(name)).lower() in ("true", "false"):
            raise BadRow(
                f"`{name}` is {short(row[name])}: an unpaired preference (KTO), in which a completion may be a bad "
                f"example. SFT would train on all of them: keep only the good rows, and remove this column.",
                kind="preferences",
            )


def _is_answered(row: Mapping[str, Any]) -> bool:
    """Whether the row has a complete conversation or completion in addition to the preferences."""
    turns = row.get("messages", row.get("conversations"))
    if isinstance(turns, list | tuple) and turns and isinstance(turns[-1], Mapping):
        return ROLES.get(str(turns[-1].get("role", turns[-1].get("from"))).lower()) == "assistant"
    return turns is not None or "completion" in row or "input_ids" in row


def check_conversation(row: Mapping[str, Any]) -> None:
    """Raise `BadRow` for columns without which a conversation is incomplete."""
    if "functions" in row and "tools" not in row:
        raise BadRow("`functions` is the old name of `tools`; set dataset_columns tools=functions.")


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) and not value


def unused(row: Mapping[str, Any], read: Collection[str]) -> tuple[str, ...] | None:
    """Columns that other trainers use and that are not read for this row; None if there are none."""
    columns = [name for name in REPORTED if name in row and name not in read and not _is_empty(row[name])]
    columns += [name for name in row if isinstance(name, str) and name.startswith("train_on_")]
    return tuple(columns) or None
