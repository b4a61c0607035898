"""TRL's DPOTrainer. argv: MODEL DATA OUTPUT_DIR adapter|reference (what the model is compared with)"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name, data, folder, how = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
turns = [json.loads(line)["messages"] for line in Path(data).read_text().splitlines()[:64]]
wrong = [[{"role": "assistant", "content": f"I do not know, {i}"}] for i in range(len(turns))]
rows = [{"prompt": t[:-1], "chosen": t[-1:], "rejected": no} for t, no in zip(turns, wrong, strict=True)]
arguments = DPOConfig(
    str(folder), max_steps=4, per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2, logging_steps=1,
    learning_rate=1e-3, seed=1, report_to="none", disable_tqdm=True, bf16=False, max_length=128,
)  # fmt: skip


def load():
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


trainer = DPOTrainer(
    load(), load() if how == "reference" else None, arguments, train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=LoraConfig(r=4, target_modules="all-linear") if how == "adapter" else None,
)  # fmt: skip
trainer.train()
trainer.save_model(str(folder / "final"))
if trainer.is_world_process_zero():
    kept = {key: [one[key] for one in trainer.state.log_history if key in one] for key in ("loss", "rewards/margins")}
    (folder / "result.json").write_text(json.dumps({"losses": kept["loss"], "margins": kept["rewards/margins"]}))
