"""Which of many alike cases the default run takes: every pair of values of two factors, each value once, or every n-th
case."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """All cases for `parametrize`; the default run takes every n-th of them, the rest are slow tests."""
    slow = pytest.mark.slow
    return [case if n % every == 0 else pytest.param(case, marks=slow) for n, case in enumerate(cases)]


def crossed(*factors: Sequence[Hashable], pairs: bool = True) -> list[Any]:
    """Every combination for `parametrize`; the default run takes those of `pairwise`, or without `pairs` just enough to
    meet each value of each factor. The rest are slow tests."""
    longest = max(map(len, factors))
    cover = [tuple(factor[i % len(factor)] for factor in factors) for i in range(longest)]
    taken = set(pairwise(factors) if pairs else cover)
    slow = pytest.mark.slow
    return [row if row in taken else pytest.param(*row, marks=slow) for row in itertools.product(*factors)]


def pairwise(factors: Sequence[Sequence[Hashable]]) -> list[tuple[Hashable, ...]]:
    """The combinations, always the same ones in the same order.

    Each starts from a pair that is still missing; every further factor takes the value that adds most missing pairs,
    and among equals the one used least.
    """
    missing = {
        ((i, a), (j, b)): None
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a, b in itertools.product(factors[i], factors[j])
    }
    used: dict[tuple[int, Hashable], int] = {}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor, values in enumerate(factors):
            if factor not in row:
                gain = {value: -used.get((factor, value), 0) for value in values}
                for value in values:
                    pairs = (tuple(sorted([(factor, value), fixed], key=lambda p: p[0])) for fixed in row.items())
                    gain[value] += 1000 * sum(pair in missing for pair in pairs)
                row[factor] = max(values, key=lambda value: gain[value])
        for fixed in row.items():
            used[fixed] = used.get(fixed, 0) + 1
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(row[factor] for factor in range(len(factors))))
    return rows
