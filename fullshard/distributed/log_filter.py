"""Hides messages of other libraries that a user can do nothing about, in our own commands only.

A script that imports fullshard sees every message: only the processes of `fullshard …` call `install_filters()`. Each
entry matches one text of one module. `own_line` keeps our messages apart from a progress bar that another process
draws. Only the standard library is imported here.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Message:
    """A message that is not shown."""

    source: str
    """The module that warns, or the name of the logger."""
    text: str
    """A regular expression for how it begins."""
    why: str


LOGGED = (
    Message(
        "bitsandbytes.backends.cpu.ops",
        "Failed to load CPU gemm_4bit_forward",
        "peft imports bitsandbytes, which on CPUs with AVX512-BF16 asks every process to install a kernel for its own "
        "4-bit layers; fullshard has its own layers.",
    ),
    Message(
        "transformers.modeling_utils",
        r"`loss_type=None` was set in the config but it is unrecognized",
        "so it is in the configuration of GPT-2 and others, and the default is the right one; in training the loss is "
        "fullshard's own.",
    ),
)
WARNED = (
    Message(
        "peft.tuners.tuners_utils",
        r"The following (rank|alpha)_pattern keys did not match any targeted module and were ignored: "
        r"\[('\.\*\\\\\.[^']*'(, )?)+\]",
        "for experts that transformers stores fused, peft itself puts in these patterns (they begin with `.*\\.`) and "
        "follows them; it only looks for them among modules, and they name parameters. Patterns of the user's own are "
        "shown.",
    ),
)
TRAINED = (
    Message(
        "peft.tuners.tuners_utils",
        "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter",
        "a hint for training; too late when the result is used for chat or exported.",
    ),
)
"""Warnings that are hidden where an adapter is only used, not trained."""


def install_filters(warned: tuple[Message, ...] = WARNED) -> None:
    """Hide these messages in this process. Further calls do nothing."""
    for one in LOGGED:
        logging.getLogger(one.source).addFilter(_FILTERS[one])
    for one in warned:
        warnings.filterwarnings("ignore", one.text, module=re.escape(one.source) + "$")


def own_line(stream: TextIO) -> str:
    """The prefix of a message on a terminal where rank 0 may draw a progress bar: it erases the bar, which is then
    redrawn below the message."""
    return "\r\x1b[2K" if stream.isatty() and os.environ.get("TERM") != "dumb" else ""


class _HideMessage(logging.Filter):
    def __init__(self, message: Message) -> None:
        super().__init__()
        self.text = re.compile(message.text)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text.match(str(record.msg)) is None


_FILTERS = {one: _HideMessage(one) for one in LOGGED}
