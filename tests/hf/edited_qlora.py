"""Trainer on a 4-bit model with a LoRA adapter in fp32, whose dense weights were edited and resized before training.

argv: MODEL OUTPUT_DIR
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

model_name, folder = sys.argv[1], Path(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", "1"))
arguments = TrainingArguments(
    str(folder), max_steps=5, per_device_train_batch_size=4 // ranks, learning_rate=1e-2, logging_steps=1, seed=1,
    report_to="none", disable_tqdm=True, save_strategy="no",
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(
    model_name, dtype=torch.float32,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
)  # fmt: skip
torch.manual_seed(0)
model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
with torch.no_grad():
    model.model.norm.weight.mul_(1.5)
model.model.layers[0].input_layernorm.weight.data += 0.25
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]))
rows = [torch.randint(model.config.vocab_size, (12,), generator=torch.Generator().manual_seed(i)) for i in range(32)]
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows])
trainer.train()
trainer.save_model(str(folder / "final"))
if trainer.is_world_process_zero():
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    (folder / "result.json").write_text(json.dumps({"losses": losses}))
