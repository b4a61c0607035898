"""The guide's two commands (LoRA, QLoRA), flag for flag, on two processes: its own configuration files, a small Llama
without rows to spare, local conversations. What PEFT loads is what was trained, new tokens included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.fsdp.state_dict import whole_value
from fullshard.launch.resolve import resolve
from fullshard.sft.checked_run import check_command
from fullshard.sft.cli_args import parse
from fullshard.sft.trainer import SFTTrainer, train_run
from tests.data.tiny import chat_rows, make_tokenizer, write_rows
from tests.pool import ranks
from tests.sft.test_config import SEED_FLAGS
from tests.sft.test_qlora import rounded
from tests.sft.test_tokens_train import MARKS
from tests.sft.tiny import make_model

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
fsdp_offload_params: OFFLOAD
fsdp_sharding_strategy: FULL_SHARD
fsdp_state_dict_type: SHARDED_STATE_DICT
fsdp_sync_module_states: true
fsdp_use_orig_params: false
machine_rank: 0
main_training_function: main
mixed_precision: PRECISION
num_machines: 1
num_processes: PROCESSES
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""As the guide prints it, its indentation lost."""
LORA_CONFIG = CONFIG.replace("OFFLOAD", "false").replace("PRECISION", "bf16").replace("PROCESSES", "8")
QLORA_CONFIG = CONFIG.replace("OFFLOAD", "true").replace("PRECISION", "'no'").replace("PROCESSES", "2")
CHANGED = {
    "--output_dir": "llama-sft-qlora-fsdp", "--per_device_train_batch_size": "2", "--per_device_eval_batch_size": "2",
    "--gradient_accumulation_steps": "2", "--use_reentrant": "True", "--use_4bit_quantization": "True",
}  # fmt: skip
MORE = "--use_nested_quant True --bnb_4bit_compute_dtype bfloat16 --bnb_4bit_quant_storage_dtype bfloat16"
"""How the second command differs from the first."""
ROWS = 120
NEW = 400


def flags(place: Path, four_bits: bool) -> list[str]:
    found = list(SEED_FLAGS) + (MORE.split() if four_bits else [])
    local = {"--model_name_or_path": place / "model", "--dataset_name": place / "chats", "--output_dir": place / "out"}
    for name, value in {**(CHANGED if four_bits else {}), **local}.items():
        found[found.index(name) + 1] = str(value)
    return found


def make_place(place: Path) -> None:
    """A model, and data with the columns of the guide's: a prompt and its id beside the messages."""
    make_model(vocab_size=NEW).save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    for split, rows, seed in (("train", ROWS, 0), ("test", 10, 9)):
        talks = chat_rows(rows, seed)
        asked = [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in talks]
        columns = [
            {"prompt": a, "prompt_id": f"{i:04d}", **row} for i, (a, row) in enumerate(zip(asked, talks, strict=True))
        ]
        write_rows(place / "chats" / f"{split}.jsonl", columns)


def config_file(place: Path, four_bits: bool) -> list[str]:
    file = place / f"fsdp_config-{runtime.rank()}.yaml"  # each rank its own: none reads what another is writing
    file.write_text(QLORA_CONFIG if four_bits else LORA_CONFIG)
    return ["--config_file", str(file), "--num_processes", "2", "--use_cpu"]


@ranks(2)
@pytest.mark.parametrize("four_bits", [pytest.param(False, marks=pytest.mark.slow), True], ids=["lora", "qlora"])
def test_what_is_trained_is_what_peft_loads(four_bits: bool, tmp_path: Path) -> None:
    """Inside two ranks that are there already, with what the launcher would hand on."""
    if runtime.is_main():
        make_place(tmp_path)
    runtime.barrier()
    place = exchange(str(tmp_path), "place")[0]
    words = flags(Path(place), four_bits)
    launch = resolve([*config_file(tmp_path, four_bits), sys.executable])
    trainers: list[Any] = []
    start = SFTTrainer._start
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**launch.engine.to_environment(), "FULLSHARD_CACHE": f"{place}/cache"}.items():
            patch.setenv(name, value)
        patch.setattr(SFTTrainer, "_start", lambda self, *given: (trainers.append(self), start(self, *given)))
        train_run(check_command(parse(words)))
    (trainer,) = trainers
    assert trainer.parts.engine.offload_params == four_bits and trainer.parts.engine.mixed_precision == "bf16"
    assert trainer.loop.progress.step >= 1
    ids = torch.tensor([trainer.tokenizer(MARKS, add_special_tokens=False)["input_ids"]])
    trainer.model.eval()
    with torch.no_grad():
        trained = trainer.model(input_ids=ids).logits.float()
    held = [p for unit in trainer.model._fullshard_engine.units for p in unit.parameters if p.plan.trainable]
    values = {p.plan.name: whole_value(p).clone() for p in held}
    if runtime.is_main():
        check_what_peft_loads(Path(place), trainer.args, ids, trained, values)


def check_what_peft_loads(place: Path, config: Any, ids: Any, trained: Any, values: dict[str, Any]) -> None:
    out = place / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert {NEW, NEW + 1} <= set(ids.flatten().tolist()) and len(tokenizer) == NEW + 2
    if config.use_4bit_quantization:
        base = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
        base.resize_token_embeddings(len(tokenizer))
        loaded = PeftModel.from_pretrained(rounded(base, config), out)
    else:
        loaded = AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    lora = loaded.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (8, 16, 0.1)
    parameters = dict(loaded.named_parameters())
    assert sum("trainable_tokens_delta" in name for name in values) == 2
    for name, value in values.items():
        assert torch.equal(parameters[name].float(), value.float()), name
    loaded.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits.float(), trained, rtol=0.02, atol=0.01)
        with loaded.disable_adapter():  # new rows as PEFT drew them: the marks mean something else there
            assert (loaded(input_ids=ids).logits.float() - trained).abs().max() > 0.1


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FULLSHARD_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "fullshard", *command]
    return subprocess.run(start, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("four_bits", [False, True], ids=["lora", "qlora"])
def test_the_guide_s_commands(four_bits: bool, tmp_path: Path) -> None:
    """The same words on a command line; a second run into the same folder is refused."""
    make_place(tmp_path)
    command = ["sft", *config_file(tmp_path, four_bits), *flags(tmp_path, four_bits)]
    ran = run(tmp_path, *command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stderr.split())
    assert "read as part of fsdp_config" in said and "FULL_SHARD on 2 fsdp" in ran.stdout
    assert "not uploaded to" in said, "there is no network, and the result does not depend on it"
    assert ran.stdout.count("plan:") == 1, "one rank speaks"
    assert "2 new tokens (<|im_start|> <|im_end|>): the model's embedding grows from 400 to 402 rows" in ran.stdout
    out = tmp_path / "out"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in r for r in records) and any("eval_loss" in r for r in records)
    settings = json.loads((out / "settings.json").read_text())
    assert settings["engine"]["mixed precision"] == "bf16" and settings["launch"] is not None and settings["ranks"] == 2
    loaded = AutoPeftModelForCausalLM.from_pretrained(out)
    assert loaded.get_input_embeddings().token_adapter.base_layer.weight.shape[0] == NEW + 2
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(out).get_vocab()
    again = run(tmp_path, *command)
    assert again.returncode == 2 and "The settings are the same" in again.stderr and len(again.stderr.splitlines()) == 1
