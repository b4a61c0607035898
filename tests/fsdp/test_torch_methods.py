"""The methods of torch's own FSDP on wrapped modules: served, without effect and reported, or refused by name."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)

from fullshard.config.errors import FSDPError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2
from fullshard.fsdp.torch_methods import REFUSED, SERVED, WITHOUT_EFFECT
from fullshard.fsdp.wrapped_module import KEYWORDS, wrap_module
from fullshard.hf import torch_fsdp
from fullshard.hf.patches import TORCH_FSDP
from fullshard.spmd import get_1d_mesh, is_sharded
from tests.fsdp.programs import Block, Stack, mesh_for
from tests.fsdp.test_silent_errors import data
from tests.pool import ranks

OWN = {"clip_grad_norm_", "no_sync", "summon_full_params", "apply", "forward", "named_buffers", "named_parameters"}
"""Methods of FSDP 1 that wrapped modules have anyway."""
ABSENT = {"module"}
"""A wrapped model is the module itself. Libraries unwrap whatever has this attribute, so it must not exist."""


def public(cls):
    return {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base) if name[0] != "_"}


def test_every_public_method_of_torch_is_served_or_refused():
    """Whatever the installed torch has."""
    theirs = public(FullyShardedDataParallel) | public(FSDPModule)
    known = {*SERVED, *REFUSED, *WITHOUT_EFFECT, *OWN, *ABSENT}
    assert not theirs - known, "methods of this torch that FSDPv2 neither serves nor refuses by name"
    assert all(hasattr(FSDPv2, name) or hasattr(nn.Module, name) for name in known - ABSENT)
    assert not any(hasattr(FSDPv2, name) for name in ABSENT)
    static = {n for n, value in vars(FullyShardedDataParallel).items() if isinstance(value, staticmethod)}
    # By `fsdp_modules` torch's own checkpoints recognize modules of FSDP 1.
    assert {n for n in static if not n.startswith("_")} - {"fsdp_modules"} == set(TORCH_FSDP)


def test_every_keyword_of_torch_is_known():
    theirs = {*inspect.signature(fully_shard).parameters, *inspect.signature(FullyShardedDataParallel).parameters}
    ours = inspect.signature(wrap_module).parameters
    assert not theirs - set(ours) - set(KEYWORDS)
    for name, instead in KEYWORDS.items():
        with pytest.raises(FSDPError) as caught:
            FSDPv2(nn.Linear(2, 2), **{name: None})
        assert f"FSDPv2({name}=…)" in str(caught.value) and instead in str(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'strateggy'"):
        FSDPv2(nn.Linear(2, 2), strateggy="FULL_SHARD")
    with pytest.raises(FSDPError, match=r"wraps one module, and got 2: .*wrap the module around them"):
        FSDPv2([nn.Linear(2, 2), nn.Linear(2, 2)], get_1d_mesh("fsdp"))


@ranks(1)
def test_refusals_say_what_to_use_and_hints_are_reported():
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    for name, instead in REFUSED.items():
        with pytest.raises(FSDPError) as caught:
            getattr(model, name)(None)
        assert str(caught.value) == f"{name}() of torch's FSDP is not served by FSDPv2: {instead}"
    runtime.forget_warnings()
    for name in WITHOUT_EFFECT:
        assert getattr(model, name)([]) is None
    assert {f"fsdp-{name}" for name in WITHOUT_EFFECT} <= runtime.warned()
    model.set_reshard_after_backward(True)
    model.set_requires_all_reduce(True)
    for call in (
        lambda: model.set_reshard_after_backward(False),
        lambda: model.set_requires_all_reduce(False),
        lambda: model.set_requires_gradient_sync(False, recurse=False),
        lambda: model.set_state_dict_type(StateDictType.LOCAL_STATE_DICT),
        lambda: FSDPv2.get_state_dict_type(nn.Linear(2, 2)),
    ):
        with pytest.raises(FSDPError):
            call()


def _both(**options):
    plain, model = Stack().double(), Stack().double()
    model.load_state_dict(plain.state_dict())
    return plain, FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, **options)


@ranks(2)
def test_unshard_shows_whole_parameters_until_the_next_pass():
    plain, model = _both()
    block, x = model.blocks[0], data(4, 8)
    gathers = model.meter.gathers
    for handle in (block.unshard(), block.unshard(async_op=True)):
        if handle is not None:
            handle.wait()
        assert type(block.up.weight) is nn.Parameter and not is_sharded(block.up.weight)
        assert torch.equal(block.up.weight, plain.blocks[0].up.weight)
        assert is_sharded(model.blocks[1].up.weight) and is_sharded(model.out.weight)
        assert all(is_sharded(value) for name, value in model.state_dict().items() if name != "scale")
        block.reshard()
        assert is_sharded(block.up.weight)
    block.unshard(async_op=True)
    before = gathers["blocks.0"]
    mine = x.chunk(2)[runtime.rank()]
    for m, rows in ((plain, x), (model, mine)):
        m(rows).square().mean().backward()
    assert gathers["blocks.0"] == before + 1, "for backward only: the forward uses what unshard has gathered"
    _same_gradients(plain, model)
    assert model.clip_grad_norm_(1e9).item() == pytest.approx(nn.utils.get_total_norm(
        [p.grad for p in plain.parameters()]).item())  # fmt: skip
    with torch.no_grad():  # the shards change while the unit is gathered
        block.unshard()
        for p, q in zip(plain.parameters(), dict(model.named_parameters()).values(), strict=True):
            p.mul_(0.5)
            if is_sharded(q):
                q.mul_(0.5)
        block.reshard()
        for p in block.parameters():
            p.mul_(0.5)
    torch.testing.assert_close(model(mine), plain(mine))
    block.unshard()
    with model.summon_full_params():
        assert torch.equal(model.out.weight, plain.out.weight)
    block.up.register_forward_hook(lambda *_: block.reshard())
    with pytest.raises(FSDPError, match=r"reshard\(\) of unit blocks.0 inside its own forward"):
        model(mine)


def _same_gradients(plain, model):
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name)


@ranks(2)
def test_requires_gradient_sync_accumulates_like_no_sync():
    plain, model = _both()
    for step in range(3):
        x = data(4, 8, seed=step)
        model.set_requires_gradient_sync(step == 2)
        plain(x).square().mean().backward()
        model(x.chunk(2)[runtime.rank()]).square().mean().backward()
        assert model.meter.reduces["blocks.0"] == (step == 2)
    _same_gradients(plain, model)


@ranks(2)
def test_reshard_after_forward_and_recovery():
    plain, model = _both()
    x = data(4, 8).chunk(2)[runtime.rank()]
    model.set_reshard_after_forward(False)
    model(x).sum().backward()
    assert model.meter.gathers["blocks.0"] == 1
    model.blocks[0].set_reshard_after_forward(True)
    model(x).sum().backward()
    assert (model.meter.gathers["blocks.0"], model.meter.gathers["blocks.1"]) == (3, 2)
    loss = model(x).sum()
    del loss
    model.reset_iter_state()
    model.zero_grad()
    for m, rows in ((plain, data(4, 8)), (model, x)):
        m(rows).square().mean().backward()
    _same_gradients(plain, model)
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    assert FSDPv2.fsdp_modules(nn.Sequential(model)) == [model, *model.blocks]
    assert FSDPv2.fsdp_modules(model, root_only=True) == [model]


@ranks(2)
def test_state_dict_types_of_fsdp_1():
    """On the class, on a module around the model, and through torch's own class as launched scripts do."""
    plain, model = _both()
    around = nn.Sequential(model)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    theirs = torch_fsdp.state_dict_type(FullyShardedDataParallel.state_dict_type)
    for way, module in ((FSDPv2.state_dict_type, model), (theirs, model), (FSDPv2.state_dict_type, around)):
        with way(module, StateDictType.FULL_STATE_DICT, config):
            values = module.state_dict()
            assert FSDPv2.get_state_dict_type(module).state_dict_config is config
        expected = (nn.Sequential(plain) if module is around else plain).state_dict()
        if runtime.rank() == 0:
            assert list(values) == list(expected)
            assert all(torch.equal(values[name], value) for name, value in expected.items())
        else:
            assert values == {}
        assert is_sharded(model.state_dict()["out.weight"])  # as before
    with theirs(module=model, state_dict_type=StateDictType.FULL_STATE_DICT):
        assert torch.equal(model.state_dict()["out.weight"], plain.out.weight)  # on every rank
        model.load_state_dict(model.state_dict())
    before = model.set_state_dict_type(StateDictType.SHARDED_STATE_DICT)
    assert before.state_dict_type is StateDictType.SHARDED_STATE_DICT
    with torch_fsdp.summon_full_params(FullyShardedDataParallel.summon_full_params)(around, writeback=False):
        assert torch.equal(model.out.weight, plain.out.weight)
    with FSDPv2.summon_full_params(model, rank0_only=True, recurse=False), torch.no_grad():
        model.out.weight.zero_()
    assert model.out.weight.full_tensor().count_nonzero() == 0
    with (
        pytest.raises(FSDPError, match=r"with_grads=True.*p.grad.full_tensor"),
        model.summon_full_params(with_grads=True),
    ):
        pass
    with pytest.raises(
        FSDPError, match=r"optim_state_dict\(\) of torch's FSDP is not served .*get_optimizer_state_dict"
    ):
        torch_fsdp.optim_state_dict(FullyShardedDataParallel.optim_state_dict)(model, None)
    assert torch_fsdp.get_state_dict_type(lambda module: "theirs")(plain) == "theirs"


@ranks(2)
def test_what_refused_optimizer_state_recommends_works():
    plain, model = _both()
    x = data(4, 8)
    optimizers = []
    for m, rows in ((plain, x), (model, x.chunk(2)[runtime.rank()])):
        optimizers.append(torch.optim.AdamW(m.parameters()))
        m(rows).square().mean().backward()
        optimizers[-1].step()
    whole = get_optimizer_state_dict(model, optimizers[1], options=StateDictOptions(full_state_dict=True))
    expected = get_optimizer_state_dict(plain, optimizers[0])
    assert whole["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        torch.testing.assert_close(whole["state"][name]["exp_avg"], state["exp_avg"])
