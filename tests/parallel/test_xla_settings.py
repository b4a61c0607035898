"""The settings of PyTorch/XLA: every key is used, or refused by name with the reason; no torch_xla is needed."""

from __future__ import annotations

import json

import pytest

from fullshard.config.errors import ConfigError
from fullshard.distributed import engines
from fullshard.launch.config import find_file
from fullshard.launch.resolve import resolve, settle
from fullshard.parallel.fsdp_flags import settings_from_trainer_flags
from fullshard.parallel.settings import XLA_DEVICES_VARIABLE, EngineSettings
from fullshard.xla import limits
from fullshard.xla.engine import ENGINE

OTHER = {
    "reshard_after_forward": False, "disable_reshard_on_root": False, "flatten_parameters": True,
    "execute_sharding_on_init": False, "sync_on_finalization": True, "fp32_reduce_scatter": True,
    "sharding_groups": [[0, 1], [2, 3]], "sharding_rank": 1, "sharding_world_size": 2,
    "optimization_barrier_in_forward": False, "optimization_barrier_in_backward": False,
    "pin_layout_in_collective_ops": False, "reduce_scatter_bucket_size_mb": 8, "coalesce_all_gather_ops": True,
    "shard_param_on_dim_0": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "auto_wrapper_callable": "f",
    "param_init_fn": "f",
}  # fmt: skip
"""For each key that is refused, a value other than its default."""


@pytest.fixture
def on_xla(monkeypatch):
    monkeypatch.setattr(engines, "current", lambda: ENGINE)


def test_every_key_is_used_or_refused_by_name(on_xla):
    assert OTHER.keys() == limits.REFUSED.keys()
    for key, (default, reason) in limits.REFUSED.items():
        EngineSettings(xla=True, xla_fsdp_settings={key: default})
        EngineSettings(xla=True, xla_fsdp_settings={key: None if default is None else str(default).lower()})
        with pytest.raises(ConfigError) as raised:
            EngineSettings(xla=True, xla_fsdp_settings={key: OTHER[key]})
        assert str(raised.value) == f"xla_fsdp_settings: {key}: {OTHER[key]!r} is not supported: {reason}"


def test_dtypes_are_used(on_xla):
    made = EngineSettings(xla=True, xla_fsdp_settings={"compute_dtype": "torch.bfloat16", "buffer_dtype": "float32"})
    assert (made.mixed_precision, ENGINE.buffer_dtype(made)) == ("bf16", "float32")
    assert EngineSettings(mixed_precision="bf16", xla_fsdp_settings={"compute_dtype": "bfloat16"}).mixed_precision
    assert EngineSettings(xla_fsdp_settings={"compute_dtype": "float32"}).mixed_precision == "no"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"xla_fsdp_settings": {"compute_dtyp": "bf16"}}, "unknown key 'compute_dtyp'; did you mean compute_dtype?"),
        ({"xla_fsdp_settings": {"compute_dtype": "float16"}}, "compute_dtype is 'float16'; choose float32 or bfloat16"),
        ({"xla_fsdp_settings": {"compute_dtype": "float32"}, "mixed_precision": "bf16"}, "contradict each other"),
        ({"mixed_precision": "fp16"}, "fp16 needs a loss scaler"),
        ({"offload_params": True}, "shards stay on XLA devices"),
        ({"activation_checkpointing": True, "activation_checkpointing_offload": True}, "stay on XLA devices"),
        ({"backend": "inductor"}, "XLA compiles whole steps already"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP: on XLA the compiler"),
        ({"reshard_after_forward": "false", "dp_replicate_size": 2}, "HYBRID_SHARD_ZERO2: on XLA the compiler"),
    ],
)  # fmt: skip
def test_what_the_xla_engine_does_not_have(on_xla, values, said):
    with pytest.raises(ConfigError) as raised:
        EngineSettings(**values)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_mapping_json_and_a_json_file_mean_the_same(on_xla, tmp_path):
    given = {"compute_dtype": "bfloat16", "sharding_rank": None}
    (tmp_path / "xla.json").write_text(json.dumps(given))
    for source in (given, json.dumps(given), str(tmp_path / "xla.json")):
        assert settings_from_trainer_flags(fsdp_config={"xla": True, "xla_fsdp_settings": source}) == EngineSettings(
            xla=True, xla_fsdp_settings=given
        )
    for wrong, said in (("nowhere.json", "a file of one"), ("{", "expected JSON"), ("[1]", "a file of one")):
        with pytest.raises(ConfigError, match=f"xla_fsdp_settings: .*{said}"):
            EngineSettings(xla_fsdp_settings=wrong)


def test_processes_get_the_settings(on_xla):
    made = EngineSettings(
        xla=True, xla_fsdp_v2=True, xla_fsdp_grad_ckpt=True, xla_fsdp_settings={"sharding_rank": None}
    )
    assert made.activation_checkpointing
    assert EngineSettings.from_environment(made.to_environment()) == made


def test_what_happens_is_reported(on_xla, monkeypatch):
    notes: list[str] = []
    settings_from_trainer_flags(fsdp_config={"xla": True, "xla_fsdp_v2": False}, notes=notes)
    assert any("the model is sharded by FSDPv2" in note for note in notes)
    monkeypatch.undo()
    notes.clear()
    settings_from_trainer_flags(fsdp_config={"xla_fsdp_settings": {"a": 1}, "xla_fsdp_v2": True}, notes=notes)
    assert notes == [f"{key} is not used without xla: true" for key in ("xla_fsdp_v2", "xla_fsdp_settings")]


def test_one_process_drives_the_devices(on_xla, tmp_path):
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    assert find_file(None, home)[0] is None
    for words in ("--tpu", "--distributed_type XLA"):
        made = settle(resolve([*words.split(), "--use_cpu", "-n", "4", "--dry_run"], home), gpus=0)
        assert made.engine.xla and made.engine.strategy == "FULL_SHARD"
        assert (made.device, made.world_size) == ("xla", 1)
        assert made.describe()["devices"] == "4, driven by one process"
        sent = made.environment(home)
        assert (sent["PJRT_DEVICE"], sent["CPU_NUM_DEVICES"], sent[XLA_DEVICES_VARIABLE]) == ("CPU", "4", "4")
    sent = settle(resolve(["--tpu", "--dry_run"], home), gpus=0).environment({"PJRT_DEVICE": "TPU"})
    assert sent["PJRT_DEVICE"] == "TPU" and "CPU_NUM_DEVICES" not in sent
    with pytest.raises(ConfigError, match="one process on one machine is supported"):
        settle(resolve(["--tpu", "--num_machines", "2", "--main_process_ip", "a", "--dry_run"], home), gpus=0)
