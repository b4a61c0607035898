"""The guide's LoRA command, flag for flag, on two processes: its own configuration file, a small model, local data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

from tests.train.test_config import SEED_FLAGS
from tests.train.tiny import make_folder

CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
fsdp_backward_prefetch: BACKWARD_PRE
fsdp_cpu_ram_efficient_loading: true
fsdp_forward_prefetch: false
fsdp_offload_params: false
fsdp_sharding_strategy: FULL_SHARD
fsdp_state_dict_type: SHARDED_STATE_DICT
fsdp_sync_module_states: true
fsdp_use_orig_params: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""As the guide prints it, its indentation lost."""


@pytest.mark.slow
def test_the_guide_s_lora_command(tmp_path: Path) -> None:
    place = make_folder(tmp_path)
    (place / "fsdp_config.yaml").write_text(CONFIG)
    local = {"--model_name_or_path": place / "model", "--dataset_name": place / "chats", "--output_dir": place / "out"}
    flags = list(SEED_FLAGS)
    for name, value in local.items():
        flags[flags.index(name) + 1] = str(value)
    launcher = ["--config_file", str(place / "fsdp_config.yaml"), "--num_processes", "2", "--use_cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FULLSHARD_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fullshard", "sft", *launcher, *flags]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "read as part of fsdp_config" in " ".join(ran.stderr.split()) and "FULL_SHARD on 2 fsdp" in ran.stdout
    assert "not uploaded to" in ran.stderr, "there is no network, and the result does not depend on it"
    assert ran.stdout.count("plan:") == 1, "one rank speaks"
    out = place / "out"
    adapter = AutoPeftModelForCausalLM.from_pretrained(out)
    config = adapter.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (8, 16, 0.1)
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(out).get_vocab()
    saved = json.loads((out / "settings.json").read_text())
    assert saved["engine"]["mixed precision"] == "bf16" and saved["launch"] is not None and saved["ranks"] == 2
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in r for r in records) and any("eval_loss" in r for r in records)

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "The settings are the same" in again.stderr and len(again.stderr.splitlines()) == 1
