"""The search for settings that fit: what it tries, how it ranks, and files that give back what was priced."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.config.errors import ConfigError
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.machines import MachineOptions, find_machine
from fullshard.planner.request import PlanRequest
from fullshard.planner.search import _expert_sizes, launch_flags, search_settings, splits
from fullshard.planner.tables import nothing_fits
from fullshard.sft.checked_run import sharding_settings
from fullshard.sft.cli_args import parse

GIB = 1024**3


def asked(*words: str, machine: str = "h100-80gb", devices: int = 8, per_node: int | None = None, **engine: Any) -> Any:
    """A run to plan, from flags of `fullshard sft`."""
    config = parse(["--model_name_or_path", "model", "--per_device_train_batch_size", "4", *words]).config
    there = find_machine(MachineOptions(machine, devices, per_node))
    launched = EngineSettings(**engine)
    request = PlanRequest(config, sharding_settings(config, launched, []), "model", None, there)
    return request, launched


def price(weights: float, activations: float) -> Any:
    """A price with the properties of the real one: `weights` GiB without sharding, `activations` per row."""

    def priced(request: PlanRequest) -> Any:
        config, engine, machine = request.config, request.engine, request.machine
        rows, world = config.per_device_train_batch_size, machine.num_processes
        held = weights * (0.25 if config.use_4bit_quantization else 0.5 if config.base_dtype else 1)
        shards = world // machine.nodes if engine.hybrid else world
        needs = held if engine.strategy == "NO_SHARD" else held / shards
        needs = 0.0 if engine.offload_params else needs
        kept = {False: 1.0, True: 0.1, "auto": 0.5}[config.gradient_checkpointing]
        kept *= 0.5 if config.activation_offloading else 1.0
        needs = (needs + 1 + rows * activations * kept) * GIB
        slow = {False: 1.0, True: 1.33, "auto": 1.1}[config.gradient_checkpointing] + config.activation_offloading * 0.1
        slow += engine.offload_params * 2 + config.gradient_accumulation_steps * 0.01
        slow += {"FULL_SHARD": 0.2, "SHARD_GRAD_OP": 0.1}.get(engine.strategy, 0.0)
        fits = needs <= machine.device_memory
        verdict = SimpleNamespace(
            fits=fits, needs=int(needs), has=machine.device_memory, needs_host=0, has_host=machine.host_memory
        )
        time = SimpleNamespace(total=slow, tokens_per_second=1000 / slow)
        plan, batch = SimpleNamespace(units=()), (rows, config.gradient_accumulation_steps)
        levels = (config.gradient_checkpointing, config.activation_offloading)
        return SimpleNamespace(verdict=verdict, time=time, plan=plan, batch=batch, levels=levels)

    return priced


def test_what_cannot_be_told_is_nearer_than_what_does_not_fit():
    """Parameters alone are too large for one device; shards fit, but nothing is known of activations."""
    request, _ = asked()

    def untraced(request: PlanRequest) -> Any:
        found = price(300, 0)(request)
        found.verdict.fits = None if found.verdict.fits else False
        return found

    found = search_settings(request, untraced)
    assert found.fits is None and not found.fitting and "cannot be planned" in nothing_fits(found)[0]
    assert search_settings(request, price(10, 10**5)).fits is False and search_settings(request, price(10, 1)).fits


def test_every_split_of_a_batch():
    assert splits(4, 3) == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]


def test_with_much_memory_the_fastest_settings_come_first():
    found = search_settings(asked()[0], price(weights=10, activations=1))
    best = found.fitting[0].request
    assert (best.config.per_device_train_batch_size, best.config.gradient_checkpointing) == (4, False)
    assert best.engine.strategy == "NO_SHARD" and not best.engine.offload_params
    rates = [one.tokens_per_second for one in found.fitting]
    assert rates == sorted(rates, reverse=True)
    assert found.nearest is None


def test_everything_that_is_offered_fits():
    found = search_settings(asked()[0], price(weights=300, activations=20))
    assert found.fitting
    for one in found.fitting:
        assert one.estimate.verdict.fits
        rows = one.request.config.per_device_train_batch_size * one.request.config.gradient_accumulation_steps
        assert rows == 4
    assert all(one.request.engine.strategy != "NO_SHARD" or one.request.engine.offload_params for one in found.fitting)


def test_pruning_loses_nothing():
    """The best of the search is the best of everything."""
    request, _ = asked("--gradient_accumulation_steps", "2")
    for weights, activations in ((10, 1), (300, 20), (500, 60), (640, 100)):
        priced = price(weights, activations)
        everything = []
        for rows, steps in splits(4, 2):
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
                for offload in (False, True):
                    for kind, moved in ((False, False), ("auto", False), (True, False), (True, True)):
                        config = dataclasses.replace(
                            request.config, per_device_train_batch_size=rows, gradient_accumulation_steps=steps,
                            gradient_checkpointing=kind, activation_offloading=moved,
                        )  # fmt: skip
                        engine = dataclasses.replace(request.engine, sharding_strategy=strategy, offload_params=offload)
                        one = priced(dataclasses.replace(request, config=config, engine=engine))
                        if one.verdict.fits:
                            everything.append(one.time.tokens_per_second)
        found = search_settings(request, priced)
        assert found.tried < 6 * 4 * 4
        assert [found.fitting[0].tokens_per_second] == [max(everything)] if everything else not found.fitting


def test_only_what_is_allowed_changes_what_is_trained():
    request, _ = asked(devices=1)
    alone = search_settings(request, price(weights=60, activations=1))
    assert not any(one.request.config.use_peft_lora for one in alone.fitting)
    found = search_settings(request, price(weights=60, activations=1), ["lora", "qlora", "fp8"])
    kinds = {
        (c.use_peft_lora, c.use_4bit_quantization, c.base_dtype) for c in (o.request.config for o in found.fitting)
    }
    assert kinds == {(False, False, None), (True, False, None), (True, True, None), (True, False, "fp8")}


def test_hardware_without_fp8_gets_none():
    request, _ = asked(machine="a100-80gb", devices=1)
    found = search_settings(request, price(weights=10, activations=1), ["fp8"])
    assert all(one.request.config.base_dtype is None for one in found.fitting)


def test_replicas_only_between_nodes():
    one, _ = asked(devices=8)
    two, _ = asked(devices=16)
    names = [
        {f.request.engine.strategy for f in search_settings(r, price(weights=10, activations=1)).fitting}
        for r in (one, two)
    ]
    assert names[0] == {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"}
    assert names[1] == names[0] | {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}


@pytest.mark.parametrize(
    ("words", "allow", "host", "expected"),
    [
        ((), (), 0, "more or larger devices (num_processes, machine), a shorter max_length, --allow lora,qlora."),
        ((), ("lora",), 0, "more or larger devices (num_processes, machine), a shorter max_length, --allow qlora."),
        (("--use_peft_lora", "--use_4bit_quantization"), (), 0, "machine), a shorter max_length."),
        ((), (), 10**15, "help: nodes with more memory (host_memory)."),
    ],
)
def test_the_advice_is_about_what_is_missing(words, allow, host, expected):
    def priced(request: PlanRequest) -> Any:
        found = price(weights=1 if host else 30_000, activations=1 if host else 5000)(request)
        found.verdict.needs_host = host
        found.verdict.fits = found.verdict.fits and not host
        return found

    result = search_settings(asked(*words)[0], priced, allow)
    assert nothing_fits(result)[-1].endswith(expected)


def test_where_nothing_fits_the_nearest_is_named():
    found = search_settings(asked(devices=1)[0], price(weights=10, activations=5000))
    assert not found.fitting and found.nearest is not None
    assert found.nearest.request.config.per_device_train_batch_size == 1
    assert found.nearest.request.config.activation_offloading and found.nearest.request.engine.offload_params


def test_an_unknown_method_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"allow names 'qlorra'; did you mean qlora\?; expected lora, qlora, fp8"):
        search_settings(asked()[0], price(1, 1), ["qlorra"])


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ((), {}),
        (("--bf16", "--use_peft_lora", "--lora_r", "16", "--packing", "--max_length", "4096"), {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("--fsdp", "shard_grad_op auto_wrap offload"), {}),
                (("--gradient_accumulation_steps", "2"), {"offload_params": True, "sharding_strategy": "NO_SHARD"}),
                ((), {"activation_checkpointing": True, "activation_checkpointing_offload": True}),
                ((), {"reshard_after_forward": "false", "mixed_precision": "bf16"}),
                (("--optim", "adamw_8bit", "--lora_target_modules", "q_proj,v_proj", "--use_peft_lora"), {}),
            )
        ),
    ],
)
def test_files_give_back_what_was_priced(words, engine, tmp_path):
    request, launched = asked(*words, devices=16, **engine)
    result = search_settings(request, price(weights=300, activations=30), ["lora", "qlora", "fp8"])
    assert len(result.fitting) > 5
    for found in result.fitting[:: len(result.fitting) // 5]:
        (tmp_path / "run.yaml").write_text(found.yaml())
        config = parse([str(tmp_path / "run.yaml")]).config
        sharding = sharding_settings(config, launched, [])
        wanted = found.request
        assert sharding.strategy == wanted.engine.strategy
        for name in ("offload_params", "activation_checkpointing", "mixed_precision", "backward_prefetch"):
            assert getattr(sharding, name) == getattr(wanted.engine, name), name
        given = {k: v for k, v in config.values().items() if k not in ("fsdp", "fsdp_config")}
        assert given == {k: v for k, v in wanted.config.values().items() if k not in ("fsdp", "fsdp_config")}


def test_experts_are_divided_among_the_ranks_of_a_node_and_of_all():
    unit = SimpleNamespace(parameters=[SimpleNamespace(name="model.layers.0.mlp.experts.down_proj")])
    plan = SimpleNamespace(units=[unit])
    request, _ = asked(devices=16, per_node=8)
    assert _expert_sizes(request, plan) == [8, 16]
    assert _expert_sizes(request, SimpleNamespace(units=[])) == []
    chosen = dataclasses.replace(request, engine=EngineSettings(ep_size=8))
    assert _expert_sizes(chosen, plan) == []
    assert launch_flags(chosen).endswith("--ep_size 8")
