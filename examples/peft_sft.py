"""TRL's `SFTTrainer` with a LoRA adapter, the way PEFT's guide to FSDP shows it; it knows nothing of fullshard.

    python examples/peft_sft.py --model quickstart/model --data quickstart/data/train.jsonl --output_dir out
    fullshard launch --config_file fsdp_config.yaml examples/peft_sft.py --model quickstart/model \
        --data quickstart/data/train.jsonl --output_dir out

Needs `pip install trl`. With `--use_4bit_quantization` the frozen weights are held in 4 bits (QLoRA).
"""

import argparse
import json
import os
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--use_4bit_quantization", action="store_true")
    parser.add_argument("--resume")
    options = parser.parse_args()

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.uint8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32,
        quantization_config=quantization if options.use_4bit_quantization else None,
    )  # fmt: skip
    data = load_dataset("json", data_files=options.data, split="train[:64]")
    arguments = SFTConfig(
        output_dir=str(options.output_dir), max_steps=options.max_steps, per_device_train_batch_size=4 // RANKS,
        per_device_eval_batch_size=4 // RANKS, gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_steps=3, seed=1, report_to="none", disable_tqdm=True, bf16=False,
        max_length=128,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(6)),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )  # fmt: skip
    trainer.accelerator.print(f"{trainer.model}")
    trainer.model.print_trainable_parameters()
    if getattr(trainer.accelerator.state, "fsdp_plugin", None):
        from peft.utils.other import fsdp_auto_wrap_policy

        fsdp_plugin = trainer.accelerator.state.fsdp_plugin
        fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(trainer.model)

    trainer.train(resume_from_checkpoint=options.resume)

    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(options.output_dir / "final"))
    prompt = torch.tensor([[1, 2, 3]], device=trainer.args.device)
    answer = trainer.model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)[0].tolist()
    if trainer.is_world_process_zero():
        logged = {key: [one[key] for one in trainer.state.log_history if key in one] for key in ("loss", "eval_loss")}
        found = {"losses": logged["loss"], "eval_losses": logged["eval_loss"], "answer": answer}
        (options.output_dir / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
