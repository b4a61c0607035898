"""Shards in host memory: once a pass has returned, the host may write to them, free them, or start over."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from fullshard.device.accelerator import LARGE
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2
from tests.fsdp.programs import Block, Stack, mesh_for
from tests.gpu.chaos import chaos
from tests.pool import gpu_ranks

WIDTH = 512


def _offloaded(strategy: str = "FULL_SHARD") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A plain model on the device, the same one with its shards on the host, and an input."""
    torch.manual_seed(1)
    plain = Stack(WIDTH, 4)
    inputs = torch.randn(16, WIDTH).to(runtime.device())
    model = FSDPv2(
        copy.deepcopy(plain), mesh_for(strategy), strategy=strategy, auto_wrap_policy={Block}, cpu_offload=True
    )
    assert max(p._local_tensor.nbytes for p in model.parameters()) >= LARGE / 2  # some are locked by us, some by torch
    return plain.to(runtime.device()), model, inputs


def _late() -> object:
    """Copies to the device start long after they were asked for."""
    return chaos(3, poison=False)


@gpu_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward only", "with a graph"])
def test_the_host_may_write_once_a_pass_has_returned(strategy, grad):
    plain, model, inputs = _offloaded(strategy)
    expected = plain(inputs)
    for _ in range(3):
        with _late(), torch.set_grad_enabled(grad):
            got = model(inputs)
            before = [p._local_tensor.clone() for p in model.parameters()]
            for p in model.parameters():
                p._local_tensor.fill_(float("nan"))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            del got
        for p, value in zip(model.parameters(), before, strict=True):
            with torch.no_grad():
                p._local_tensor.copy_(value)
            torch.autograd.graph.increment_version(p)


@gpu_ranks(2)
def test_a_model_may_go_while_its_shards_are_copied():
    for _ in range(3):
        plain, model, inputs = _offloaded()
        expected = plain(inputs)
        with _late(), torch.no_grad():
            got = model(inputs)
            del model
            gc.collect()
            held = [
                torch.full((WIDTH, WIDTH), float("nan"), pin_memory=runtime.device().type == "cuda") for _ in range(8)
            ]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        del held


class _Breaks(Block):
    """A block whose backward can be made to fail."""

    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.broken:
            y.register_hook(_fail)
        return y


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError("on purpose")


@gpu_ranks(2)
def test_gradients_of_a_backward_that_broke_off_are_dropped():
    torch.manual_seed(1)
    plain = Stack(WIDTH, 3)
    plain.blocks[0] = _Breaks(WIDTH)
    model = FSDPv2(copy.deepcopy(plain), mesh_for("FULL_SHARD"), auto_wrap_policy={Block, _Breaks}, cpu_offload=True)
    plain.to(runtime.device())
    rows = torch.randn(16, WIDTH).to(runtime.device())
    mine = rows.chunk(runtime.world_size())[runtime.rank()]
    with _late():
        model(mine).square().mean().backward()
        model.zero_grad()
        model.blocks[0].broken = True
        with pytest.raises(ZeroDivisionError):
            model(mine).square().mean().backward()
        model.blocks[0].broken = False
        model.zero_grad()
        for _ in range(2):  # the second one adds to what the first left on the host
            model(mine).square().mean().backward()
    for _ in range(2):
        plain(rows).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad.full_tensor().cpu(), p.grad.cpu(), rtol=1e-4, atol=1e-6, msg=name)
