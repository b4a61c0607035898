"""Experts on several ranks: outputs and gradients are those of all tokens and experts on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fullshard.device.torch_private import parameters_of
from fullshard.distributed import runtime
from fullshard.distributed.autograd_collectives import RankGroup
from fullshard.fsdp import build
from fullshard.fsdp.build import make_link
from fullshard.fsdp.comm import Collectives
from fullshard.fsdp.counters import Meter
from fullshard.models.experts import DISPATCH, experts_modules, use_own_experts
from fullshard.models.experts_dispatch import Dispatch
from fullshard.quant.expert_adapters import LoraFactors
from fullshard.spmd import Mesh
from tests.pool import ranks
from tests.sft.test_all_linear import make

SIZES = {"even": [6, 6, 6, 6], "one rank without tokens": [7, 0, 3, 9], "tokens on one rank only": [0, 5, 0, 0]}
RANK = 3


def layer(family: str) -> Any:
    model = make(family).double()
    assert use_own_experts(model)
    return next(module for _, module in experts_modules(model))


def split(module: Any, meter: Meter, world: int) -> Dispatch:
    """Keep this rank's experts only."""
    runtime.use_spmd()
    link = make_link(Mesh(np.arange(world), (world,), ("ep",)), ("ep",), "experts", None, meter)
    dispatch = Dispatch(link, module.num_experts, "experts", 0, RankGroup("", 1, 0))
    for name, p in list(parameters_of(module).items()):
        parameters_of(module)[name] = torch.nn.Parameter(dispatch.own(p.detach()).clone())
    setattr(module, DISPATCH, dispatch)
    return dispatch


def inputs(module: Any, tokens: int, routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = parameters_of(module)["down_proj"].shape[2 if module.is_transposed else 1]
    x = torch.randn(tokens, hidden, generator=draw, dtype=torch.float64)
    scores = torch.rand(tokens, module.num_experts, generator=draw, dtype=torch.float64)
    if routing == "all to the last expert":
        scores[:, -1] += 1
    weights, chosen = scores.topk(2)
    return x, weights, chosen


def factors(module: Any) -> dict[str, list[LoraFactors]]:
    draw = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    shapes = {name: parameters_of(module)[name].shape for name in ("gate_up_proj", "down_proj")}
    return {n: [LoraFactors(drawn(e, rows, RANK), drawn(e, RANK, cols), 0.5)] for n, (e, rows, cols) in shapes.items()}


def results(module: Any, adapters: Any, x: Any, weights: Any, chosen: Any, out_grad: Any, recompute: bool) -> list[Any]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    run = lambda x, weights: module(x, chosen, weights, adapters=adapters)  # noqa: E731
    out = checkpoint(run, x, weights, use_reentrant=False) if recompute else run(x, weights)
    wanted = [x, weights, *parameters_of(module).values(), *(t for a in adapters.values() for t in a[0][:2])]
    return [out, *torch.autograd.grad((out * out_grad).sum(), wanted)]


@ranks(4)
def test_with_collectives() -> None:
    """Every backend but Gloo exchanges tokens so; Gloo has them too."""
    counts, rank = SIZES["one rank without tokens"], runtime.rank()
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    outcomes = []
    for collectives in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if collectives:
                patch.setattr(build, "uses_point_to_point", lambda group: group is None)
            module, meter = layer("Qwen3Moe"), Meter()
            x, weights, chosen = inputs(module, sum(counts), "spread")
            adapters = factors(module)
            dispatch = split(module, meter, 4)
        assert isinstance(dispatch.link, Collectives) == collectives
        one = results(module, adapters, x[mine], weights[mine], chosen[mine], torch.ones_like(x[mine]), False)
        outcomes.append((one, meter.bytes_sent))
    (messages, sent), (through_collectives, sent_so) = outcomes
    assert sent == sent_so
    for one, other in zip(messages, through_collectives, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@ranks(2, 4)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("routing", ["spread", "all to the last expert"])
def test_as_on_one_device(family: str, sizes: str, routing: str, world_size: int) -> None:
    runtime.use_spmd()
    counts = SIZES[sizes][:world_size]
    module, tokens = layer(family), sum(counts)
    x, weights, chosen = inputs(module, tokens, routing)
    out_grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    adapters = factors(module)
    recompute = sizes == "even"
    expected = results(module, adapters, x, weights, chosen, out_grad, False)
    meter = Meter()
    dispatch = split(module, meter, world_size)
    rank = runtime.rank()
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    own = results(module, adapters, x[mine], weights[mine], chosen[mine], out_grad[mine], recompute)
    for value, whole in zip(own[:3], expected[:3], strict=True):
        torch.testing.assert_close(value, whole[mine], rtol=0, atol=1e-10)
    for value, whole in zip(own[3:], expected[3:], strict=True):
        value = dispatch.own(value) if value.shape == whole.shape else value
        torch.testing.assert_close(value, dispatch.own(whole), rtol=0, atol=1e-10)

    # Bytes: each token goes once to every rank with one of its experts, and there and back in forward and backward.
    holders = [set(row) - {rank} for row in (chosen[mine] // dispatch.count).tolist()]
    rows = sum(len(h) for h in holders)
    theirs = [row for i, row in enumerate((chosen // dispatch.count).tolist()) if not mine.start <= i < mine.stop]
    arrived = sum(rank in row for row in theirs)
    hidden, choices = x.shape[1], chosen.shape[1]
    message = hidden * 8 + choices * (8 + 8)
    count = (world_size - 1) * 2 * 8
    forward = rows * message + count + arrived * hidden * 8
    backward = rows * hidden * 8 + arrived * (hidden * 8 + choices * 8)
    again = rows * message + count if recompute else 0  # a recomputation ends with the last value that backward needs
    assert meter.tokens_sent["experts"] == meter.bytes_sent == forward + again + backward
