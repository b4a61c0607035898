"""From words, file and environment to settings: who beats whom, which device, how many processes, Slurm."""

from __future__ import annotations

import json
import os

import pytest

from fullshard.config.errors import ConfigError
from fullshard.config.options import convert, options_of, parse_flags
from fullshard.launch import config as locations
from fullshard.launch.resolve import LaunchSettings, resolve, settle
from fullshard.launch.slurm import expand_counts, expand_hosts, read_slurm
from fullshard.parallel.settings import EngineSettings


@pytest.fixture
def home(tmp_path):
    """An environment whose default files lie in a folder of the test's."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HF_HOME": str(tmp_path / "hf"), "PATH": os.environ["PATH"]}


def settings(words: str | list[str], environment: dict[str, str], gpus: int = 0) -> LaunchSettings:
    words = words.split() if isinstance(words, str) else words
    return settle(resolve([*words, "--dry_run"], environment), gpus)


def test_flags_beat_the_file_which_beats_the_environment(tmp_path, home):
    file = tmp_path / "c.yaml"
    file.write_text("mixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n")
    home |= {"FSDP_SHARDING_STRATEGY": "NO_SHARD", "ACCELERATE_MIXED_PRECISION": "fp16", "FSDP_OFFLOAD_PARAMS": "true"}
    assert settings("", home).engine.strategy == "NO_SHARD"
    both = settings(f"--config_file {file}", home).engine
    assert (both.strategy, both.mixed_precision, both.offload_params) == ("SHARD_GRAD_OP", "bf16", True)
    flags = settings(f"--config-file {file} --fsdp-sharding-strategy=1 --fsdp_offload_params false", home).engine
    assert (flags.strategy, flags.mixed_precision, flags.offload_params) == ("FULL_SHARD", "bf16", False)
    # The strategy has two keys; a flag for one of them beats the file's other one.
    assert settings(f"--config_file {file} --fsdp_reshard_after_forward true", home).engine.strategy == "FULL_SHARD"


def test_the_words_of_a_training_script(tmp_path, home):
    assert settings(["--fsdp", "full shard auto_wrap"], home).engine.strategy == "FULL_SHARD"
    words = settings(["--fsdp=hybrid_shard_zero2 offload"], home).engine
    assert (words.strategy, words.offload_params) == ("HYBRID_SHARD_ZERO2", True)
    folder = tmp_path / "fsdp_config"
    folder.mkdir()
    (folder / "fsdp_config.json").write_text(
        '{"transformer_layer_cls_to_wrap": ["A"], "min_num_param": 3, "xla": false}'
    )
    both = settings(["--fsdp=shard_grad_op", f"--fsdp_config={folder}/"], home)
    assert (both.engine.strategy, both.engine.transformer_layer_cls_to_wrap) == ("SHARD_GRAD_OP", ("A",))
    assert any("min_num_param" in note for note in both.notes)
    for wrong, said in (("full_shrad", "did you mean full_shard"), ("full_shard no_shard", "two strategies")):
        with pytest.raises(ConfigError, match=said):
            settings(["--fsdp", wrong], home)


def test_which_file_is_in_use(home):
    ours, theirs = locations.own_file(home), locations.accelerate_file(home)
    assert settings("", home).describe()["settings from"] == "flags and defaults; no file"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mixed_precision: fp16\n")
    used = settings("", home)
    assert used.engine.mixed_precision == "fp16" and str(theirs) in used.describe()["settings from"]
    assert any("Accelerate's is used" in note for note in used.notes)
    ours.parent.mkdir(parents=True)
    ours.write_text("mixed_precision: bf16\n")
    used = settings("", home)
    assert used.engine.mixed_precision == "bf16" and str(ours) in used.describe()["settings from"]


def test_devices_and_processes(home):
    assert (settings("", home).device, settings("", home).local_processes) == ("cpu", 1)
    assert (settings("", home, gpus=4).device, settings("", home, gpus=4).local_processes) == ("cuda", 4)
    assert settings("--gpu_ids 0,2", home, gpus=4).local_processes == 2
    assert settings("--gpu_ids 0,2", home, gpus=4).environment({})["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert settings("--cpu -n 8", home, gpus=4).device == "cpu"
    assert settings("-n 2", home | {"FULLSHARD_DEVICE": "cpu"}, gpus=4).device == "cpu"
    assert settings("--distributed_type NO", home, gpus=4).local_processes == 1
    two = settings("--num_machines 2 -n 8 --main_process_ip a --machine_rank 1", home, gpus=4)
    assert (two.world_size, two.local_processes, two.endpoint) == (8, 4, "a:29500")
    with pytest.raises(ConfigError, match=r"5 processes on this machine, but only 4 GPU\(s\)"):
        settings("-n 5", home, gpus=4)
    with pytest.raises(ConfigError, match=r"this machine has 1 GPU\(s\)"):
        settings("--gpu_ids 0,1", home, gpus=1)
    with pytest.raises(ConfigError, match=r"3 replicas .* need 3 processes, but there are 4"):
        settings("-n 4 --cpu --fsdp_sharding_strategy HYBRID_SHARD --parallelism_config_dp_replicate_size 3", home)


def test_accelerate_knows_of_cpu_ranks_however_they_were_chosen(home):
    """Without this variable it takes ranks on a machine without a GPU for independent programs."""
    for words, gpus in (("-n 2", 0), ("-n 2 --cpu", 4)):
        assert settings(words, home, gpus=gpus).environment({})["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in settings("-n 2", home, gpus=4).environment({})


def test_replicas_without_fsdp(home):
    assert settings("--multi_gpu -n 2", home).engine.strategy == "NO_SHARD"
    cpus = settings("--distributed_type MULTI_CPU -n 2", home, gpus=4)
    assert (cpus.engine.strategy, cpus.device) == ("NO_SHARD", "cpu")
    assert settings("--use_fsdp -n 2", home).engine.strategy == "FULL_SHARD"


def test_hybrid_is_nodes_by_local_ranks_unless_said(home):
    words = "--fsdp_sharding_strategy HYBRID_SHARD --num_machines 2 -n 8 --cpu --main_process_ip a"
    assert settings(words, home).describe()["mesh"] == "replica=2, fsdp=4"
    words += " --parallelism_config_dp_shard_size 2"
    assert settings(words, home).describe()["mesh"] == "replica=4, fsdp=2"


def test_the_processes_environment_carries_everything(home):
    given = settings(
        "--cpu -n 2 --mixed_precision bf16 --fsdp_version 2 --fsdp_reshard_after_forward false --debug "
        "--fsdp_transformer_layer_cls_to_wrap A,B --fsdp_min_num_params 5 "
        "--dynamo_backend eager --dynamo_mode max-autotune",
        home,
    )
    stale = {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "Old", "HOME": "h"}
    made = given.environment(stale)
    read = EngineSettings.from_environment(made)
    assert read == given.engine
    assert made["HOME"] == "h" and "FSDP_OFFLOAD_PARAMS" not in made
    assert made["ACCELERATE_USE_FSDP"] == "true" and made["FULLSHARD_DEVICE"] == "cpu"
    resolved = json.loads(made["FULLSHARD_RESOLVED"])
    assert resolved["effective"]["strategy"] == "SHARD_GRAD_OP" and resolved["given"]["num_processes"] == 2
    assert resolved["settings"]["fsdp_min_num_params"] == 5


def test_every_setting_survives_the_environment():
    """Whatever an option's value, the processes read what was meant."""
    refused = ("xla", "cp_size", "sp_size")
    mapping = '{"compute_dtype": "float32"}'
    tried = 0
    for one in options_of(EngineSettings):
        if not one.env or one.name in refused:
            continue
        texts = ["true", "false"] if one.kind is bool or one.name == "reshard_after_forward" else one.choices or ["7"]
        texts = [mapping] if one.name in ("xla_fsdp_settings", "tp_plan") else texts
        for text in texts:
            if text == "fp8":
                continue
            value = convert(one, text, one.key)
            needs = {"activation_checkpointing": True} if one.name == "activation_checkpointing_offload" else {}
            needs |= {"tp_size": 2} if one.name == "tp_plan" else {}
            made = EngineSettings(**{one.name: value, **needs})
            value = json.loads(mapping) if value == mapping else value
            assert getattr(EngineSettings.from_environment(made.to_environment()), one.name) == value, one.name
            tried += 1
    assert tried > 40


# --- flags ------------------------------------------------------------------------------------------------------------


def test_flags_end_at_the_script(tmp_path, home):
    script = tmp_path / "s.py"
    script.touch()
    made = resolve(["--use-cpu", "--num-processes=2", str(script), "--num_processes", "9", "--x"], home)
    assert made.command == (str(script), "--num_processes", "9", "--x")
    assert (made.engine.use_cpu, made.processes.num_processes) == (True, 2)
    assert resolve(["-m", "fullshard.launch.selftest", "--x"], home).command == ("fullshard.launch.selftest", "--x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num_proceses 2 s.py", "unknown flag --num_proceses; did you mean num_processes?"),
        ("--num_processes two", "--num_processes: expected a whole number, got 'two'"),
        ("--num_processes", "--num_processes needs a value"),
        ("--mixed_precision bf17", "--mixed_precision: expected no, fp16, bf16, fp8, got 'bf17'"),
        ("--max_restarts -1 --dry_run", "--max_restarts: expected 0 or more"),
        ("--use_fsdp --multi_gpu --dry_run", "use one of them"),
        ("--use_deepspeed --dry_run", "DEEPSPEED is not supported"),
        ("--use_megatron_lm --dry_run", "MEGATRON_LM is not supported"),
        ("--tpu --dry_run", "xla: true needs the XLA engine"),
        ("", "no script"),
        ("nothing.py", "the script nothing.py does not exist"),
        ("nothing", "to run a module, use -m"),
        ("--no_python nothing-at-all", "was not found"),
    ],
)
def test_words_that_cannot_be_read(home, words, said):
    with pytest.raises(ConfigError) as raised:
        resolve(words.split(), home)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_flags_of_yes_or_no():
    options = options_of(EngineSettings)
    for words, value in (
        (["--fsdp_offload_params"], True), (["--fsdp-offload-params", "False"], False),
        (["--fsdp_offload_params=true"], True), (["--no_fsdp_offload_params"], False),
    ):  # fmt: skip
        assert parse_flags(words, options, "x").values == {"offload_params": value}
    assert parse_flags(["--use_cpu", "script.py"], options, "x").rest == ["script.py"]


# --- Slurm ------------------------------------------------------------------------------------------------------------

STEP = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "3", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "node[01-02],gpu7",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,07],gpu2", ["node01", "node02", "node03", "node07", "gpu2"]),
        ("a", ["a"]),
        ("a,b-1.x", ["a", "b-1.x"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["node[01-", "", "n[a-b]"])
def test_lists_of_hosts_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_hosts(text)


def test_one_task_per_node(home):
    made = settings("-n 12 --cpu", home | STEP)
    assert not made.one_task_per_process
    assert (made.processes.num_machines, made.processes.machine_rank, made.local_processes) == (3, 1, 4)
    assert made.endpoint == f"node01:{20_000 + 123456 % 20_000}"
    assert settings("", home | STEP, gpus=8).world_size == 24


def test_one_task_per_process(home):
    step = STEP | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    made = settings("", home | step, gpus=2)
    assert made.one_task_per_process and (made.world_size, made.local_processes) == (5, 2)
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="srun started 5 tasks"):
        settings("-n 6", home | step, gpus=2)


def test_outside_a_step_slurm_says_nothing(home):
    assert read_slurm({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) is None
    assert settings("--cpu -n 2", home | STEP | {"SLURM_STEP_ID": ""}).processes.num_machines == 1
    with pytest.raises(ConfigError, match="SLURM_NTASKS='x' is not a whole number"):
        read_slurm(STEP | {"SLURM_NTASKS": "x"})
