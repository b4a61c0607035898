"""Several dtypes in one model: mixed precision, loss scaling, packed parameters."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.fsdp import (
    FSDPv2,
    MixedPrecision,
    gradients,
    transformer_auto_wrap_policy,
)
from tests.fsdp.programs import Block, Stack, alone, batches, build, loss_of, mesh_for, mine
from tests.pool import ranks

DOUBLE = torch.float64


def _model(dtype=torch.float32, **options):
    options = {"auto_wrap_policy": transformer_auto_wrap_policy, "small_parameter_bytes": 2048, **options}
    return FSDPv2(build("llama", dtype), mesh_for("FULL_SHARD"), **options)


def _distance(model_or_grads, reference):
    return max((g - reference[n]).abs().max().item() for n, g in model_or_grads.items())


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_no_further_from_fp32_than_fully_shard_is(reduce_dtype):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _, reference, _ = alone("llama", 1, torch.float32)
    batch = mine(batches(1, torch.float32)[0])
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    model = _model(mixed_precision=policy)
    loss_of(model, batch).backward()
    ours = _distance({n: p.grad.full_tensor() for n, p in model.named_parameters()}, reference)
    assert all(p.dtype == torch.float32 for p in model.parameters())

    theirs = build("llama", torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    for layer in theirs.model.layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        )
    fully_shard(theirs, mesh=mesh, mp_policy=mp)
    loss_of(theirs, batch).backward()
    peer = _distance({n: p.grad.full_tensor() for n, p in theirs.named_parameters()}, reference)
    print(f"distance from fp32: ours {ours:.3g}, fully_shard {peer:.3g}")
    assert 0 < ours <= peer


@ranks(2)
def test_dtypes_of_parameters_buffers_outputs_and_gradients():
    seen = {}

    class Probe(Block):
        def forward(self, x):
            seen["input"], seen["weight"] = x.dtype, self.up.weight.dtype
            return super().forward(x)

    module = Stack().to(torch.bfloat16)
    module.blocks[0] = Probe().to(torch.bfloat16)
    module.out.weight.requires_grad_(False)
    policy = MixedPrecision("bf16", reduce_dtype="fp32", buffer_dtype="bf16", output_dtype="fp32")
    model = FSDPv2(module, mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, mixed_precision=policy)
    out = model(torch.randn(4, 8))
    assert seen == {"input": torch.bfloat16, "weight": torch.bfloat16} and out.dtype == torch.float32
    out.sum().backward()
    assert model.scale.dtype == torch.bfloat16
    assert model.out.weight.dtype == torch.bfloat16 and model.blocks[0].up.weight.dtype == torch.float32
    assert model.blocks[0].up.weight.grad.dtype == torch.float32
    kept = FSDPv2(
        Stack().to(torch.bfloat16), mesh_for("FULL_SHARD"), mixed_precision=MixedPrecision("bf16", master_dtype=None)
    )
    assert kept.out.weight.dtype == torch.bfloat16
    assert "float32 master, frozen ones as stored, compute bfloat16" in str(policy)


@ranks(2)
def test_small_gradients_are_converted_together_with_the_same_values():
    def trained(limit):
        torch.manual_seed(0)
        model = FSDPv2(
            Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block},
            mixed_precision=MixedPrecision("bf16", reduce_dtype="fp32", buffer_dtype="bf16"),
        )  # fmt: skip
        source = torch.Generator().manual_seed(runtime.rank())
        with (
            mock.patch.object(gradients, "TOGETHER", limit),
            mock.patch.object(gradients, "copy_together", wraps=gradients.copy_together) as copied,
        ):
            for sync in (False, True):
                with contextlib.nullcontext() if sync else model.no_sync():
                    model(torch.randn(4, 8, generator=source)).sum().backward()
        counts = [len(call.args[0]) for call in copied.call_args_list]
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, counts

    expected, one_by_one = trained(0)
    found, together = trained(gradients.TOGETHER)
    assert set(one_by_one) == {0} and sum(together) == 2 * len(found) and len(together) == len(one_by_one)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_fp16_and_grad_scaler_skip_the_same_steps_on_every_rank(strategy):
    model = FSDPv2(
        Stack(), mesh_for(strategy), auto_wrap_policy={Block}, strategy=strategy,
        mixed_precision=MixedPrecision("fp16", reduce_dtype="fp32", buffer_dtype="fp16", output_dtype="fp32"),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    decisions = []
    for step in range(4):
        before = model.out.bias.full_tensor().clone()
        x = torch.ones(4, 8)
        if step == 2 and runtime.rank() == 1:
            x = x * float("inf")  # one rank overflows
        scaler.scale(model(x).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        decisions.append(torch.equal(before, model.out.bias.full_tensor()))
    assert decisions == [False, False, True, False]
    scales = [None, None]
    torch.distributed.all_gather_object(scales, scaler.get_scale())
    assert scales == [8.0, 8.0]


class PackedLinear(nn.Module):
    """A weight stored as bytes with a scale per row; the module says how the gathered bytes are seen."""

    def __init__(self, rows=6, columns=8):
        super().__init__()
        self.packed = nn.Parameter(torch.randint(0, 255, (rows, columns), dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.rand(rows, 1), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(rows, columns))

    def see_gathered(self, gathered):
        return {"packed": PackedView(gathered["packed"], gathered["scales"])}

    def forward(self, x):
        packed = self.packed
        weight = packed.unpack() if isinstance(packed, PackedView) else packed.float() * self.scales
        return x @ (weight + self.adapter).T


class PackedView:
    def __init__(self, packed, scales):
        self.packed, self.scales = packed, scales

    def unpack(self):
        return self.packed.float() * self.scales


@ranks(1, 2, 4)
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["direct", "bucket"])
def test_packed_parameters_travel_as_bytes_and_are_seen_as_their_module_says(small):
    torch.manual_seed(0)
    plain = PackedLinear()
    torch.manual_seed(0)
    model = FSDPv2(
        PackedLinear(), mesh_for("FULL_SHARD"), small_parameter_bytes=small,
        mixed_precision=MixedPrecision("bf16", cast_forward_inputs=False) if runtime.world_size() == 4 else None,
    )  # fmt: skip
    x = torch.randn(8, 8)
    if runtime.world_size() == 4:
        plain.scales.data = plain.scales.data.bfloat16().float()
        plain.adapter.data = plain.adapter.data.bfloat16().float()
    for _ in range(2):  # the second time the memory is new
        expected, out = plain(x), model(x)
        torch.testing.assert_close(out.float(), expected, rtol=1e-6, atol=1e-4)
        expected.square().mean().backward()
        out.square().mean().backward()
    torch.testing.assert_close(model.adapter.grad.full_tensor(), plain.adapter.grad, rtol=1e-2, atol=1e-2)
    assert torch.equal(model.packed.full_tensor(), plain.packed)
    assert model.packed.grad is None
    assert model.plan.parameters["packed"].compute_dtype == "uint8"


# --- copies that are kept ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory(spare, total=0):
    """A device with so much memory left."""
    spares = mock.patch.object(accelerator, "spare_memory", return_value=spare)
    with spares, mock.patch.object(accelerator, "total_memory", return_value=total):
        yield


def _train(steps, *, accumulate=2, checkpoint=False, between=lambda model, step: None):
    """bf16 compute with fp32 masters on one rank; how many units were cast in each step, and what came of it."""
    model = build("llama", torch.float32)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = FSDPv2(
        model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision="bf16"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    casts, live, losses = [], [], []
    for unit in model._fullshard_engine.units:
        unit._copy = lambda parameters, plain=unit._copy: (casts.append(step), plain(parameters))
    for step, batch in enumerate(batches(steps, torch.float32)):
        between(model, step)
        for _ in range(accumulate):
            loss = loss_of(model, batch) / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        live.append(model.meter.live)
    units = len(model._fullshard_engine.units)
    return losses, [casts.count(step) / units for step in range(steps)], live, model


@ranks(1)
@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_copies_are_kept_until_backward_where_there_is_memory(checkpoint):
    """From the third step on, when memory has been at its peak, each forward casts once, and backward not again."""
    expected, twice, _, freed = _train(5, checkpoint=checkpoint)
    with memory(2**40):
        losses, casts, live, model = _train(5, checkpoint=checkpoint)
    assert losses == expected, "bit for bit"
    assert min(twice) > 2 and casts[:2] == twice[:2] and casts[2:] == [2, 2, 2], "one per micro-batch"
    size = sum(p.numel() for p in model.parameters()) * 2
    assert live == [0, 0, size, size, size]
    for p, q in zip(model.parameters(), freed.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
    with torch.no_grad():
        batch = batches(1, torch.float32)[0]
        assert torch.equal(loss_of(model, batch), loss_of(freed, batch))
    model._fullshard_engine.keep_copies(size - 1)
    assert model.meter.live == 0
    model._fullshard_engine.keep_copies(size)
    loss_of(model, batch).backward()
    assert model.meter.live == size
    model.to(torch.bfloat16)  # the shards are then what modules compute with
    loss_of(model, batch).backward()
    assert model.meter.live == 0


@ranks(1)
def test_kept_copies_follow_writes_that_torch_does_not_count():
    def shrink(model, step):
        if step == 3:
            for p in model.parameters():
                p.data.mul_(0.5)

    expected = _train(5, between=shrink)[0]
    with memory(2**40):
        assert _train(5, between=shrink)[0] == expected != _train(5)[0]


@ranks(1)
def test_copies_are_not_kept_where_memory_is_short_or_most_of_it_used():
    size = sum(p.numel() for p in build("llama", torch.float32).parameters()) * 2
    for spare, total in ((2 * size - 1, 2 * size), (4 * size, 9 * size)):
        with memory(spare, total):
            assert set(_train(4)[2]) == {0}
