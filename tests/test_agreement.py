"""`fullshard.ranks`: an error on one rank is raised on all, and a result reaches the ranks that need it."""

from __future__ import annotations

import pytest

from fullshard import runtime
from fullshard.errors import CheckpointError, DataError, TrainingError
from fullshard.ranks import agree, agree_locally, any_of, on_rank_0, once_per_node
from tests.pool import ranks


def fail_on(rank, error):
    if runtime.rank() == rank:
        raise error
    return runtime.rank()


@ranks(2)
def test_all_ranks_raise_when_one_fails():
    assert agree(runtime.rank, "test") == [0, 1]
    assert agree_locally(runtime.rank, "test") == runtime.rank()
    with pytest.raises(DataError, match=r"^no rows$"):
        agree(lambda: fail_on(1, DataError("no rows")), "test")
    with pytest.raises(KeyError if runtime.rank() == 1 else TrainingError, match="'name'"):  # a bug keeps its traceback
        agree(lambda: fail_on(1, KeyError("name")), "test")
    with pytest.raises(CheckpointError, match=r"^rank 1: a.txt: No space left$"):
        agree_locally(lambda: fail_on(1, OSError(28, "No space left", "a.txt")), "test", error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"^no rows$"):  # from all ranks: once, without their numbers
        agree(lambda: fail_on(runtime.rank(), DataError("no rows")), "test", error=CheckpointError)


@ranks(2)
def test_one_process_of_a_node_works_for_the_others():
    assert once_per_node(lambda: fail_on(1, AssertionError("only the first rank works")), "test") == 0
    assert on_rank_0(lambda: fail_on(1, AssertionError("only rank 0 works")), "test") == 0
    with pytest.raises(DataError, match=r"^unreadable$"):
        once_per_node(lambda: fail_on(0, DataError("unreadable")), "test")
    assert any_of(1 << runtime.rank(), "test") == 0b11
