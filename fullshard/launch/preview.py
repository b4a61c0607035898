"""`fullshard sft … --preview`: rows as the model will see them, with the loss mask, and dataset statistics.

Nothing is trained and no weights are read. Tokenizer, template and settings are those of the run, and the tokens are
cached, so the run that follows does not tokenize again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from fullshard.data.row_formats import bad_kinds
from fullshard.data.sources import DataSource, hold_back
from fullshard.data.token_table import TokenTable, statistics, unused_columns
from fullshard.distributed.console import Terminal
from fullshard.distributed.terminal_text import visible
from fullshard.sft.batches import EVALUATION, make_table
from fullshard.sft.checked_run import CheckedRun
from fullshard.sft.vocabulary import prepared_tokenizer, read_tokenizer

TRAINED, READ, SPECIAL, BORDER = "bold green", "dim", "cyan", "yellow"
OPEN, CLOSE = "⟦", "⟧"
"""Put around trained tokens where there are no colors."""
SHOWN_TOKENS = 600
"""Tokens of a row that are shown; the others are counted."""
BARS = 30


def preview_run(run: CheckedRun) -> None:
    """Show the first rows and the statistics of a run's data. One process; only the token cache is written."""
    console, config = Terminal(), run.config
    adapter = Path(run.adapter).expanduser() if run.adapter is not None else None
    tokenizer = read_tokenizer(config, run.model, adapter)
    prepared = prepared_tokenizer(config, tokenizer)
    for note in (*run.notes, *prepared.notes):
        console.print(f"note: {note}", style=READ)
    train, evaluation = run.train, run.evaluation
    assert train is not None and not isinstance(evaluation, dict)
    if config.val_size:
        train, evaluation = hold_back(train, config.val_size, config.seed, config.streaming)
    if config.streaming:
        console.print(f"streaming: only the first {config.shuffle_buffer_size:,} rows are read", style=READ)
        train = first_rows(train, config.shuffle_buffer_size)
    tables = {"training": make_table(config, train, tokenizer)}
    if evaluation is not None:
        tables[EVALUATION] = make_table(config, evaluation, tokenizer, EVALUATION)
    show_rows(tables["training"], tokenizer, config.preview_rows, console)
    for name, table in tables.items():
        show_statistics(name, table, console)


def first_rows(source: DataSource, count: int) -> DataSource:
    """The first rows of a source."""
    return dataclasses.replace(
        source,
        rows=lambda start: islice(source.rows(start), count),
        fingerprint=lambda: f"the first {count} of {source.fingerprint()}",
    )


def show_rows(table: TokenTable, tokenizer: Any, count: int, console: Terminal) -> None:
    """The first rows of the table, with trained tokens in color (or in brackets, without colors)."""
    marks = console.color_system is None
    legend = Text("trained", TRAINED if not marks else "")
    legend.append(" · " if not marks else f" tokens are in {OPEN} {CLOSE}, ", READ)
    legend.append("context only" if not marks else "the others are context only", READ)
    console.print(legend)
    for row in range(min(count, len(table))):
        documents = table.documents(row)
        sizes = [len(ids) for ids, _ in documents]
        trained = sum(_targets(mask) for _, mask in documents)
        console.rule(
            f"row {row + 1}: {len(documents)} document(s), {sum(sizes)} tokens, {trained} trained", align="left"
        )
        left = SHOWN_TOKENS
        for number, (ids, mask) in enumerate(documents):
            if number:
                console.print("── next document of the row; it does not see the one before ──", style=BORDER)
            if left <= 0:
                console.print(f"… and {len(documents) - number} more documents in this row", style=READ)
                break
            console.print(colored(ids[:left], mask[:left], tokenizer, marks), soft_wrap=True)
            if len(ids) > left:
                console.print(f"… and {len(ids) - left} more tokens of this document", style=READ)
            left -= len(ids)


def colored(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], tokenizer: Any, marks: bool = False) -> Text:
    """A document as text, with trained tokens, context and special tokens set apart."""
    special = set() if marks else set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    shown = Text()
    for piece, trained, is_special in _runs(ids, mask, special, tokenizer):
        text = visible(piece)  # rich would drop some control characters
        if marks:
            shown.append(f"{OPEN}{text}{CLOSE}" if trained else text)
        else:
            style = TRAINED if trained else READ
            shown.append(text, f"{style} {SPECIAL}" if is_special else style)
    return shown


def _runs(
    ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], special: set[int], tokenizer: Any
) -> Iterator[tuple[str, bool, bool]]:
    """Pieces of text whose tokens are of one kind: (text, trained, special).

    Each piece is cut from the decoding of all tokens up to it, so that spaces are kept.
    """
    trained = mask.astype(bool).copy()
    trained[:1] = False  # nothing comes before the first token, so it is never predicted
    kinds = [(bool(flag), int(i) in special) for i, flag in zip(ids, trained, strict=True)]
    ends = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]] + ([len(kinds)] if kinds else [])
    before = ""
    for end in ends:
        upto = tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield upto[len(before) :], *kinds[end - 1]
        before = upto


def _targets(mask: npt.NDArray[np.uint8]) -> int:
    return int(mask[1:].sum())


def show_statistics(name: str, table: TokenTable, console: Terminal) -> None:
    """Print counts, lengths, packing efficiency, and what was dropped or truncated."""
    stats, facts = statistics(table), table.facts
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in _statistics(stats, facts).items():
        lines.add_row(label, value)
    console.rule(f"{name} data", align="left")
    console.print(lines)
    for row in facts["bad_rows"]:
        console.print(Text(f"  {row}"), soft_wrap=True)
    console.print(histogram(np.diff(table.document_starts[:])))


def _statistics(stats: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    trained = facts["targets"] / max(1, facts["tokens"])
    low, high, median, mean, p95 = (stats[name] for name in ("min", "max", "median", "mean", "p95"))
    lines = {
        "documents": f"{facts['documents']:,}",
        "tokens": f"{facts['tokens']:,}, {facts['targets']:,} of them trained ({trained:.0%})",
        "length": f"{low:,} to {high:,} tokens; median {median:,.0f}, mean {mean:,.1f}, 95 % up to {p95:,.0f}",
        "rows": f"{facts['rows']:,} of at most {stats['row_length']:,} tokens, {stats['efficiency']:.1%} full",
    }
    left_out = {"empty": "dropped: empty", "masked": "dropped: no trained tokens"}
    for key, label in left_out.items():
        if facts.get(key):
            lines[label] = f"{facts[key]:,}"
    if facts.get("bad"):
        lines["left out"] = f"{facts['bad']:,} rows: {bad_kinds(facts)}"
    for name, count in unused_columns(facts).items():
        lines[f"not used: `{name}`"] = f"in {count:,} rows"
    if facts.get("long"):
        lines["longer than max_length"] = (
            f"{facts['long']:,} documents, {facts['cut']:,} tokens lost (overflow {facts['overflow']})"
        )
    return lines


def histogram(lengths: npt.NDArray[np.int64], bins: int = 8) -> Text:
    """A histogram of document lengths, as bars of text."""
    low, high = int(lengths.min()), int(lengths.max()) + 1
    edges = np.unique(np.linspace(low, high, bins + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    shown = Text()
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        bar = "█" * round(BARS * count / max(1, counts.max())) or ("▏" if count else "")
        shown.append(f"{low:>7,} – {high - 1:<7,} ", READ)
        shown.append(f"{bar} {count:,}\n")
    return shown
