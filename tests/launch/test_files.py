"""The configuration file: every spelling is read as meant, every mistake is named with its line; Accelerate agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullshard.config.configfile import read_file, sort_keys
from fullshard.config.errors import ConfigError
from fullshard.launch.config import file_options
from fullshard.launch.resolve import check_values
from fullshard.parallel.settings import EngineSettings

FILES = Path(__file__).parent / "files"


def read(path: Path, text: str | None = None) -> tuple[dict[str, object], list[str]]:
    notes: list[str] = []
    if text is not None:
        path.write_text(text)
    return sort_keys(read_file(path), file_options(), notes).values, notes


def engine(path: Path, text: str | None = None) -> EngineSettings:
    return check_values(read(path, text)[0])[1]


@pytest.mark.parametrize(
    ("name", "precision", "offload", "layers", "note"),
    [
        ("peft_fsdp", "bf16", False, None, "are at the top level; read as part of fsdp_config"),
        ("peft_fsdp_qlora", "no", True, None, "are at the top level; read as part of fsdp_config"),
        (
            "trainer_fsdp",
            "bf16",
            True,
            ("BertLayer",),
            ":7: fsdp_config.fsdp_backward_prefetch_policy: there is no such",
        ),
    ],
)
def test_the_guides_files_as_printed(name, precision, offload, layers, note):
    values, notes = read(FILES / f"{name}.yaml")
    _, settings = check_values(values)
    assert (settings.strategy, settings.saved_as) == ("FULL_SHARD", "SHARDED_STATE_DICT")
    assert (settings.mixed_precision, settings.offload_params) == (precision, offload)
    assert (settings.backward_prefetch, settings.forward_prefetch) == ("BACKWARD_PRE", False)
    assert settings.wrap_policy == "TRANSFORMER_BASED_WRAP" and settings.transformer_layer_cls_to_wrap == layers
    assert len(notes) == 1 and note in notes[0]


@pytest.mark.parametrize(
    ("lines", "name", "value"),
    [
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "strategy", "SHARD_GRAD_OP"),
        ("sharding_strategy: shard_grad_op", "strategy", "SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy: 5", "strategy", "HYBRID_SHARD_ZERO2"),
        ("fsdp_sharding_strategy: '4'", "strategy", "HYBRID_SHARD"),
        ("fsdp_reshard_after_forward: NO_SHARD", "strategy", "NO_SHARD"),  # the questionnaire's way, version 1
        ("fsdp_reshard_after_forward: false", "strategy", "SHARD_GRAD_OP"),
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: true", "strategy", "FULL_SHARD"),
        ("fsdp_sharding_strategy: FULL_SHARD\n  reshard_after_forward: SHARD_GRAD_OP", "strategy", "SHARD_GRAD_OP"),
        ("fsdp_min_num_params: 1e8", "min_num_params", 100_000_000),
        ("min_num_params: 2000.0", "min_num_params", 2000),
        ("min_num_param: 2_000", "min_num_params", 2000),
        ("fsdp_min_num_param: 7", "wrap_policy", "SIZE_BASED_WRAP"),
        ("fsdp_wrap_policy: SIZE_BASED_WRAP", "wrap_policy", "SIZE_BASED_WRAP"),
        ("fsdp_auto_wrap_policy: no_wrap", "wrap_policy", "NO_WRAP"),
        ("fsdp_cpu_offload: true", "offload_params", True),
        ("fsdp_offload_params: 'yes'", "offload_params", True),
        ("fsdp_backward_prefetch: 2", "backward_prefetch", "BACKWARD_POST"),
        ("fsdp_backward_prefetch_policy: NO_PREFETCH", "backward_prefetch", "NO_PREFETCH"),
        ("fsdp_state_dict_type: 1", "saved_as", "FULL_STATE_DICT"),
        ("fsdp_state_dict_type: LOCAL_STATE_DICT", "saved_as", "SHARDED_STATE_DICT"),
        ("fsdp_version: 2", "saved_as", "SHARDED_STATE_DICT"),
        ("fsdp_version: 1", "saved_as", "FULL_STATE_DICT"),
        ("transformer_layer_cls_to_wrap: [A, B]", "transformer_layer_cls_to_wrap", ("A", "B")),
        ("fsdp_transformer_layer_cls_to_wrap: A, B", "transformer_layer_cls_to_wrap", ("A", "B")),
        ("xla: false\n  xla_fsdp_settings:\n  xla_fsdp_grad_ckpt: true", "strategy", "FULL_SHARD"),
    ],
)
def test_spellings_inside_the_section(tmp_path, lines, name, value):
    assert getattr(engine(tmp_path / "c.yaml", f"fsdp_config:\n  {lines}\n"), name) == value


def test_copies_make_the_strategy_hybrid(tmp_path):
    text = "fsdp_config:\n  version: 2\n  reshard_after_forward: {}\nparallelism_config:\n  dp_replicate_size: 2\n"
    assert engine(tmp_path / "c.yaml", text.format("true")).strategy == "HYBRID_SHARD"
    assert engine(tmp_path / "c.yaml", text.format("false")).strategy == "HYBRID_SHARD_ZERO2"


def test_json_and_yaml_mean_the_same(tmp_path):
    as_yaml, _ = read(FILES / "trainer_fsdp.yaml")
    import yaml

    whole = yaml.safe_load((FILES / "trainer_fsdp.yaml").read_text())
    as_json, _ = read(tmp_path / "c.json", json.dumps(whole, indent="\t"))
    assert as_json == as_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsdp_config:\n  fsdp_offload_param: true\n", "c.yaml:2: fsdp_config.fsdp_offload_param: unknown key; did you "
         "mean fsdp_offload_params?"),
        ("num_proceses: 2\n", "c.yaml:1: num_proceses: unknown key; did you mean num_processes?"),
        ("a: 1\n", "c.yaml:1: a: unknown key"),
        ("fsdp_config:\n  fsdp_sharding_strategy: FULL\n", "c.yaml:2: fsdp_config.fsdp_sharding_strategy: expected "
         "FULL_SHARD (1), SHARD_GRAD_OP (2), NO_SHARD (3), HYBRID_SHARD (4), HYBRID_SHARD_ZERO2 (5), got 'FULL'"),
        ("fsdp_config:\n  fsdp_sharding_strategy: 6\n", "got 6"),
        ("num_processes: two\n", "c.yaml:1: num_processes: expected a whole number, got 'two'"),
        ("num_processes: 2.5\n", "expected a whole number, got 2.5"),
        ("fsdp_config:\n  fsdp_offload_params: maybe\n", "expected true or false, got 'maybe'"),
        ("fsdp_config: 3\n", "c.yaml:1: fsdp_config: expected keys with values, got 3"),
        ("num_processes: 2\nnum_processes: 3\n", "c.yaml:2: num_processes is set twice, first on line 1"),
        ("fsdp_config: {offload_params: true, fsdp_offload_params: true}\n", "both set fsdp_offload_params; keep one"),
        ("fsdp_config:\n  a: [1, 2\n", "c.yaml:3: not YAML"),
        ("just words\n", "expected keys with values"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / "c.yaml", text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsdp_config: {xla: true}\n", "xla: true needs the XLA engine"),
        ("distributed_type: XLA\n", "xla: true needs the XLA engine"),
        ("distributed_type: DEEPSPEED\n", "DEEPSPEED is not supported"),
        ("deepspeed_config: {zero_stage: 2}\n", "deepspeed_config is not supported"),
        ("megatron_lm_config: {a: 1}\n", "megatron_lm_config is not supported"),
        ("mpirun_config: {a: 1}\n", "mpirun_config is not supported"),
        ("fp8_config: {a: 1}\n", "fp8_config is not supported"),
        ("mixed_precision: fp8\n", "fp8 is not supported"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "expected LOCAL_MACHINE"),
        ("parallelism_config: {cp_size: 2}\n", "cp_size 2"),
        ("parallelism_config: {sp_size: 2}\n", "sp_size 2"),
        ("fsdp_config: {sharding_strategy: HYBRID_SHARD, reshard_after_forward: SHARD_GRAD_OP}\n", "contradict"),
        ("fsdp_config: {sharding_strategy: HYBRID_SHARD, reshard_after_forward: false}\n", "contradict"),
        ("fsdp_config: {reshard_after_forward: sometimes}\n", "expected true, false or one of FULL_SHARD"),
        ("fsdp_config: {activation_checkpointing_offload: true}\n", "needs fsdp_activation_checkpointing"),
        ("fsdp_config: {ignored_modules: '(('}\n", "not a regular expression"),
        ("num_machines: 2\n", "requires main_process_ip"),
        ("num_machines: 2\nnum_processes: 3\nmain_process_ip: a\n", "is not divisible by num_machines 2"),
        ("machine_rank: 1\n", "machine_rank: expected 0 to 0"),
        ("distributed_type: 'NO'\nnum_processes: 2\n", "NO is one process"),
        ("main_process_port: 70000\n", "main_process_port: expected 0 to 65535"),
    ],
)
def test_settings_that_cannot_be(tmp_path, text, said):
    values, _ = read(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError) as raised:
        check_values(values)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "fsdp.yaml").touch()
    with pytest.raises(ConfigError, match=r"does not exist; did you mean fsdp\.yaml"):
        read_file(tmp_path / "fsd.yaml")
    with pytest.raises(ConfigError, match=r"not JSON: .*"):
        read(tmp_path / "c.json", "{")
    with pytest.raises(ConfigError, match=r"is a directory; name the configuration file in it \(found: c.json, fsdp.y"):
        read_file(tmp_path)
    assert read(tmp_path / "fsdp.yaml")[0] == {}


# --- Accelerate reads the same file -----------------------------------------------------------------------------------

COMBINATIONS = [
    {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_state_dict_type": "FULL_STATE_DICT"},
    {"fsdp_version": 1, "fsdp_sharding_strategy": "4", "fsdp_offload_params": True},
    {"fsdp_version": 1, "fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_forward_prefetch": True},
    {"fsdp_version": 1, "fsdp_backward_prefetch": "NO_PREFETCH", "fsdp_state_dict_type": "LOCAL_STATE_DICT"},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True},
    {"fsdp_version": 2, "fsdp_activation_checkpointing": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
    {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
    {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
     "fsdp_transformer_layer_cls_to_wrap": "A,B", "fsdp_ignored_modules": "head"},
]  # fmt: skip


@pytest.mark.parametrize("section", COMBINATIONS)
def test_accelerate_means_the_same(tmp_path, monkeypatch, section):
    """Our reading of the file, Accelerate's plugin, and our reading of Accelerate's variables are one."""
    import yaml
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    section = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False, **section}
    path = tmp_path / "c.yaml"
    whole = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2, "fsdp_config": section}
    path.write_text(yaml.safe_dump(whole))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.main_process_port = 0
    theirs = prepare_multi_gpu_env(arguments)
    for name, value in theirs.items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()

    for ours in (engine(path), EngineSettings.from_environment(theirs)):
        if section["fsdp_version"] == 1:
            assert ours.strategy == plugin.sharding_strategy.name
        else:
            assert (ours.strategy == "FULL_SHARD") == plugin.reshard_after_forward
        policy = plugin.cpu_offload
        assert ours.offload_params == getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy")
        if section["fsdp_version"] == 1:
            said = "NO_PREFETCH" if plugin.backward_prefetch is None else plugin.backward_prefetch.name
            assert said == (ours.backward_prefetch or "NO_PREFETCH")
            assert bool(ours.forward_prefetch) == plugin.forward_prefetch
        assert ours.saved_as == plugin.state_dict_type.name.replace("LOCAL", "SHARDED")
        assert ours.activation_checkpointing == plugin.activation_checkpointing
        assert ours.sync_module_states == bool(plugin.sync_module_states)
        assert ours.mixed_precision == theirs["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert ours.ignored_modules == plugin.ignored_modules
        if "fsdp_min_num_params" in section:
            assert ours.min_num_params == plugin.min_num_params
        if "fsdp_transformer_layer_cls_to_wrap" in section:
            assert list(ours.transformer_layer_cls_to_wrap) == plugin.transformer_cls_names_to_wrap


def test_every_key_of_accelerates_file_is_known():
    import dataclasses

    from accelerate.commands.config.config_args import ClusterConfig

    options = file_options()
    ours = {one.key for one in options} | {one.section for one in options}
    assert {f.name for f in dataclasses.fields(ClusterConfig)} <= ours
