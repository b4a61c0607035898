"""What each field of a manifest may hold: its type, its range, and which fields there are.

A digest shows that a manifest was not damaged, not who wrote it. So everything is checked before any of it is used;
what depends on the state that is loaded is checked when the restore is planned (`objects.py` and its neighbours).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]
"""Raises `ValueError` for a value that does not fit; the text is the place of the value."""

SIZE = 2**63 - 1
"""The largest size, offset or step."""
RANKS = 2**20
"""The largest number of ranks."""


def _fail(value: Any, where: str, expected: str) -> None:
    shown = (
        repr(value) if not isinstance(value, int) or abs(value) < 2**70 else f"a number of {value.bit_length()} bits"
    )
    raise ValueError(f"{where} is {shown if len(shown) < 60 else shown[:57] + '...'}; expected {expected}")


def whole(low: int = 0, high: int = SIZE) -> Check:
    """A whole number in a range."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            _fail(value, where, f"a whole number from {low} to {high}")

    return check


def text(pattern: str = r"(?s).*") -> Check:
    """Text that a pattern matches."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            _fail(value, where, "text" if pattern == r"(?s).*" else f"text like {pattern}")

    return check


def optional(inner: Check) -> Check:
    """Null, or something else."""
    return lambda value, where: None if value is None else inner(value, where)


def items(inner: Check) -> Check:
    """A list."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple):
            _fail(value, where, "a list")
        for i, one in enumerate(value):
            inner(one, f"{where}[{i}]")

    return check


def table(inner: Check) -> Check:
    """Values by name."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _fail(value, where, "an object")
        for name, one in value.items():
            inner(one, f"{where}.{name}")

    return check


def fields(needed: Mapping[str, Check], other: Mapping[str, Check] | None = None, more: bool = False) -> Check:
    """An object with these fields and perhaps the `other` ones; `more` allows any besides."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _fail(value, where, "an object")
        fields = {**needed, **(other or {})}
        if missing := sorted(needed.keys() - value.keys()):
            raise ValueError(f"{where} lacks {', '.join(missing)}")
        if not more and (extra := sorted(value.keys() - fields.keys())):
            raise ValueError(f"{where} has the unknown field {extra[0]!r}")
        for name in fields.keys() & value.keys():
            fields[name](value[name], f"{where}.{name}")

    return check


def anything(value: Any, where: str) -> None:
    """Any value without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        _fail(value, where, "a finite number")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        anything(one, f"{where}.{key}")


def boolean(value: Any, where: str) -> None:
    """True or false."""
    if type(value) is not bool:
        _fail(value, where, "true or false")


def axes(value: Any, where: str) -> None:
    """What a dim is sharded over: nothing, an axis or several."""
    (items(text()) if isinstance(value, list) else optional(text()))(value, where)


REF = fields(
    {"name": text()},
    {
        "$": text("tensor|array"), "device": text("accelerator"), "dtype": text(), "shape": items(whole()),
        "spec": items(axes),
    },
)  # fmt: skip
"""A reference to a tensor, in the place of its value."""


def encoded(value: Any, where: str) -> None:
    """A value that `json_tree` wrote, and the references to tensors in it."""
    from fullshard.checkpoint import json_tree

    anything(value, where)
    for ref in json_tree.tensor_refs(value):
        REF(ref, where)


BASE = fields(
    {"path": text(r"[^\0]+"), "fingerprint": text("[0-9a-f]{32}")},
    {"checksums": table(text("[0-9a-f]{32}")), "config": fields({}, more=True)},
)
UNIT = fields({"parameters": items(fields({"trainable": boolean}, more=True))}, more=True)
CONFIG = fields({}, {"architectures": items(text(r"\w+"))}, more=True)
VALUE = {"value": encoded, "ranks": items(encoded)}
STATES: dict[str, Check] = {
    "model": fields(
        {"kind": text(), "class": text(), "tied": table(text()), "extra": table(encoded), "base": optional(BASE),
         "left_out": items(text())},
        {"adapters": items(text()), "config": CONFIG, "generation_config": table(anything),
         "adapter_configs": table(table(anything)), "mesh": table(whole(1, RANKS)),
         "plan": fields({"strategy": text(), "units": items(UNIT)}, more=True)},
    ),
    "optimizer": fields(
        {"kind": text(), "class": text(), "state": table(table(encoded)),
         "groups": items(fields({"parameters": items(text()), "options": table(encoded)}))},
    ),
    "state": fields({"kind": text(), "class": text()}, VALUE),
    "value": fields({"kind": text()}, VALUE),
    "rng": fields({"kind": text()}, VALUE),
}  # fmt: skip
"""The fields of a state, by its kind."""


def _state(value: Any, where: str) -> None:
    kind = str(value.get("kind")) if isinstance(value, dict) else ""
    if kind not in STATES:
        _fail(kind, f"{where}.kind", ", ".join(STATES))
    STATES[kind](value, where)
    if kind in ("state", "value", "rng") and ("value" in value) == ("ranks" in value):
        raise ValueError(f"{where} has neither a value nor one for each rank, or both")
    if kind == "model" and value["left_out"] and value["base"] is None:
        raise ValueError(f"{where} leaves tensors to its base, and names none")


def _tensor(value: Any, where: str) -> None:
    if not isinstance(value, list) or len(value) != 3:
        _fail(value, where, "dtype, shape and pieces")
    text()(value[0], f"{where}.dtype")
    items(whole())(value[1], f"{where}.shape")
    items(_piece)(value[2], f"{where}.pieces")


def _piece(value: Any, where: str) -> None:
    if not isinstance(value, list) or len(value) != 4:
        _fail(value, where, "file, begin, offsets and sizes")
    for part, check in zip(value, (whole(), whole(), items(whole()), items(whole())), strict=True):
        check(part, where)


MANIFEST = fields({
    "format": text(), "format_version": whole(1, 1), "step": optional(whole()), "created": text(),
    "versions": table(text()), "world_size": whole(1, RANKS), "states": table(_state), "tensors": table(_tensor),
    "per_rank": items(text()),
    "files": items(fields({"name": text(r"[^/\0]+"), "bytes": whole(), "sha256": text("[0-9a-f]{64}")})),
})  # fmt: skip
"""All fields of a manifest except its digest."""
