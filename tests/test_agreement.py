"""`fullshard.distributed.ranks`: an error on one rank is raised on all, and a result reaches the ranks that need it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fullshard
from fullshard.checkpoint.objects import _difference
from fullshard.config.errors import CheckpointError, ConfigError, DataError, TrainingError
from fullshard.distributed import rendezvous, runtime
from fullshard.distributed.ranks import agree, any_of, on_rank_0, once_per_node, require_equal, run_on_all_ranks
from fullshard.parallel.settings import EngineSettings
from tests.pool import ranks


def fail_on(rank, error):
    if runtime.rank() == rank:
        raise error
    return runtime.rank()


@ranks(2)
def test_all_ranks_raise_when_one_fails():
    assert agree(runtime.rank, "test") == [0, 1]
    assert run_on_all_ranks(runtime.rank, "test") == runtime.rank()
    with pytest.raises(DataError, match=r"^no rows$"):
        agree(lambda: fail_on(1, DataError("no rows")), "test")
    with pytest.raises(KeyError if runtime.rank() == 1 else TrainingError, match="'name'"):  # a bug keeps its traceback
        agree(lambda: fail_on(1, KeyError("name")), "test")
    with pytest.raises(CheckpointError, match=r"^rank 1: a.txt: No space left$"):
        run_on_all_ranks(lambda: fail_on(1, OSError(28, "No space left", "a.txt")), "test", error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"^no rows$"):  # from all ranks: once, without their numbers
        agree(lambda: fail_on(runtime.rank(), DataError("no rows")), "test", error=CheckpointError)


@ranks(2)
def test_one_process_of_a_node_works_for_the_others():
    assert once_per_node(lambda: fail_on(1, AssertionError("only the first rank works")), "test") == 0
    assert on_rank_0(lambda: fail_on(1, AssertionError("only rank 0 works")), "test") == 0
    with pytest.raises(DataError, match=r"^unreadable$"):
        once_per_node(lambda: fail_on(0, DataError("unreadable")), "test")
    assert any_of(1 << runtime.rank(), "test") == 0b11


@ranks(2)
def test_what_differs_is_named_with_its_values_and_ranks():
    facts = {"lr": [1e-3, 2e-3][runtime.rank()], "betas": (0.9, 0.999), "object": f"<function at 0x{runtime.rank()}>"}
    with pytest.raises(
        ConfigError, match=r"^the ranks would train differently: lr is 0\.001 on rank 0, 0\.002 on rank 1\."
    ):
        require_equal(facts, "settings")
    require_equal({**facts, "lr": 1e-3}, "settings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_version", lambda name: f"{name}-{runtime.rank() if name == 'torch' else 0}")
        with pytest.raises(ConfigError, match=r'torch is "torch-0" on rank 0, "torch-1" on rank 1\. Start'):
            require_equal({}, "settings")


@ranks(2)
def test_a_loop_with_another_learning_rate_on_one_rank_is_refused():
    def parts(rate, rows=8, batch=2):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        loader = DataLoader(TensorDataset(torch.randn(rows, 4)), batch_size=batch)
        return model, optimizer, scheduler, loader

    other = runtime.rank() == 1
    with pytest.raises(ConfigError, match=r"lr of group 0 of AdamW .* is 0\.1 on rank 0, 0\.2 on rank 1"):
        fullshard.prepare(*parts(0.2 if other else 0.1))
    with pytest.raises(ConfigError, match=r"rows of DataLoader .* is 8 on rank 0, 10 on rank 1"):
        fullshard.prepare(*parts(0.1, rows=10 if other else 8))
    settings = EngineSettings(use_cpu=True, mixed_precision="bf16" if other else "no")
    with pytest.raises(ConfigError, match=r'mixed_precision is "no" on rank 0, "bf16" on rank 1'):
        fullshard.prepare(*parts(0.1), settings=settings)
    fullshard.prepare(*parts(0.1))


def test_the_difference_between_two_states_is_named():
    """However far down: the first letters of two long lists are the same."""
    groups = [{"name": "x" * 200, "lr": rate, "betas": [0.9, 0.999]} for rate in (1e-3, 2e-3)]
    assert _difference({"groups": groups[:1]}, {"groups": groups[1:]}) == "/groups/0/lr: 0.001 and 0.002"
