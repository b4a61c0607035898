"""Best-fit-decreasing packing against a plain implementation of the rule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.data import token_table
from fullshard.data.token_table import best_fit_decreasing


def plain(lengths: list[int], capacity: int) -> list[int]:
    """How full each row is, by the rule's own words."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in left if room >= length]
        if fitting:
            left.remove(min(fitting))
            left.append(min(fitting) - length)
        else:
            left.append(capacity - length)
    return sorted(left)


@given(st.integers(1, 70).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_rows_are_those_of_the_rule(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    starts, documents = best_fit_decreasing(lengths, capacity)
    rows = [documents[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert sorted(documents.tolist()) == list(range(len(lengths))) and all(rows)
    assert sorted(capacity - sum(lengths[d] for d in row) for row in rows) == plain(lengths, capacity)
    assert all(lengths[a] >= lengths[b] for row in rows for a, b in itertools.pairwise(row)), "longest first"


@given(st.lists(st.integers(1, 9), max_size=40))
def test_what_is_read_at_a_time_does_not_matter(lengths: list[int]) -> None:
    whole = best_fit_decreasing(lengths, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_table, "AT_ONCE", 7)
        for a, b in zip(best_fit_decreasing(lengths, 9), whole, strict=True):
            assert a.tolist() == b.tolist()


def test_a_document_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 4"):
        best_fit_decreasing([5], 4)
