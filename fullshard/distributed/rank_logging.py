"""Printing and logging on many ranks: rank 0 prints, every log line has its rank, a warning appears once."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch.distributed as dist

from fullshard.config.redaction import hide
from fullshard.distributed.log_filter import own_line
from fullshard.distributed.rank_env import read_launcher
from fullshard.distributed.terminal_text import visible


def rank() -> int:
    """This process's rank, from 0; before there is a process group, the one that the launcher assigned."""
    return dist.get_rank() if dist.is_initialized() else read_launcher(os.environ).rank


def print0(*values: object, **options: Any) -> None:
    """`print` on rank 0 only."""
    if rank() == 0:
        print(*values, **{"flush": True, **options})


def print_rank(*values: object, sep: str = " ", end: str = "\n", **options: Any) -> None:
    """`print` on every rank, prefixed with the rank, in one write so that lines of ranks do not mix."""
    print(f"[rank {rank()}] {sep.join(map(str, values))}{end}", **{"end": "", "flush": True, **options})


class _RankFilter(logging.Filter):
    """Adds the rank to each record, hides secrets in it, and drops records below WARNING on ranks other than 0."""

    def __init__(self, all_ranks: bool) -> None:
        super().__init__()
        self.all_ranks = all_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record)["rank"] = rank()
        text = record.getMessage()
        if (shown := hide(text)) != text:
            record.msg, record.args = shown, ()
        return self.all_ranks or rank() == 0 or record.levelno >= logging.WARNING


class _Terminal(logging.StreamHandler):
    """Writes to the current stderr, unless the application has configured logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        start = "" if getattr(record, "rank", 0) == 0 else own_line(self.stream)
        return start + visible(super().format(record))


def get_logger(name: str = "fullshard", *, all_ranks: bool = False) -> logging.Logger:
    """A logger whose lines have the rank. Below WARNING only rank 0 logs, unless `all_ranks`."""
    top = logging.getLogger("fullshard")
    if not any(isinstance(handler, _Terminal) for handler in top.handlers):
        terminal = _Terminal()
        terminal.setFormatter(logging.Formatter("[rank %(rank)s] %(levelname)s %(message)s", defaults={"rank": "?"}))
        top.addHandler(terminal)
        if top.level == logging.NOTSET:
            top.setLevel(logging.INFO)
    logger = top if name == "fullshard" else logging.getLogger(f"fullshard.{name.removeprefix('fullshard.')}")
    filters = [f for f in logger.filters if isinstance(f, _RankFilter)]
    if not filters:
        logger.addFilter(_RankFilter(all_ranks))
    for existing in filters:
        existing.all_ranks |= all_ranks
    return logger


_warned: set[str] = set()


def warn_once(key: str, message: str, *, all_ranks: bool = False) -> bool:
    """Log a warning, on rank 0 or on all, unless one with this `key` was logged before; returns whether it is new."""
    if key in _warned:
        return False
    _warned.add(key)
    if all_ranks or rank() == 0:
        get_logger().warning(message)
    return True


def warned() -> frozenset[str]:
    """The keys of the warnings so far on this rank."""
    return frozenset(_warned)


def forget_warnings() -> None:
    """Let every `warn_once` log again."""
    _warned.clear()
