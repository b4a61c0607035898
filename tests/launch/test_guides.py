"""The guides' configuration files, as printed, on a BERT and on a Llama: what the engine was really told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_questionnaire import VERSION_2, interview
from tests.pool import ROOT

HERE = Path(__file__).parent
SLOW = pytest.mark.slow


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder), "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "fullshard", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)


def observe(folder: Path, file: Path, script: Path, *arguments: str) -> dict[str, object]:
    facts = folder / "facts.json"
    words = ["launch", "--config_file", str(file), "--num_processes", "2", str(HERE / "observe.py"), str(facts)]
    run = launch(folder, *words, str(script), *arguments)
    assert run.returncode == 0, run.stderr
    return json.loads(facts.read_text()) | {"out": run.stdout}


@pytest.mark.parametrize(
    ("file", "script", "units", "offload", "computes_in"),
    [
        pytest.param(
            "peft_fsdp", "bert_classification", ["BertEmbeddings", "BertLayer", "BertLayer"], False, "torch.bfloat16",
            marks=SLOW,
        ),
        pytest.param("peft_fsdp", "llama_fsdp", ["LlamaDecoderLayer"] * 4, False, "torch.bfloat16", marks=SLOW),
        pytest.param(
            "peft_fsdp_qlora", "bert_classification", ["BertEmbeddings", "BertLayer", "BertLayer"], True, "None",
            marks=SLOW,
        ),
        pytest.param("peft_fsdp_qlora", "llama_fsdp", ["LlamaDecoderLayer"] * 4, True, "None", marks=SLOW),
        pytest.param("trainer_fsdp", "bert_classification", ["BertLayer"] * 2, True, "torch.bfloat16", marks=SLOW),
    ],
)  # fmt: skip
def test_a_guides_file_on_two_cpu_ranks(tmp_path, file, script, units, offload, computes_in):
    facts = observe(tmp_path, HERE / "files" / f"{file}.yaml", ROOT / "examples" / f"{script}.py")
    assert (facts["strategy"], facts["mesh"], facts["device"]) == ("FULL_SHARD", {"fsdp": 2}, "cpu")
    assert facts["units"][1:] == units
    assert (facts["offload"], facts["computes_in"], facts["stored_in"]) == (offload, computes_in, ["torch.float32"])
    assert (facts["backward_prefetch"], facts["forward_prefetch"]) == ("BACKWARD_PRE", False)
    assert facts["saved_as"] == "SHARDED_STATE_DICT"
    assert facts["resolved"]["config_file"].endswith(f"{file}.yaml") and facts["resolved"]["notes"]
    assert "loss" in facts["out"]


@SLOW
def test_a_layer_class_of_another_model(tmp_path):
    words = ["launch", "--quiet", "--config_file", str(HERE / "files" / "trainer_fsdp.yaml")]
    run = launch(tmp_path, *words, str(ROOT / "examples" / "llama_fsdp.py"))
    assert run.returncode == 2, run.stderr
    said = [line for line in run.stderr.splitlines() if line.startswith("fullshard:")]
    assert said == [
        "fullshard: transformer_auto_wrap_policy: no module of class BertLayer in LlamaForCausalLM. Candidates found "
        "in the model: LlamaDecoderLayer"
    ]
    assert "Traceback" not in run.stderr


@SLOW
def test_launch_uses_exactly_what_was_answered(tmp_path):
    path = tmp_path / "answers.yaml"
    interview(tmp_path, path, VERSION_2)
    facts = observe(tmp_path, path, ROOT / "examples" / "bert_classification.py", "--epochs", "1")
    assert (facts["strategy"], facts["mesh"]) == ("HYBRID_SHARD_ZERO2", {"replica": 2, "fsdp": 1})
    assert (facts["offload"], facts["computes_in"]) == (True, "torch.bfloat16")
    assert facts["saved_as"] == "FULL_STATE_DICT" and len(facts["units"]) > 10  # modules of 1,000 parameters


@SLOW
@pytest.mark.parametrize(
    "flags",
    [
        "--cpu -n 2",
        "--cpu -n 2 --fsdp_sharding_strategy SHARD_GRAD_OP --mixed_precision bf16 --fsdp_offload_params",
        "--cpu -n 4 --fsdp_sharding_strategy HYBRID_SHARD --parallelism_config_dp_replicate_size 2 "
        "--fsdp_transformer_layer_cls_to_wrap BertLayer --fsdp_activation_checkpointing",
        "--cpu -n 1 --fsdp_ignored_modules head",
    ],
)
def test_the_self_test_says_what_works(tmp_path, flags):
    run = launch(tmp_path, "test", *flags.split())
    assert run.returncode == 0, run.stderr
    for said in (
        "are connected",
        "an all-reduce over all ranks is correct",
        "the model is sharded",
        "one device's losses",
        "everything works",
    ):
        assert said in run.stdout
    assert "a checkpoint was saved and restored bit for bit" in run.stdout
