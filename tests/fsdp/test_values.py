"""Values in and out: state dicts, whole parameters, initial values, deferred ones, norms."""

import json

import pytest
import torch
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.distributed import runtime
from fullshard.fsdp import (
    FSDPv2,
    transformer_auto_wrap_policy,
)
from tests.fsdp.programs import Block, Stack, alone, batches, build, exact, llama, loss_of, mesh_for, mine
from tests.pairwise import thinned
from tests.pool import ranks

DOUBLE = torch.float64


def _model(dtype=torch.float32, **options):
    options = {"auto_wrap_policy": transformer_auto_wrap_policy, "small_parameter_bytes": 2048, **options}
    return FSDPv2(build("llama", dtype), mesh_for("FULL_SHARD"), **options)


@ranks(2)
def test_state_dicts_in_and_out():
    reference = build("llama-tied", DOUBLE)
    model = FSDPv2(build("llama-tied", DOUBLE), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    full = model.full_state_dict()
    plain = reference.state_dict()
    assert list(full) == list(plain) and all(torch.equal(full[n], plain[n]) for n in plain)
    assert full["lm_head.weight"] is full["model.embed_tokens.weight"]
    assert (len(model.full_state_dict(rank0_only=True)) > 0) == (runtime.rank() == 0)
    sharded = {n: v.clone() for n, v in model.state_dict().items()}
    assert all(v.to_local().numel() < v.numel() for v in sharded.values())
    doubled = {n: 2 * v for n, v in plain.items()}
    model.load_state_dict(doubled)
    assert all(torch.equal(v, doubled[n]) for n, v in model.full_state_dict().items())
    model.load_state_dict(sharded)
    assert all(torch.equal(v, plain[n]) for n, v in model.full_state_dict().items())
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key") as caught:
        model.load_state_dict({**{n: v for n, v in plain.items() if "norm" not in n}, "extra": torch.ones(1)})
    assert "size mismatch" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"size mismatch"):
        model.load_state_dict({**plain, "model.norm.weight": torch.ones(5)})


@ranks(2)
def test_state_dict_between_forward_and_backward_is_sharded():
    model = _model(DOUBLE)
    with exact(DOUBLE):
        loss = loss_of(model, mine(batches(1, DOUBLE)[0]))
        assert all(isinstance(v, torch.distributed.tensor.DTensor) for v in model.state_dict().values())
        assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
        loss.backward()


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_summon_full_params_reads_and_writes(strategy):
    reference = build("llama", DOUBLE)
    model = FSDPv2(
        build("llama", DOUBLE), mesh_for(strategy), strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy
    )
    with model.summon_full_params():
        for (name, p), q in zip(reference.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(p, q[1]) and name == q[0]
        with torch.no_grad():
            model.lm_head.weight.fill_(3.0)
    assert torch.equal(model.lm_head.weight.full_tensor(), torch.full((67, 32), 3.0, dtype=DOUBLE))
    with model.summon_full_params(writeback=False), torch.no_grad():
        model.lm_head.weight.fill_(4.0)
    assert model.lm_head.weight.full_tensor().max() == 3.0
    model.apply(lambda m: nn.init.constant_(m.weight, 0.5) if isinstance(m, nn.Linear) else None)
    assert model.model.layers[1].mlp.up_proj.weight.full_tensor().unique().tolist() == [0.5]


@ranks(2)
def test_save_pretrained_writes_the_true_architecture(tmp_path):
    from transformers import AutoModelForCausalLM

    path = [str(tmp_path)]
    torch.distributed.broadcast_object_list(path, src=0)
    model = FSDPv2(
        build("llama-tied", torch.float32), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy
    )
    model.save_pretrained(path[0])
    with open(f"{path[0]}/config.json") as file:
        assert json.load(file)["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(path[0])
    reference = build("llama-tied", torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), reference.parameters(), strict=True))


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_ranks_that_built_different_values_end_with_rank_0s(strategy):
    torch.manual_seed(100 + runtime.rank())
    module = Stack()
    module.scale += runtime.rank()
    expected = [{n: v.clone() for n, v in module.state_dict().items()}]
    torch.distributed.broadcast_object_list(expected, src=0)
    model = FSDPv2(module, mesh_for(strategy), strategy=strategy)
    got = model.full_state_dict()
    assert all(torch.equal(got[n], v) for n, v in expected[0].items())
    torch.manual_seed(100 + runtime.rank())
    apart = FSDPv2(Stack(), mesh_for("FULL_SHARD"), sync_module_states=False)
    rows = apart.out.weight.full_tensor()
    torch.manual_seed(100)
    zero = Stack().out.weight
    torch.manual_seed(101)
    one = Stack().out.weight
    assert torch.equal(rows, torch.cat([zero[:4], one[4:]]))


@ranks(2)
def test_meta_modules():
    def init(module):
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(2.0)

    with torch.device("meta"):
        first, second, third = Stack(), Stack(), llama(tied=True)
    model = FSDPv2(first, mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, param_init_fn=init)
    assert model.blocks[0].up.weight.full_tensor().unique().tolist() == [0.25]
    model(torch.randn(4, 8)).sum().backward()

    second.scale = torch.full((8,), 2.0)
    deferred = FSDPv2(second, mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    early = torch.optim.SGD(deferred.parameters(), lr=0.1)
    assert deferred.blocks[0].up.weight.to_local().is_meta
    with pytest.raises(FSDPError, match=r"no values yet.*out.weight"):
        deferred(torch.randn(4, 8))
    values = Stack().state_dict()
    deferred.load_state_dict(values)
    assert all(torch.equal(v, values[n]) for n, v in deferred.full_state_dict().items())
    x = torch.randn(4, 8)
    plain = Stack()
    plain.load_state_dict(values)
    torch.testing.assert_close(deferred(x), plain(x))
    deferred(x).sum().backward()
    early.step()  # built before the values came, and right all the same
    assert not torch.equal(deferred.out.bias.full_tensor(), values["out.bias"])
    tied = FSDPv2(third, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy, param_init_fn=init)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight and not tied.lm_head.weight.to_local().is_meta


@ranks(2)
def test_rank_0_alone_may_hold_the_values():
    torch.manual_seed(5)
    values = Stack().state_dict()
    if runtime.rank() == 0:
        module = Stack()
        module.load_state_dict(values)
    else:
        with torch.device("meta"):
            module = Stack()
        module.scale = torch.zeros(8)
    model = FSDPv2(module, mesh_for("FULL_SHARD"), sync_module_states=True)
    assert all(torch.equal(v, values[n]) for n, v in model.full_state_dict().items())


@ranks(2)
def test_ignored_modules_stay_as_they_are():
    module = Stack()
    model = FSDPv2(module, mesh_for("FULL_SHARD"), ignored_modules=[module.out])
    assert type(model.out.weight) is nn.Parameter and "out.weight" not in model.plan.parameters
    model(torch.randn(4, 8)).sum().backward()
    assert model.out.weight.grad is not None


@ranks(2)
@pytest.mark.parametrize("p", [2.0, float("inf")])
def test_ranks_scale_alike_though_gradients_of_ignored_modules_differ(p):
    module = Stack().double()
    model = FSDPv2(module, mesh_for("FULL_SHARD"), ignored_modules=[module.out])
    model(torch.randn(4, 8, dtype=DOUBLE)).sum().backward()
    model.out.weight.grad.fill_(runtime.rank() + 1.0)
    model.out.bias.grad.zero_()
    shards = [q.grad.full_tensor().norm(p) for q in model.blocks.parameters()]
    own = [torch.full((64,), rank + 1.0, dtype=DOUBLE).norm(p) for rank in range(2)]
    if p == float("inf"):
        expected = max(*shards, *own)
    else:
        expected = (sum(n**p for n in shards) + sum(n**p for n in own) / 2) ** (1 / p)
    torch.testing.assert_close(model.clip_grad_norm_(0.1, p), expected, rtol=1e-12, atol=0)


@ranks(1, 2, 4, slow=(1, 2))
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("p", thinned([2.0, 1.0, 3.0, float("inf")]))
def test_clip_grad_norm(strategy, p):
    if strategy == "HYBRID_SHARD" and runtime.world_size() == 1:
        return
    _, gradients, _ = alone("llama", 5, DOUBLE)
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, 0.05, p)
    model = FSDPv2(
        build("llama", DOUBLE), mesh_for(strategy), strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy
    )
    with exact(DOUBLE):
        loss_of(model, mine(batches(1, DOUBLE)[0])).backward()
    norm = model.clip_grad_norm_(0.05, p)
    assert abs(norm.item() - expected.item()) < 1e-9
    for parameter, q in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), parameter.grad, rtol=0, atol=1e-9)
    assert abs(model.clip_grad_norm_(1e9, p).item() - min(expected.item(), 0.05)) < 1e-4
    model.lm_head.weight.grad.to_local().fill_(float("nan"))
    with pytest.raises(FSDPError, match=r"nan"):
        model.clip_grad_norm_(1.0, p, error_if_nonfinite=True)
