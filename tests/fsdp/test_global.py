"""Global programs: sharded inputs, or parameters annotated on another axis. The loss is over the global batch."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import fullshard.spmd as xs
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from tests.fsdp.programs import VOCABULARY, Block, Stack, build, checkpoint_exactly, exact
from tests.pool import ranks

DOUBLE = torch.float64

TENSOR_PARALLEL = {
    "q_proj.weight": ("model", None),
    "k_proj.weight": ("model", None),
    "v_proj.weight": ("model", None),
    "o_proj.weight": (None, "model"),
    "gate_proj.weight": ("model", None),
    "up_proj.weight": ("model", None),
    "down_proj.weight": (None, "model"),
    "lm_head.weight": (None, "model"),
}


def _mesh(shape, names):
    return xs.Mesh(np.arange(runtime.world_size()), shape, names)


def _batch():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (8, 9), generator=generator)
    labels = ids.clone()
    for row in range(8):
        labels[row, :row] = -100  # rows count differently, so a mean of means would be wrong
    return ids, labels


def _reference(steps=3):
    model = build("llama", DOUBLE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    ids, labels = _batch()
    with exact(DOUBLE):
        for step in range(steps):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, gradients, dict(model.named_parameters())


def _assert_same(model, batch_spec, mesh, steps=3):
    losses, gradients, parameters = _reference(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, labels = _batch()
    xs.mark_sharding(ids, mesh, batch_spec)
    xs.mark_sharding(labels, mesh, batch_spec)
    with exact(DOUBLE):
        for step in range(steps):
            out = model(input_ids=ids, labels=labels)
            assert out.logits.shape == (8, 9, VOCABULARY)
            split = out.logits.sharding_spec[0]  # rows may be split further: torch may scatter a pending sum so
            assert split == batch_spec[0] or split[0] == batch_spec[0]
            out.loss.backward()
            assert abs(out.loss.full_tensor().item() - losses[step]) < 1e-9
            if step == 0:
                for name, p in model.named_parameters():
                    torch.testing.assert_close(
                        p.grad.full_tensor(), gradients[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                    )
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert (p.full_tensor() - parameters[name]).abs().max() < 1e-9, name
    assert model.meter.live == 0


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=pytest.mark.slow), "NO_SHARD"])
@pytest.mark.parametrize("policy", [None, transformer_auto_wrap_policy], ids=["none", "transformer"])
def test_sharded_input_gives_the_global_loss(strategy, policy):
    mesh = _mesh((2, 1), ("fsdp", "model"))
    model = FSDPv2(build("llama", DOUBLE), mesh, auto_wrap_policy=policy, strategy=strategy, small_parameter_bytes=2048)
    _assert_same(model, ("fsdp", None), mesh)
    unit = model.plan.units[-1].name
    steps = 3
    if strategy == "FULL_SHARD" and policy is not None:
        assert model.meter.gathers[unit] <= 2 * steps and model.meter.reduces[unit] == steps


@ranks(4)
@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tensor_parallel_parameters_are_sharded_over_fsdp_besides(checkpointed):
    mesh = _mesh((2, 2), ("fsdp", "model"))
    model = build("llama", DOUBLE)
    marked = {}
    for name, p in model.named_parameters():
        for ending, spec in TENSOR_PARALLEL.items():
            if name.endswith(ending):
                xs.mark_sharding(p, mesh, spec)
                marked[name] = spec
    if checkpointed:
        for layer in model.model.layers:
            checkpoint_exactly(layer)
    model = FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, small_parameter_bytes=512)
    for name in marked:
        plan = model.plan.parameters[name]
        assert "fsdp" in str(plan.spec) and "model" in str(plan.spec)
    q = model.model.layers[0].self_attn.q_proj.weight
    ordered = "sort_ranks" in inspect.signature(torch.distributed.new_group).parameters
    assert q.to_local().shape == ((8, 32) if ordered else (16, 16))  # rows over model, then rows or columns over fsdp
    _assert_same(model, ("fsdp", None), mesh)


@pytest.mark.slow
@ranks(4)
def test_extra_data_axis_splits_the_batch_over_both_axes():
    mesh = _mesh((2, 2), ("data", "fsdp"))
    model = FSDPv2(build("llama", DOUBLE), mesh, auto_wrap_policy=transformer_auto_wrap_policy, extra_data_axis="data")
    assert model.model.norm.weight.to_local().shape == (16,)  # copies over data
    _assert_same(model, (("data", "fsdp"), None), mesh)


@ranks(2, 4, slow=(4,))
def test_the_guides_program():
    """Only x is marked, y is plain; the output's layout is marked again and the result thrown away."""
    n = runtime.world_size()
    mesh = _mesh((n, 1), ("fsdp", "model"))
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(0)
    model = Stack()
    seen = []

    def shard_output(output, mesh):
        seen.append(output)
        xs.mark_sharding(output, mesh, ("fsdp", None))

    model = FSDPv2(model, mesh, shard_output, auto_wrap_policy={Block})
    x = torch.randn(8, 8)
    expected = reference(x, None)
    expected.sum().backward()
    x = xs.mark_sharding(x, mesh, ("fsdp", None))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0001)
    output = model(x, torch.ones(8))
    assert output.sharding_spec == ("fsdp", None) and seen
    torch.testing.assert_close(output.full_tensor(), expected)
    output.sum().backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-5)
    optimizer.step()


@ranks(2)
def test_shard_output_in_a_per_rank_program():
    mesh = _mesh((2,), ("fsdp",))
    shapes = []

    def look(output, mesh):
        shapes.append((tuple(output.shape), output.sharding_spec))

    model = FSDPv2(Stack(), mesh, look)
    out = model(torch.randn(4, 8))
    assert shapes == [((8, 8), ("fsdp", None))] and type(out) is torch.Tensor and out.shape == (4, 8)
    replaced = FSDPv2(Stack(), mesh, lambda output, mesh: output * 0)
    assert replaced(torch.randn(4, 8)).full_tensor().abs().sum() == 0


@ranks(2)
def test_a_plain_and_a_global_pass_of_one_model():
    mesh = _mesh((2,), ("fsdp",))
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(0)
    model = FSDPv2(Stack(), mesh, auto_wrap_policy={Block})
    x = torch.randn(8, 8)
    reference(x).square().mean().backward()
    reference(x).square().mean().backward()
    model(x.chunk(2)[runtime.rank()]).square().mean().backward()
    model(xs.mark_sharding(x.clone(), mesh, ("fsdp", None))).square().mean().backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6)


class Annotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@ranks(4)
def test_annotations_that_do_not_divide():
    mesh = _mesh((2, 2), ("fsdp", "model"))
    torch.manual_seed(0)
    reference = Annotated().double()
    torch.manual_seed(0)
    model = Annotated().double()
    xs.mark_sharding(model.up.weight, mesh, ("model", None))  # 10 rows over 2 × 2: fsdp goes to the other dim
    xs.mark_sharding(model.up.bias, mesh, ("model",))  # no dim is left: copies over fsdp
    xs.mark_sharding(model.down.weight, mesh, (None, "model"))
    model = FSDPv2(model, mesh, small_parameter_bytes=0)
    assert [p.spec for p in model.plan.units[0].parameters] == [
        ("model", "fsdp"), ("model",), ("fsdp", "model"), ("fsdp",)
    ]  # fmt: skip
    x = torch.randn(8, 6, dtype=DOUBLE)
    reference(x).square().mean().backward()
    model(xs.mark_sharding(x, mesh, ("fsdp", None))).square().mean().backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-12)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert abs(model.clip_grad_norm_(0.1).item() - expected.item()) < 1e-12
    values = model.full_state_dict()
    for name, p in reference.named_parameters():
        assert torch.equal(values[name], p.detach())
