"""The token table: a dataset tokenized once, packed into rows, and read memory-mapped.

A `TokenTable` is a folder of binary files and a JSON manifest with their checksums. The table of a whole dataset is
cached under a hash of its inputs (data, tokenizer, chat template, settings); a stream (`stream.py`) is a sequence of
small tables. A table appears by one rename, so a reader sees all of it or nothing; one that is damaged later is made
anew. `loader.py` decides the order in which rows are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.config.durable import sync, sync_tree
from fullshard.config.errors import DataError
from fullshard.data.checked_array import BlockChecksums, CheckedArray
from fullshard.data.encode import TextSettings
from fullshard.data.row_formats import UNUSED, BadRows, bad_kinds, few_bad_rows
from fullshard.data.sources import DataSource
from fullshard.data.temp_dirs import TempDir
from fullshard.data.tokenize import Chunk, TokenizerPool, batch_rows, count_targets

Integers = npt.NDArray[np.int64]
AT_ONCE = 65536
"""Lengths converted to Python integers at a time, which bounds memory."""


def best_fit_decreasing(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> tuple[Integers, Integers]:
    """Pack documents into rows whose lengths sum to at most `capacity`: (start of each row in the list, list of
    documents).

    Documents are placed from the longest to the shortest, each into the fullest row that still has room. Rows are
    grouped by the room r they have left, and the set of all such r is the bits of one integer. So the best fit is the
    lowest set bit at or above the document's length.
    """
    sizes = np.asarray(lengths)
    if sizes.size and (int(sizes.max()) > capacity or int(sizes.min()) < 1):
        raise ValueError(f"lengths must be between 1 and {capacity}")
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)  # by index in `order`
    rows = 0
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set while some row has exactly r left
    for start in range(0, len(order), AT_ONCE):
        placed = []
        for length in sizes[order[start : start + AT_ONCE]].tolist():
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    rooms ^= 1 << room
            else:
                room, row = capacity, rows
                rows += 1
            placed.append(row)
            if left := room - length:
                if not rows_with_room[left]:
                    rooms |= 1 << left
                rows_with_room[left].append(row)
        row_of[start : start + len(placed)] = placed
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return starts, order[np.argsort(row_of, kind="stable")].astype(np.int64)


FORMAT = 5
MANIFEST = "manifest.json"
CACHE_VARIABLE = "FULLSHARD_CACHE"
FILES = {
    "tokens": np.int32,
    "learnt": np.uint8,
    "document_starts": np.int64,
    "row_starts": np.int64,
    "row_documents": np.int64,
    "row_sizes": np.int64,
    "row_targets": np.int64,
}
LEFT_OUT = ("empty", "bad", "long", "dropped", "cut", "masked", "packed", "texts")
"""Counters besides documents, rows and tokens."""


@dataclass(frozen=True)
class TokenTable:
    """Tokenized rows, each of one or more documents. The arrays are memory-mapped, so a rank reads only what it
    uses, and checks what it reads."""

    folder: Path
    facts: dict[str, Any]
    """Dataset statistics: `documents`, `rows`, `tokens`, `targets` (tokens that contribute to the loss). What was left
    out: rows that were `empty` or `bad` (could not be parsed; `bad_rows` has the reasons of the first few), documents
    that were too `long`, those of them that were `dropped`, tokens `cut`, documents without any loss (`masked`). Rows
    that were `packed` already, and rows of plain text (`texts`). And `lengths` of documents, the `largest_token`, and
    `check`, a checksum of tokens and masks that tables of the same content share."""
    tokens: CheckedArray
    loss_mask: CheckedArray
    """1 for tokens that contribute to the loss, else 0."""
    document_starts: CheckedArray
    row_starts: CheckedArray
    row_documents: CheckedArray
    row_sizes: CheckedArray
    """Tokens in each row."""
    row_targets: CheckedArray
    """Tokens in each row that contribute to the loss: the weight of the row."""

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """The documents of a row: (tokens, loss mask)."""
        pieces = []
        for document in self.row_documents[slice(*self.row_starts[row : row + 2].tolist())].tolist():
            piece = slice(*self.document_starts[document : document + 2].tolist())
            pieces.append((self.tokens[piece], self.loss_mask[piece]))
        return pieces

    def is_sound(self) -> bool:
        """Whether all files have the content that was written. Reads them."""
        return all(array.is_sound() for array in vars(self).values() if isinstance(array, CheckedArray))


def statistics(table: TokenTable) -> dict[str, Any]:
    """Document lengths in tokens (`min`, `median`, `mean`, `p95`, `max`), the number of `documents` and `rows`, and
    `efficiency`: the fraction of `rows * row_length` that is tokens rather than padding; `row_length` is `max_length`,
    or the longest row if there is no maximum."""
    facts = table.facts
    length = facts["max_length"] or int(table.row_sizes[:].max(initial=1))
    efficiency = facts["tokens"] / max(1, facts["rows"] * length)
    counted = {name: facts[name] for name in ("documents", "rows")}
    return {**facts["lengths"], **counted, "row_length": length, "efficiency": efficiency}


def unused_columns(facts: dict[str, Any]) -> dict[str, int]:
    """Columns that other trainers use and that are not used here, with the number of rows that have them."""
    return {key.removeprefix(UNUSED): count for key, count in facts.items() if key.startswith(UNUSED)}


# --- reading and making ---------------------------------------------------------------------------------------------


def cache_root(folder: str | None = None) -> Path:
    """The folder of token tables: `folder`, else `FULLSHARD_CACHE`, else the user's cache folder."""
    if folder or os.environ.get(CACHE_VARIABLE):
        return Path(folder or os.environ[CACHE_VARIABLE]).expanduser() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fullshard" / "tokens"


def table_key(source: DataSource, tokenizer: Any, settings: TextSettings) -> str:
    """The name of the table of this data, tokenizer and settings."""
    parts = [FORMAT, source.fingerprint(), _tokenizer_fingerprint(tokenizer), sorted(asdict(settings).items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation are set per call and do not affect the tokens here.
        content = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
        text = json.dumps(content, sort_keys=True)
    else:
        text = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())], default=str)
    specials = json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id])
    return hashlib.sha256((text + specials).encode()).hexdigest()


def open_table(folder: Path, mend: Callable[[str], TokenTable] | None = None) -> TokenTable | None:
    """The table in this folder; None if there is none, or if its manifest or the length of a file is not as written.

    All else is checked when it is read. `mend` is called with a description of damage and returns the table that
    replaces this one; None: damage is an error.
    """

    def mend_array(name: str) -> Callable[[str], CheckedArray] | None:
        return None if mend is None else lambda damage: getattr(mend(damage), name)

    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        facts, checksums = manifest["facts"], manifest["checksums"]
        if facts["format"] != FORMAT or manifest["digest"] != _digest(facts, checksums):
            return None
        arrays: dict[str, Any] = {}
        for name, dtype in FILES.items():
            path, field = folder / f"{name}.bin", "loss_mask" if name == "learnt" else name
            if path.stat().st_size != facts["bytes"][name]:
                return None
            arrays[field] = CheckedArray(path, dtype, checksums[name], mend_array(field))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TokenTable(folder, facts, **arrays)


def _digest(facts: dict[str, Any], checksums: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([facts, checksums]).encode()).hexdigest()


def make_table(
    source: DataSource, tokenizer: Any, settings: TextSettings, folder: Path, workers: int = 0,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
) -> None:  # fmt: skip
    """Tokenize `source` to `folder`, which appears complete or not at all. `progress` is called with (rows, tokens)."""
    try:
        with TempDir(folder.parent) as temp_dir:
            writer = TableWriter(temp_dir.folder, settings, source.name)
            with TokenizerPool(tokenizer, settings, workers) as pool:
                for batch, chunk in pool.chunks(batch_rows(source.rows(None))):
                    writer.add(chunk)
                    progress(len(batch.rows), len(chunk.tokens))
            facts = writer.finish()
            check_some(facts, settings)
            sync_tree(temp_dir.folder)
            if folder.exists() and open_table(folder) is None:
                folder.rename(temp_dir.folder / "damaged")
            with contextlib.suppress(OSError):  # another process may have made the same table first
                temp_dir.folder.rename(folder)
            sync(folder.parent)
            shutil.rmtree(folder / "damaged", ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written ({error.strerror or error}); set {CACHE_VARIABLE} to "
            f"another folder."
        ) from None


def check_some(facts: dict[str, Any], settings: TextSettings) -> None:
    """Raise if there are no documents, or no tokens that contribute to the loss."""
    counts = [f"{facts[name]:,} {name}" for name in ("empty", "dropped") if facts.get(name)]
    left_out = ", ".join([*counts, *filter(None, [bad_kinds(facts)])])
    documents = facts["documents"] + facts.get("masked", 0)
    if not documents:
        first = f"; {facts['bad_rows'][0]}" if facts.get("bad_rows") else ""
        why = f"(left out: {left_out}{first})" if left_out else "in it"
        raise DataError(f"{facts['source']}: no documents with tokens {why}; expected at least one row.")
    if not facts["targets"]:
        why = " (assistant_only_loss is on: do they have assistant messages?)" if settings.assistant_only_loss else ""
        raise DataError(
            f"{facts['source']}: {documents} documents, but none of their tokens contributes to the loss{why}."
        )
    turns = [name for name in ("assistant_only_loss", "last_turn_only_loss") if getattr(settings, name)]
    if turns and facts.get("texts", 0) >= documents:
        raise DataError(
            f"{facts['source']}: {turns[0]} is on, but the rows are plain text, not conversations; leave it out."
        )


class TableWriter:
    """Writes a table to a new folder. Tokens are written to disk immediately; lengths stay in memory."""

    def __init__(self, folder: Path, settings: TextSettings, name: str) -> None:
        self.folder, self.settings, self.name = folder, settings, name
        self._tokens, self._loss_mask = (folder / "tokens.bin").open("wb"), (folder / "learnt.bin").open("wb")
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._targets: list[npt.NDArray[np.int32]] = []
        self._continues: list[npt.NDArray[np.bool_]] = []
        self._counts: Counter[str] = Counter()
        self._bad_rows: BadRows = []
        self._check, self._largest = 0, 0
        self._checksums = {name: BlockChecksums() for name in FILES}

    def add(self, chunk: Chunk) -> None:
        """Append a chunk of encoded documents."""
        for name, array, file in (
            ("tokens", chunk.tokens, self._tokens), ("learnt", chunk.loss_mask, self._loss_mask),
        ):  # fmt: skip
            data = array.tobytes()
            file.write(data)
            self._checksums[name].add(data)
            self._check = zlib.crc32(data, self._check)
        self._largest = max(self._largest, int(chunk.tokens.max(initial=0)))
        self._lengths.append(chunk.lengths)
        self._targets.append(chunk.targets)
        self._continues.append(chunk.continues)
        self._counts.update(chunk.counts)
        self._bad_rows = few_bad_rows(self._bad_rows, chunk.bad_rows)

    def finish(self, **more: Any) -> dict[str, Any]:
        """Pack documents into rows and write the index and the manifest; returns the facts, which include `more`."""
        self.close()
        nothing = np.empty(0, np.int32)
        lengths, targets = (np.concatenate([nothing, *parts]) for parts in (self._lengths, self._targets))
        settings = self.settings
        if settings.packing and settings.wrapped and len(lengths):
            lengths, targets = self._wrapped(int(lengths.sum(dtype=np.int64)))
        if settings.packing and not settings.wrapped:
            assert settings.max_length is not None
            row_starts, row_documents = best_fit_decreasing(lengths, settings.max_length)
        elif settings.keep_rows:
            continues = np.concatenate([np.empty(0, np.bool_), *self._continues])
            row_starts, row_documents = np.append(np.flatnonzero(~continues), len(lengths)), np.arange(len(lengths))
        else:
            row_starts, row_documents = np.arange(len(lengths) + 1), np.arange(len(lengths))
        written = {
            "document_starts": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
            "row_starts": row_starts,
            "row_documents": row_documents,
            "row_sizes": _per_row(lengths, row_starts, row_documents),
            "row_targets": _per_row(targets, row_starts, row_documents),
        }
        for name, array in written.items():
            data = array.astype(FILES[name], copy=False).tobytes()
            (self.folder / f"{name}.bin").write_bytes(data)
            self._checksums[name].add(data)
        counts = {name: self._counts[name] for name in LEFT_OUT}
        if settings.overflow == "drop":
            counts["dropped"] = counts["long"]
        facts = {
            "format": FORMAT, "source": self.name, "documents": len(lengths), "rows": len(row_starts) - 1,
            "tokens": int(written["document_starts"][-1]), "targets": int(targets.sum(dtype=np.int64)),
            **self._counts, **counts, "bad_rows": [message for _, message in self._bad_rows],
            "max_length": settings.max_length, "overflow": settings.overflow, "packing": settings.packing,
            "wrapped": settings.wrapped, "lengths": _lengths(lengths), "largest_token": self._largest,
            "check": zlib.crc32(lengths.tobytes(), self._check),
            "bytes": {name: (self.folder / f"{name}.bin").stat().st_size for name in FILES}, **more,
        }  # fmt: skip
        checksums = {name: blocks.hex() for name, blocks in self._checksums.items()}
        manifest = {"digest": _digest(facts, checksums), "facts": facts, "checksums": checksums}
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
        return facts

    def _wrapped(self, tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Lengths and targets of rows that are cut from all tokens, whatever the documents they belong to."""
        size = self.settings.max_length
        assert size is not None
        lengths = np.full(-(-tokens // size), size, np.int32)
        lengths[-1] = tokens - size * (len(lengths) - 1)
        return lengths, count_targets(np.memmap(self.folder / "learnt.bin", np.uint8, mode="r"), lengths)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._loss_mask.close()


def _per_row(
    per_document: npt.NDArray[np.int32], row_starts: npt.NDArray[np.int64], row_documents: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    if not len(row_documents):
        return np.empty(0, np.int64)
    return np.add.reduceat(per_document[row_documents], row_starts[:-1], dtype=np.int64)


def _lengths(lengths: npt.NDArray[np.int32]) -> dict[str, float]:
    if not len(lengths):
        return {"min": 0, "median": 0.0, "mean": 0.0, "p95": 0.0, "max": 0}
    median, p95 = np.percentile(lengths, (50, 95)).tolist()
    mean = float(lengths.mean(dtype=np.float64))
    return {"min": int(lengths.min()), "median": median, "mean": mean, "p95": p95, "max": int(lengths.max())}
