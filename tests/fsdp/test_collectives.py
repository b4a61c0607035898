"""Collectives, as every backend but Gloo gets them: what they hold is released, and training is that of one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard.distributed.watchdog.watch import OperationLog
from fullshard.fsdp import build
from fullshard.fsdp.comm import Collectives
from fullshard.fsdp.counters import Meter
from tests.fsdp.programs import POLICIES, assert_same_training, mesh_for
from tests.pool import ranks


class Work:
    """As NCCL's: it holds the tensors of its collective until it is waited for, even if nobody holds the work."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors: list[torch.Tensor] = list(tensors)

    def wait(self) -> None:
        self.tensors = []

    def is_completed(self) -> bool:
        return True


class Group:
    """A group of two ranks that issues nothing; its watchdog holds every work."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def _issue(self, *tensors: torch.Tensor) -> Work:
        self.works.append(Work(*tensors))
        return self.works[-1]

    def _gather_or_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        return self._issue(*outputs, *inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_or_scatter
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _gather_or_scatter

    def allreduce_coalesced(self, tensors: Any, options: Any) -> Work:
        return self._issue(*tensors)

    def _start_coalescing(self, device: torch.device) -> None: ...

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._issue()


@pytest.mark.parametrize("operation", ["gather", "scatter_sum", "sum"])
def test_what_a_launch_holds_is_released_when_it_is_waited_for(operation: str) -> None:
    group: Any = Group()
    link = Collectives(group, OperationLog("gather", (0, 1), group), torch.device("cpu"), Meter())
    tensors = [torch.zeros(8), torch.zeros(4), torch.zeros(6, dtype=torch.float64)]
    if operation == "gather":
        pending = link.gather([(t, t[: len(t) // 2].clone()) for t in tensors], 0)
    else:
        pending = getattr(link, operation)(tensors, True, 0)
    assert any(work.tensors for work in group.works)
    pending.wait()
    assert not any(work.tensors for work in group.works)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_training_with_collectives_is_that_of_one_device(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, build):  # Gloo has collectives too
            patch.setattr(module, "uses_point_to_point", lambda group: group is None)
        options = {"mesh": mesh_for(strategy), "strategy": strategy, "auto_wrap_policy": POLICIES["transformer"]}
        model = assert_same_training("llama", small_parameter_bytes=2048, **options)
    context = model._fullshard_engine.context
    assert [type(link) for link in (context.gather_link, context.replica_link) if link.size > 1] == [Collectives]
