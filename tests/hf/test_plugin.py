"""What a script says in Accelerate's plugin or in `TrainingArguments`, as settings of the engine."""

import functools
import types

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from fullshard.config.errors import ConfigError
from fullshard.fsdp import wrap
from fullshard.hf import accelerate_checkpoints, accelerate_prepare, trainer
from fullshard.hf import accelerate_state as plugin
from fullshard.parallel.settings import EngineSettings
from tests.pool import ROOT

GUIDE = str(ROOT / "tests" / "launch" / "files" / "trainer_fsdp.yaml")
"""A whole configuration file, in bf16; what is not of FSDP in it applies to the launcher alone."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As `fullshard launch` leaves it for a file of version 1."""
    launched = EngineSettings(
        sharding_strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_PRE", forward_prefetch=True
    )
    for name, value in launched.to_environment().items():
        monkeypatch.setenv(name, value)


def tiny():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE", "saved_as": "FULL_STATE_DICT"}),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, {"strategy": "HYBRID_SHARD"}),
        ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, {"strategy": "HYBRID_SHARD_ZERO2"}),
        ({"fsdp_version": 2, "reshard_after_forward": True}, {"strategy": "FULL_SHARD"}),
        ({"reshard_after_forward": "no_shard"}, {"strategy": "NO_SHARD"}),
        ({"fsdp_version": 2}, {"strategy": "SHARD_GRAD_OP", "saved_as": "SHARDED_STATE_DICT"}),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, {"backward_prefetch": "BACKWARD_POST"}),
        ({"forward_prefetch": False}, {"forward_prefetch": False}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"offload_params": True}),
        ({"cpu_offload": CPUOffloadPolicy()}, {"offload_params": True}),
        ({"cpu_offload": False}, {"offload_params": False}),
        ({"state_dict_type": "sharded_state_dict"}, {"saved_as": "SHARDED_STATE_DICT"}),
        ({"transformer_cls_names_to_wrap": ["A", "B"]}, {"transformer_layer_cls_to_wrap": ("A", "B")}),
        ({"auto_wrap_policy": "size_based_wrap"}, {"wrap_policy": "SIZE_BASED_WRAP"}),
        ({"min_num_params": 7}, {"wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": True}),
    ],
)  # fmt: skip
def test_keywords_overrule_the_launched_settings(given, expected):
    settings = plugin.read(given).settings
    assert {name: getattr(settings, name) for name in expected} == expected


def test_dtypes_modules_and_functions_reach_the_engine_as_they_are():
    module, own = torch.nn.Linear(2, 2), functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: True)
    options = plugin.read({
        "mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "ignored_modules": [module], "auto_wrap_policy": own,
    }).options  # fmt: skip
    assert (options["mixed_precision"].param_dtype, options["mixed_precision"].reduce_dtype) == (
        torch.bfloat16, torch.float32,
    )  # fmt: skip
    assert options["ignored_modules"] == [module] and options["auto_wrap_policy"] is own


def test_an_option_that_the_engine_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"FullyShardedDataParallelPlugin\(new_option=1\): fullshard has no such"):
        plugin.read({"new_option": 1})


def served(monkeypatch):
    """Accelerate's plugin with the patches in place."""
    for name, patch in (("__init__", plugin.plugin), ("set_state_dict_type", plugin.set_state_dict_type)):
        monkeypatch.setattr(
            FullyShardedDataParallelPlugin, name, patch(getattr(FullyShardedDataParallelPlugin, name)), raising=True
        )
    return FullyShardedDataParallelPlugin


def test_the_state_dict_type_can_be_changed_and_changed_back(monkeypatch):
    made = served(monkeypatch)(state_dict_type="LOCAL_STATE_DICT", forward_prefetch=True)
    assert made.fsdp_version == 2 and made.state_dict_type.name == "SHARDED_STATE_DICT"
    made.set_state_dict_type("FULL_STATE_DICT")
    assert made.optim_state_dict_config.rank0_only and made.state_dict_config.offload_to_cpu
    made.set_state_dict_type("SHARDED_STATE_DICT")
    assert not hasattr(made.optim_state_dict_config, "rank0_only")


def test_peft_s_policy_gives_the_model_s_layers_and_no_unit_per_adapter_layer(monkeypatch):
    model = get_peft_model(tiny(), LoraConfig(target_modules="all-linear"))
    made = served(monkeypatch)()
    assert made.fullshard.wrap_policy(made.auto_wrap_policy) == {}, "the script has set none"
    made.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    chosen = made.fullshard.wrap_policy(made.auto_wrap_policy)["auto_wrap_policy"]
    units = wrap.find_units(model, wrap.resolve(chosen, model), set())
    assert {type(unit).__name__ for unit in units} == {"LlamaDecoderLayer"} and len(units) == 2
    plain = wrap.find_units(model, made.auto_wrap_policy, set())
    assert len(plain) > 14, "PEFT's own makes a unit of every trainable layer"


@pytest.mark.parametrize(
    ("words", "section", "expected"),
    [
        ("hybrid_shard auto_wrap offload", None, {"strategy": "HYBRID_SHARD", "offload_params": True}),
        (True, {"fsdp_backward_prefetch": "backward_post"}, {"backward_prefetch": "BACKWARD_POST"}),
        (True, {}, {"strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE"}),
        ("full_shard", {"reshard_after_forward": "SHARD_GRAD_OP"}, {"strategy": "FULL_SHARD"}),
        (True, {"version": 1, "reshard_after_forward": "full_shard"}, {"strategy": "FULL_SHARD"}),
        (True, {"forward_prefetch": "false"}, {"forward_prefetch": False}),
        ("full_shard", GUIDE, {"transformer_layer_cls_to_wrap": ("BertLayer",), "mixed_precision": "no"}),
    ],
)  # fmt: skip
def test_fsdp_and_fsdp_config_are_read_as_the_launcher_reads_them(words, section, expected, monkeypatch, tmp_path):
    patch = trainer.fsdp_arguments(TrainingArguments._process_fsdp_args)
    monkeypatch.setattr(TrainingArguments, "_process_fsdp_args", patch)
    made = TrainingArguments(str(tmp_path), fsdp=words, fsdp_config=section, use_cpu=True, report_to="none")
    assert made.fsdp is True and made.fsdp_config["xla"] is False
    settings = plugin.read(made.fsdp_plugin_args).settings
    assert {name: getattr(settings, name) for name in expected} == expected


def test_the_keys_of_pytorch_xla_are_refused_by_name_or_ignored_with_a_note(monkeypatch, tmp_path, caplog):
    patch = trainer.fsdp_arguments(TrainingArguments._process_fsdp_args)
    monkeypatch.setattr(TrainingArguments, "_process_fsdp_args", patch)
    options = {"fsdp": "full_shard", "use_cpu": True, "report_to": "none"}
    with pytest.raises(ConfigError, match="xla: true needs the XLA engine"):
        TrainingArguments(str(tmp_path), fsdp_config={"xla": True, "xla_fsdp_v2": True}, **options)
    caplog.set_level("INFO", logger="fullshard")
    made = TrainingArguments(str(tmp_path), fsdp_config={"xla": False, "xla_fsdp_grad_ckpt": True}, **options)
    assert plugin.read(made.fsdp_plugin_args).settings.strategy == "FULL_SHARD"
    assert "TrainingArguments: xla_fsdp_grad_ckpt is not used without xla: true" in caplog.text


@pytest.mark.parametrize(
    ("precision", "scaler", "expected"), [("fp16", None, "no"), ("fp16", 1, "fp16"), ("bf16", None, "bf16")]
)
def test_fp16_without_a_loss_scaler_computes_in_fp32(precision, scaler, expected):
    """As Accelerate does on CPUs, where it has no scaler."""
    state = types.SimpleNamespace(dynamo_plugin=None)
    given = types.SimpleNamespace(mixed_precision=precision, scaler=scaler, state=state)
    assert accelerate_prepare._settings(given, EngineSettings()).mixed_precision == expected


def test_an_optimizer_without_state_is_read_from_whole_values(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    model, optimizer = torch.nn.Module(), torch.optim.SGD([parameter], lr=0.5)
    model._fullshard_engine = types.SimpleNamespace(units=[])
    group = {**optimizer.state_dict()["param_groups"][0], "lr": 0.25, "params": ["weight"]}
    torch.save({"state": {}, "param_groups": [group]}, tmp_path / "optimizer.bin")
    held = types.SimpleNamespace(fullshard=True, state_dict_type=types.SimpleNamespace(name="FULL_STATE_DICT"))
    accelerate_checkpoints.load_optimizer(None)(held, None, optimizer, model, tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["params"] == [parameter]
