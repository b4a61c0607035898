"""How the engine runs: collectives counted, memory bounded."""

import pytest
import torch
from torch import nn

from fullshard.fsdp import FSDPv2, checkpoint_module, transformer_auto_wrap_policy
from fullshard.fsdp.unit import Unit, UnitState
from tests.fsdp.programs import (
    assert_same_training,
    build,
    llama,
    mesh_for,
    sharded,
    step,
)
from tests.pool import ranks

DOUBLE = torch.float64


# --- collectives ------------------------------------------------------------------------------------------------------

CHECKPOINTING = ["off", "before", "after", "reentrant", "hugging-face", "outside"]


def _checkpointed_llama(kind, strategy, layers=3):
    torch.manual_seed(3)
    model = llama(layers=layers)
    if kind in ("before", "reentrant"):
        for layer in model.model.layers:
            assert checkpoint_module(layer, reentrant=kind == "reentrant") is layer
            checkpoint_module(layer)  # a second time changes nothing
    if kind == "hugging-face":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    mesh = mesh_for(strategy)
    model = FSDPv2(
        model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, strategy=strategy, small_parameter_bytes=2048
    )
    if kind == "after":
        for layer in model.model.layers:
            checkpoint_module(layer)
    if kind == "outside":
        from torch.utils.checkpoint import checkpoint

        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = _Outside(layer, checkpoint)
    return model


class _Outside(nn.Module):
    def __init__(self, layer, checkpoint):
        super().__init__()
        self.layer, self.checkpoint = layer, checkpoint

    def forward(self, *args, **kwargs):
        return self.checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


@ranks(2)
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_each_unit_is_gathered_and_reduced_as_often_as_its_strategy_says(strategy, kind):
    model = _checkpointed_llama(kind, strategy)
    for batch in range(3):
        model.meter.reset()
        step(model, batch=batch)
        layers = [unit.name for unit in model.plan.units[1:]]
        assert len(layers) == 3
        allowed = 2 if strategy == "FULL_SHARD" else 1
        assert model.meter.gathers[""] == 1
        for name in layers:
            assert 1 <= model.meter.gathers[name] <= allowed, (name, model.meter.gathers)
            assert model.meter.reduces[name] == 1
        assert model.meter.reduces[""] == 1
        assert set(model.meter.reduced_parameters.values()) == {1}
    assert model.meter.live == 0


@ranks(2)
@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_changes_no_gradient(kind):
    model = _checkpointed_llama("off", "FULL_SHARD")
    other = _checkpointed_llama(kind, "FULL_SHARD")
    step(model)
    step(other)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p.grad.to_local(), q.grad.to_local()) for p, q in pairs)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_gathered_memory_stays_within_the_plans_bound(strategy, in_flight):
    model = FSDPv2(
        llama(layers=5), mesh_for(strategy), auto_wrap_policy=transformer_auto_wrap_policy, strategy=strategy,
        gathers_in_flight=in_flight, small_parameter_bytes=2048,
    )  # fmt: skip
    engine = model._fullshard_engine

    def held():
        storages = {p.full.untyped_storage() for u in engine.units for p in u.parameters if p.full is not None}
        return sum(s.nbytes() for s in storages)

    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(held()))
    for batch in range(3):
        model.meter.reset()
        step(model, batch=batch)
        assert model.meter.peak <= model.plan.gathered_bound(in_flight)
        assert max(seen) <= model.meter.peak
    # The bound is not idle: this much is needed.
    rest = model.plan.units[1].gathered_bytes
    assert model.meter.peak >= model.plan.units[0].gathered_bytes + rest * (1 if strategy == "FULL_SHARD" else 5)
    assert held() == 0 and model.meter.live == 0


@ranks(2)
def test_frozen_parameters_are_never_reduced_and_keep_their_dtype():
    model = build("llama", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
        if "q_proj" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    model = FSDPv2(
        model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision="bf16",
        small_parameter_bytes=2048,
    )  # fmt: skip
    model.meter.reset()
    step(model)
    assert set(model.meter.reduced_parameters) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "q_proj" in name else torch.bfloat16), name
        assert (parameter.grad is not None) == ("q_proj" in name)


@ranks(2)
def test_units_that_no_gradient_reaches_are_gathered_once():
    """Only the last layer trains: backward ends there, and nothing is gathered or reduced below it."""
    model = FSDPv2(
        llama(layers=4),
        mesh_for("FULL_SHARD"),
        auto_wrap_policy=transformer_auto_wrap_policy,
        small_parameter_bytes=2048,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name)
    for batch in range(2):
        model.meter.reset()
        step(model, batch=batch)
        assert [model.meter.gathers[f"model.layers.{i}"] for i in range(3)] == [1, 1, 1]
        assert list(model.meter.reduces) == ["model.layers.3"]


@ranks(2)
def test_freezing_after_wrapping_is_noticed():
    model = sharded()
    step(model)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    model.meter.reset()
    step(model)
    assert model.meter.reduced_parameters and all("norm" in name for name in model.meter.reduced_parameters)
    assert all((p.grad is not None) == ("norm" in n) for n, p in model.named_parameters())


@ranks(2)
def test_the_next_unit_is_prefetched_before_the_current_one_is_waited_for():
    """Otherwise copies from the host for the next unit would wait for the communication of the current one."""
    model = FSDPv2(llama(layers=3), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    step(model)
    events = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_gather", "finish_gather"):
            plain = getattr(Unit, name)
            gathering = UnitState.SHARDED if name == "start_gather" else UnitState.GATHERING

            def noted(unit, plain=plain, name=name, gathering=gathering):
                if unit.state is gathering:
                    events.append((name.split("_")[0], unit.index))
                plain(unit)

            patch.setattr(Unit, name, noted)
        step(model, batch=1)
    forward = [("start", 0), ("start", 1), ("finish", 0), ("start", 2), ("finish", 1), ("start", 3), ("finish", 2)]
    assert events[:8] == [*forward, ("finish", 3)]
    assert events[8:] == [("start", 3), ("start", 2), ("finish", 3), ("start", 1), ("finish", 2), ("finish", 1)]


@ranks(2)
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
def test_prefetch_gathers_nothing_that_is_not_used(backward_prefetch):
    model = FSDPv2(
        llama(layers=3), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy,
        backward_prefetch=backward_prefetch,
    )  # fmt: skip
    for batch in range(3):
        model.meter.reset()
        step(model, batch=batch)
        assert dict(model.meter.gathers) == {"": 1, **{f"model.layers.{i}": 2 for i in range(3)}}


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@pytest.mark.parametrize("forward_prefetch", [True, False])
def test_prefetch_changes_nothing_but_time(forward_prefetch, backward_prefetch):
    assert_same_training(
        "llama", steps=3, mesh=mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy,
        forward_prefetch=forward_prefetch, backward_prefetch=backward_prefetch, small_parameter_bytes=2048,
    )  # fmt: skip
