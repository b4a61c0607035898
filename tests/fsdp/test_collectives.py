"""Links that use collectives, on a process group that notes what is issued and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.fsdp.comm import Collectives, Pending
from fullshard.fsdp.counters import Meter
from fullshard.watchdog.watch import watch_for


class Work:
    """A work that holds its tensors until it is waited for, as those of NCCL do."""

    def __init__(self, *tensors: Any) -> None:
        self.held = tensors

    def wait(self) -> None:
        self.held = ()


class Group(dist.ProcessGroup):
    """One rank. The names of the calls differ between versions of torch."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.issued: list[Work] = []

    def _issue(self, *tensors: Any) -> Work:
        self.issued.append(Work(*tensors))
        return self.issued[-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _issue
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _issue
    allreduce_coalesced = _end_coalescing = _issue

    def _start_coalescing(self, device: Any) -> None: ...

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)


Issue = Callable[[Collectives, list[torch.Tensor]], Pending]
OPERATIONS: dict[str, Issue] = {
    "gather": lambda link, tensors: link.gather([(t.clone(), t) for t in tensors], 0),
    "scatter": lambda link, tensors: link.scatter_sum(tensors, True, 0),
    "sum": lambda link, tensors: link.sum(tensors, True, 0),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_work_that_is_issued_is_waited_for(operation: str) -> None:
    group = Group()
    link = Collectives(group, watch_for(operation, (0,), group), torch.device("cpu"), Meter())
    pending = OPERATIONS[operation](link, [torch.ones(4), torch.ones(2)])
    assert group.issued and any(work.held for work in group.issued)
    pending.wait()
    assert not any(work.held for work in group.issued)
