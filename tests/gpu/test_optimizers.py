"""Optimizers with kernels, memory or whole matrices of their own, on NCCL ranks that share one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard.checkpoint import load_state, save_state
from fullshard.device import accelerator
from fullshard.device.torch_private import local_of
from fullshard.distributed import runtime
from fullshard.sft.optimizer import make_optimizer
from fullshard.spmd.tensor import full_of
from tests.pool import gpu_ranks
from tests.sft.test_optimizers import Net, check_steps, config_of, made, take_steps, wrapped

NAMES = (
    "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit", "muon",
    "adafactor", "lion_32bit",
)  # fmt: skip


@gpu_ranks(1, 2)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_one_device(name: str) -> None:
    check_steps(name, "FULL_SHARD")


@gpu_ranks(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "muon"])  # which computes on both devices
def test_steps_on_shards_in_host_memory(name: str) -> None:
    check_steps(name, "FULL_SHARD", device="cpu", cpu_offload=True)


class Large(nn.Module):
    """bitsandbytes pages the state of 100,000 values and more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 256) * 0.1)

    def forward(self) -> None: ...


@gpu_ranks(2)
@pytest.mark.parametrize("name", ["paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit"])
def test_paged_state_stays_paged(name: str, tmp_path: Path) -> None:
    model = wrapped(made(Large))
    optimizer = make_optimizer(model, config_of(name))
    take_steps(model, optimizer, range(2))
    save_state(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    take_steps(model, optimizer, range(2, 4))
    resumed = wrapped(made(Large, seed=9))
    other = make_optimizer(resumed, config_of(name))
    load_state(tmp_path / "checkpoint", model=resumed, optimizer=other)
    take_steps(resumed, other, range(2, 4))
    assert torch.equal(full_of(model.weight), full_of(resumed.weight))
    for p, one in ((model.weight, optimizer), (resumed.weight, other)):
        paged = getattr(local_of(one.state[p]["state1"]), "is_paged", False)
        assert paged == accelerator.is_accelerator(runtime.device())


@gpu_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_continue_exactly(name: str, tmp_path: Path) -> None:
    straight = wrapped(made(Net))
    optimizer = make_optimizer(straight, config_of(name))
    take_steps(straight, optimizer, range(3))
    save_state(tmp_path / "checkpoint", model=straight, optimizer=optimizer)
    take_steps(straight, optimizer, range(3, 5))
    resumed = wrapped(made(Net, seed=9))
    optimizer = make_optimizer(resumed, config_of(name))
    load_state(tmp_path / "checkpoint", model=resumed, optimizer=optimizer)
    take_steps(resumed, optimizer, range(3, 5))
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(full_of(p), full_of(q)), runtime.device()
