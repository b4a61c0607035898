"""transformers' `Trainer` with `fsdp` and `fsdp_config`; it knows nothing of fullshard.

    python examples/trainer_fsdp.py --model ./llama --output_dir out                                # Trainer alone
    fullshard launch --num_processes 2 examples/trainer_fsdp.py --model ./llama --output_dir out    # sharded
    fullshard launch --config_file fsdp_config.yaml examples/trainer_fsdp.py --model ./bert --output_dir out --fsdp ""

It trains on made-up tokens, evaluates, writes checkpoints, resumes with `--resume out/checkpoint-3`, and saves the
model at the end, whole. `--fsdp` and `--fsdp_config` are those of `TrainingArguments`; with an empty `--fsdp` the
launched configuration counts alone.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def rows(count: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    made = [torch.randint(vocabulary, (12,), generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--state_dict_type", default="SHARDED_STATE_DICT")
    parser.add_argument("--fsdp", default="full_shard auto_wrap")
    parser.add_argument("--fsdp_config", help="a file")
    parser.add_argument("--resume")
    options = parser.parse_args()

    section = options.fsdp_config or {"fsdp_state_dict_type": options.state_dict_type}
    sharding = {"fsdp": options.fsdp, "fsdp_config": section} if options.fsdp else {}
    arguments = TrainingArguments(
        output_dir=str(options.output_dir), max_steps=6, per_device_train_batch_size=4 // RANKS,
        per_device_eval_batch_size=4 // RANKS, gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_steps=3, seed=1, report_to="none", disable_tqdm=True,
        **(sharding if RANKS > 1 else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    data = rows(64, model.config.vocab_size)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6])
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(options.output_dir / "final"))
    prompt = torch.tensor([[1, 2, 3]], device=trainer.args.device)
    answer = trainer.model.generate(prompt, max_new_tokens=5, do_sample=False)[0].tolist()
    if trainer.is_world_process_zero():
        logged = {key: [one[key] for one in trainer.state.log_history if key in one] for key in ("loss", "eval_loss")}
        found = {"before": before, "losses": logged["loss"], "eval_losses": logged["eval_loss"], "answer": answer}
        (options.output_dir / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
