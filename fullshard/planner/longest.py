"""How long rows can be on a machine: `fullshard plan --longest`.

The longest rows that fit with the settings of the run, then with one change after another that costs time alone, each
with what limits it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fullshard.config.errors import UserError
from fullshard.planner.changes import FREE, SHORTEST, SLOWER, Price, Variant, after
from fullshard.planner.estimate import Estimate
from fullshard.planner.request import PlanRequest

MOST = 2**26
"""Tokens of the longest rows that are tried."""
STEPS = 64
"""Rows are found to within one part in so many of their length."""


@dataclass(frozen=True)
class Longest:
    """The longest rows with some settings."""

    words: str
    """The settings that differ from the run's."""
    settings: dict[str, Any]
    length: int
    """Tokens of a row; 0 if none fits."""
    estimate: Estimate
    """The run with rows of this length; of the shortest if none fits."""
    beyond: Estimate | None
    """The run with the shortest rows that do not fit; None if all that were tried do."""

    @property
    def limit(self) -> str:
        """What is full with longer rows, and with what."""
        return "nothing up to here" if self.beyond is None else self.beyond.verdict.what_is_short

    def to_json(self) -> dict[str, Any]:
        """The result as plain data; sizes are bytes."""
        verdict = self.estimate.verdict
        return {
            "settings": self.settings, "words": self.words, "length": self.length, "limit": self.limit,
            "device_memory": verdict.needs, "host_memory": verdict.needs_host,
            "tokens_per_second": self.estimate.time.tokens_per_second, "seconds": self.estimate.time.total,
        }  # fmt: skip


@dataclass(frozen=True)
class LongestRows:
    """The longest rows with the settings of a run, then with each change that allows longer ones."""

    request: PlanRequest
    stages: tuple[Longest, ...]

    @property
    def positions(self) -> int | None:
        """The positions that the model has; None if their number is not limited."""
        return self.stages[0].estimate.positions

    @property
    def fits(self) -> bool | None:
        """Whether any rows fit with the run's own settings; None where it is unknown."""
        first = self.stages[0]
        return first.length > 0 if first.estimate.verdict.certain else None

    def to_json(self) -> dict[str, Any]:
        """The results as plain data."""
        return {
            "rows": self.request.config.per_device_train_batch_size, "positions": self.positions,
            "longest": [stage.to_json() for stage in self.stages],
        }  # fmt: skip


def find_longest(request: PlanRequest, price: Price, say: Callable[[str], None] = lambda what: None) -> LongestRows:
    """The longest rows that fit a machine. `say` is called with what is tried."""
    stages: list[Longest] = []
    for variant in _stages(request):
        try:
            stage = _longest(variant, stages[-1].length if stages else 0, price, say)
        except UserError:
            if not stages:
                raise
            continue  # the model excludes the change
        if not stages or stage.length > stages[-1].length:
            stages.append(stage)
        if stage.beyond is None or not stage.estimate.verdict.certain:
            break
    return LongestRows(request, tuple(stages))


def _stages(request: PlanRequest) -> Iterator[Variant]:
    """The run as it is, then with the changes that train the same: each as far as it goes, on top of those before.
    Where inputs of layers wait on the host, also with as many of them on the device as fit."""
    at = Variant(request)
    yield at
    for levers in (FREE, SLOWER):
        for lever in levers:
            if variants := list(lever(at.request)):
                at = after(at, variants[-1])
                yield at
        config = at.request.config
        if config.gradient_checkpointing is True and config.activation_offloading:
            mixed = dataclasses.replace(at.request, config=dataclasses.replace(config, gradient_checkpointing="auto"))
            settings = {**at.settings, "gradient_checkpointing": "auto"}
            words = ", ".join(f"{name} {str(value).lower()}" for name, value in settings.items())
            yield Variant(mixed, words, settings)


def _longest(variant: Variant, known: int, price: Price, say: Callable[[str], None]) -> Longest:
    """The longest rows with these settings, by doubling, then by halving the interval. `known` is known to fit with
    settings that need more memory."""

    def estimate(length: int) -> Estimate:
        say(f"{length:,} tokens{f' with {variant.words}' if variant.words else ''}")
        config = dataclasses.replace(variant.request.config, max_length=length)
        return price(dataclasses.replace(variant.request, config=config, lengths=None))

    def result(length: int, fitting: Estimate, beyond: Estimate | None) -> Longest:
        return Longest(variant.words, variant.settings, length, fitting, beyond)

    length = max(known, SHORTEST)
    fitting = estimate(length)
    if not fitting.verdict.fits:
        return result(0, fitting, fitting)
    while True:
        if length >= MOST:
            return result(length, fitting, None)
        beyond, too_long = estimate(2 * length), 2 * length
        if not beyond.verdict.fits:
            break
        length, fitting = too_long, beyond
    unit = max(SHORTEST, 2 ** ((length // STEPS).bit_length()))
    while too_long - length > unit:
        middle = (length + too_long) // 2 // unit * unit
        middle = middle if middle > length else length + unit
        tried = estimate(middle)
        if tried.verdict.fits:
            length, fitting = middle, tried
        else:
            too_long, beyond = middle, tried
    return result(length, fitting, beyond)
