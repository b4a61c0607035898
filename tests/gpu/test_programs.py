"""Programs whose ranks differ in what they do, and programs over global tensors, on NCCL ranks that share one GPU."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

import fullshard.spmd as xs
from fullshard import FSDPv2
from fullshard.distributed import runtime
from fullshard.fsdp import transformer_auto_wrap_policy
from tests.fsdp import programs as fsdp
from tests.fsdp.programs import STRATEGIES, Branches, exact, loss_of, mean_over_ranks, mesh_for, mine
from tests.gpu.programs import SMALL, llama
from tests.pool import gpu_ranks
from tests.spmd.models import GPT2_RULES, LLAMA_RULES, annotate, assert_one_step_equals_one_device, batch
from tests.spmd.models import gpt2 as spmd_gpt2
from tests.spmd.models import llama as spmd_llama

DOUBLE = torch.float64
STEPS = 3


def _branches() -> torch.nn.Module:
    torch.manual_seed(3)
    return Branches().to(runtime.device(), DOUBLE)


def _train(model, rows, no_sync):
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [x.to(runtime.device()) for x in fsdp.batches(2 * STEPS, DOUBLE, "branches")]
    with exact(DOUBLE):
        for step in range(STEPS):
            for i, x in enumerate(data[2 * step : 2 * step + 2]):
                with model.no_sync() if no_sync and i == 0 else contextlib.nullcontext():
                    loss = loss_of(model, rows(x))
                    (loss / 2).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return losses


@gpu_ranks(2, 4)
@pytest.mark.parametrize("no_sync", [False, True], ids=["each", "no_sync"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_take_different_branches(strategy, no_sync):
    reference = _branches()
    expected = [loss.item() for loss in _train(reference, lambda x: x, False)]
    model = FSDPv2(_branches(), mesh_for(strategy), strategy=strategy, small_parameter_bytes=128)
    losses = [mean_over_ranks(loss) for loss in _train(model, mine, no_sync)]
    assert losses == pytest.approx(expected, abs=1e-9)
    values = model.full_state_dict()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(values[name], p.detach().cpu(), rtol=0, atol=1e-9, msg=name)
    assert model.unused.grad is None and torch.equal(values["unused"], torch.ones(5, 3, dtype=DOUBLE))


# --- generation -----------------------------------------------------------------------------------------------------


@gpu_ranks(2, 4)
@pytest.mark.parametrize("cache", [False, True], ids=["recomputing", "cache"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_generate_with_ranks_that_stop_at_different_lengths(strategy, cache, world_size):
    if not cache and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
        pytest.skip(
            "needs transformers 5.20: with 5.17 and no cache the mask of a finished rank grows on while its tokens do "
            "not, and the next forward fails on that rank"
        )
    device, me = runtime.device(), runtime.rank()
    plain = llama().to(device).eval()
    model = FSDPv2(
        llama().to(device).eval(), mesh_for(strategy), strategy=strategy, small_parameter_bytes=SMALL,
        auto_wrap_policy=transformer_auto_wrap_policy,
    )  # fmt: skip
    prompt = torch.tensor([[5 + 7 * me, 9, 11 + me]], device=device)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": cache}
    free = plain.generate(prompt, **options, eos_token_id=None)[0, 3:].tolist()
    # Each rank ends at a token of its own continuation: the first rank at once, the last one late.
    last = max(i for i, token in enumerate(free) if token not in free[:i])
    options["eos_token_id"] = free[0 if me == 0 else last]
    expected = plain.generate(prompt, **options)
    got = model.generate(prompt, **options)
    assert torch.equal(got, expected)
    lengths = [0] * world_size
    dist.all_gather_object(lengths, got.shape[1])
    assert lengths[0] == 4 and max(lengths) > 4, lengths
    ids = torch.randint(3, 60, (2, 8), device=device)
    model.train()(input_ids=ids, labels=ids).loss.backward()  # and it still trains
    assert all(p.grad is not None for p in model.parameters())


# --- the sharding language ------------------------------------------------------------------------------------------


@gpu_ranks(4)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tensor_parallelism(name):
    build, rules = {"llama": (spmd_llama, LLAMA_RULES), "gpt2": (spmd_gpt2, GPT2_RULES)}[name]
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    assert_one_step_equals_one_device(build, rules, mesh)


@gpu_ranks(4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_tensor_parallelism_under_fully_sharded_training(strategy):
    """Parameters split over `model` by annotation and over `fsdp` by the engine; the loss is over the global batch."""
    device = runtime.device()
    mesh = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "model"))
    rules = [(ending, tuple(None if axis == "data" else axis for axis in spec)) for ending, spec in LLAMA_RULES]
    reference, model = spmd_llama(DOUBLE).to(device), spmd_llama(DOUBLE).to(device)
    annotate(model, mesh, rules)
    model = FSDPv2(
        model, mesh, strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy, small_parameter_bytes=2048
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
    with exact(DOUBLE):
        for _ in range(2):
            ids, labels = (t.to(device) for t in batch())
            expected = reference(input_ids=ids, labels=labels).loss
            expected.backward()
            for t in (ids, labels):
                xs.mark_sharding(t, mesh, ("fsdp", None))
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.testing.assert_close(loss.full_tensor(), expected, rtol=0, atol=1e-9)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=0, atol=1e-9, msg=name)
