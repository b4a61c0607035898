"""Results of loading: one error that lists all mismatches, or a summary."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.byte_size import file_size

SHOWN = 8
"""How many names of each kind an error lists; the others are counted."""


@dataclass
class LoadProblems:
    """Differences between files and model in names and shapes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Name, shape in the files, shape in the model."""
    unconvertible: list[tuple[str, str]] = field(default_factory=list)
    """Name, and why transformers' conversion fails."""

    def text(self, path: Any, model: str) -> str:
        """The error message; empty if there are no problems."""
        parts = []
        if self.missing:
            near = {name: self._nearest(name) for name in self.missing[:SHOWN]}
            lines = [
                f"{name}{f' (the files have {near[name]})' if near[name] else ''}" for name in self.missing[:SHOWN]
            ]
            parts.append(_listed("missing in the files", lines, len(self.missing)))
        if self.unexpected:
            parts.append(_listed("in the files but not in the model", self.unexpected, len(self.unexpected)))
        if self.misshaped:
            lines = [f"{name}: {there} in the files, {here} in the model" for name, there, here in self.misshaped]
            parts.append(_listed("with a different shape", lines, len(self.misshaped)))
        if self.unconvertible:
            lines = [f"{name}: {why}" for name, why in self.unconvertible]
            parts.append(_listed("that cannot be converted", lines, len(self.unconvertible)))
        if not parts:
            return ""
        hint = (
            "Check that path and model class (or config) belong together; strict=False initializes missing parameters "
            "and skips unexpected tensors"
        )
        if any(there[1:] == here[1:] and there[0] < here[0] for _, there, here in self.misshaped if there and here):
            hint += "; resize_vocab= allows embeddings with more rows than in the files"
        return f"the weights in {path} do not match {model}.\n" + "\n".join(parts) + f"\n{hint}."

    def _nearest(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.unexpected, n=1, cutoff=0.75)
        return close[0] if close else ""


def _listed(what: str, lines: Sequence[str], count: int) -> str:
    more = f"\n    … and {count - SHOWN} more" if count > SHOWN else ""
    return f"  {count} tensor(s) {what}:\n    " + "\n    ".join(lines[:SHOWN]) + more


NAMED = 3
"""Up to this many names are listed in full; of more (an adapter has many), only the first."""


@dataclass
class LoadReport:
    """Summary of a load on this rank."""

    path: str
    read: list[str] = field(default_factory=list)
    """Parameters and buffers loaded from files."""
    initialized: list[str] = field(default_factory=list)
    """Parameters that are not in the files."""
    resized: list[str] = field(default_factory=list)
    """Embeddings with more rows than in the files."""
    skipped: list[str] = field(default_factory=list)
    """Tensors in the files that the model does not have."""
    bytes: int = 0
    """Bytes read by this rank."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = file_size(self.bytes / max(self.seconds, 1e-9))
        text = f"loaded {len(self.read)} tensors from {self.path}"
        text += f": {file_size(self.bytes)} on this rank in {self.seconds:.1f} s, {rate}/s"
        for names, action in ((self.initialized, "initialized"), (self.resized, "resized"), (self.skipped, "skipped")):
            if names:
                shown = names if len(names) <= NAMED else [names[0], "…"]
                text += f"; {len(names)} {action} ({', '.join(shown)})"
        return text
