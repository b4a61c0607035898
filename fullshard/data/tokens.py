"""Documents as tokens: tokenised once, packed into rows, and read back memory-mapped.

A `TokenTable` is a folder of plain binary files and a JSON manifest, named by the content it was made from (data,
tokenizer, template, settings). It appears by one rename, so a reader sees all of it or nothing. Which rank makes it is
said in `once.py`; the order in which rows are used, in `loader.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.data.encode import BATCH, Piece, TextSettings, pieces
from fullshard.data.formats import Source
from fullshard.data.packing import best_fit_decreasing
from fullshard.errors import DataError

FORMAT = 1
CACHE_VARIABLE = "FULLSHARD_CACHE"
FILES = {
    "tokens": np.int32,
    "learnt": np.uint8,
    "document_starts": np.int64,
    "row_starts": np.int64,
    "row_documents": np.int64,
}


@dataclass(frozen=True)
class TokenTable:
    """Rows of documents of tokens. Arrays are memory-mapped; a rank touches only what it uses."""

    folder: Path
    facts: dict[str, Any]
    tokens: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.uint8]
    """1 where a token is learnt, 0 where it is only read."""
    document_starts: npt.NDArray[np.int64]
    row_starts: npt.NDArray[np.int64]
    row_documents: npt.NDArray[np.int64]
    _cache: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """The documents of a row: (tokens, learnt)."""
        found = []
        for document in self.row_documents[self.row_starts[row] : self.row_starts[row + 1]]:
            piece = slice(self.document_starts[document], self.document_starts[document + 1])
            found.append((self.tokens[piece], self.learnt[piece]))
        return found

    @property
    def row_sizes(self) -> npt.NDArray[np.int64]:
        """Tokens in each row."""
        return self._per_row("sizes", np.diff(self.document_starts))

    @property
    def row_targets(self) -> npt.NDArray[np.int64]:
        """Tokens in each row that are predicted and learnt: the weight of the row in the loss."""
        return self._per_row("targets", self._document_targets())

    def _document_targets(self) -> npt.NDArray[np.int64]:
        if "documents" not in self._cache:
            total = np.concatenate([[0], np.cumsum(self.learnt, dtype=np.int64)])
            learnt = total[self.document_starts[1:]] - total[self.document_starts[:-1]]
            # Nothing comes before a document's first token, so it is never predicted.
            self._cache["documents"] = learnt - self.learnt[self.document_starts[:-1]]
        return self._cache["documents"]

    def _per_row(self, name: str, per_document: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if name not in self._cache:
            total = np.concatenate([[0], np.cumsum(per_document[self.row_documents], dtype=np.int64)])
            self._cache[name] = total[self.row_starts[1:]] - total[self.row_starts[:-1]]
        return self._cache[name]


# --- reading and making ---------------------------------------------------------------------------------------------


def cache_root(given: str | None = None) -> Path:
    """Where token tables are kept: the argument, else `FULLSHARD_CACHE`, else the user's cache folder."""
    if given or os.environ.get(CACHE_VARIABLE):
        return Path(given or os.environ[CACHE_VARIABLE]).expanduser() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fullshard" / "tokens"


def table_key(source: Source, tokenizer: Any, settings: TextSettings) -> str:
    """The name of the table that this data, tokenizer and settings give."""
    parts = [FORMAT, source.fingerprint(), _tokenizer_fingerprint(tokenizer), sorted(asdict(settings).items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation are set per call and change nothing here.
        content = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
        text = json.dumps(content, sort_keys=True)
    else:
        text = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())], default=str)
    specials = json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id])
    return hashlib.sha256((text + specials).encode()).hexdigest()


def open_table(folder: Path) -> TokenTable | None:
    """The table in this folder, or None where there is none that is whole."""
    try:
        facts = json.loads((folder / "manifest.json").read_text())
        arrays: dict[str, Any] = {}
        for name, dtype in FILES.items():
            path = folder / f"{name}.bin"
            if facts["format"] != FORMAT or path.stat().st_size != facts["bytes"][name]:
                return None
            arrays[name] = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError, KeyError):
        return None
    return TokenTable(folder, facts, **arrays)


def make_table(source: Source, tokenizer: Any, settings: TextSettings, folder: Path) -> None:
    """Tokenise `source` into `folder`, which appears whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name[:12]}-part-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written ({error.strerror or error}); {CACHE_VARIABLE} names "
            f"another."
        ) from None
    try:
        facts = _write(source, tokenizer, settings, part)
        if not facts["documents"]:
            raise DataError(f"{source.name}: no documents with tokens in it; expected at least one row.")
        if not facts["targets"]:
            why = " (assistant_only_loss is on: is there an assistant's turn?)" if settings.assistant_only_loss else ""
            raise DataError(f"{source.name}: {facts['documents']} documents, but no token in them is learnt{why}.")
        (part / "manifest.json").write_text(json.dumps(facts, indent=1))
        if folder.exists() and open_table(folder) is None:
            folder.rename(part / "damaged")
        with contextlib.suppress(OSError):  # another process may have been first: its table is as good
            part.rename(folder)
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    except OSError as error:
        raise DataError(f"the token cache {folder.parent} cannot be written: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(source: Source, tokenizer: Any, settings: TextSettings, part: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"format": FORMAT, "source": source.name, "empty": 0, "long": 0, "cut": 0}
    starts, targets = [0], 0
    with (part / "tokens.bin").open("wb") as tokens, (part / "learnt.bin").open("wb") as learnt:
        for ids, mask in _encoded(source, tokenizer, settings, facts):
            ids.tofile(tokens)
            mask.tofile(learnt)
            starts.append(starts[-1] + len(ids))
            targets += int(mask[1:].sum())
    edges = np.asarray(starts, dtype=np.int64)
    lengths = edges[1:] - edges[:-1]
    if settings.packing:
        rows = best_fit_decreasing(lengths, settings.max_length)
    else:
        rows = [[document] for document in range(len(lengths))]
    edges.tofile(part / "document_starts.bin")
    np.cumsum([0, *map(len, rows)], dtype=np.int64).tofile(part / "row_starts.bin")
    np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64).tofile(part / "row_documents.bin")
    sizes = {name: (part / f"{name}.bin").stat().st_size for name in FILES}
    facts |= {"documents": len(lengths), "rows": len(rows), "tokens": starts[-1], "targets": targets, "bytes": sizes}
    return facts


def _encoded(source: Source, tokenizer: Any, settings: TextSettings, facts: dict[str, Any]) -> Iterator[Piece]:
    rows = source.rows(None)
    while batch := list(itertools.islice(rows, BATCH)):
        yield from pieces(batch, tokenizer, settings, facts)
