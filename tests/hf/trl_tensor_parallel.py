"""TRL's SFT with an adapter, in fp32; under a launcher its batch is divided by the groups of ranks that share rows."""

import argparse
import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--output_dir", type=Path, required=True)
options = parser.parse_args()
groups = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1"))
rows = [{"text": f"the number {i} follows {i - 1} and comes before {i + 1}"} for i in range(40)]
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
torch.manual_seed(0)
config = SFTConfig(
    output_dir=str(options.output_dir), max_steps=6, per_device_train_batch_size=4 // groups, learning_rate=1e-2,
    logging_steps=1, save_strategy="no", report_to="none", max_length=32, seed=1, bf16=False, use_cpu=True,
)  # fmt: skip
trainer = SFTTrainer(
    model=model, args=config, train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(options.model),
    peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.train()
if trainer.is_world_process_zero():
    names = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy")
    found = {name: [record[name] for record in trainer.state.log_history if name in record] for name in names}
    (options.output_dir / "result.json").write_text(json.dumps(found))
