"""TRL's `GRPOTrainer` with completions that are fixed, one case after the other. argv: MODEL OUTPUT_DIR

Nothing is sampled: `generate` returns tokens that depend on the prompt and on the number of the completion in its group
alone. So what differs between runs is the training, not what was drawn.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationMixin
from trl import GRPOConfig, GRPOTrainer

GROUP, LONGEST = 2, 8
CASES = {
    "default": {},
    "kl": {"beta": 0.1},
    "adapter": {"beta": 0.1},
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "bnpo": {"loss_type": "bnpo"},
    "dr": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "batch": {"scale_rewards": "batch"},
    "again": {"num_iterations": 2, "epsilon_high": 0.28},
    "accumulated": {"gradient_accumulation_steps": 2, "beta": 0.1},
    "entropy": {"top_entropy_quantile": 0.5},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "truncated": {"mask_truncated_completions": True, "beta": 0.1},
    "reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.1},
    "judged": {"beta": 0.1, "gradient_checkpointing": True},
}
NAMES = ("loss", "grad_norm", "reward", "reward_std", "kl", "entropy", "completions/mean_length")
EQUAL = ("bnpo",)
"""TRL divides by the tokens of each process here: rows of all processes must have as many."""


def fixed(case, eos, pad):
    """What takes the place of `generate`."""

    def generate(self, input_ids, attention_mask, **options):
        made = []
        for number, (row, mask) in enumerate(zip(input_ids.tolist(), attention_mask.tolist(), strict=True)):
            prompt = [token for token, there in zip(row, mask, strict=True) if there]
            drawn = random.Random(f"{prompt} {number % GROUP}")
            length = LONGEST if case in EQUAL else drawn.randint(2, LONGEST)
            ids = [drawn.randint(3, 300) for _ in range(length)]
            ids = ids if length == LONGEST else [*ids[:-1], eos]
            made.append(ids + [pad] * (LONGEST - length))
        return torch.cat([input_ids, torch.tensor(made)], dim=1)

    return generate


def letters(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def rows(folder):
    file = folder / "prompts.jsonl"
    with PartialState().main_process_first():
        if not file.exists():
            file.write_text("\n".join(json.dumps({"prompt": f"Say {10 + i}" + " now" * (i % 3)}) for i in range(32)))
    return load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "data"))


def train(name, folder, case, ranks):
    tokenizer = AutoTokenizer.from_pretrained(name)
    GenerationMixin.generate = fixed(case, tokenizer.eos_token_id, tokenizer.pad_token_id)
    torch.manual_seed(0)
    rewards = [letters]
    if case == "judged":
        rewards.append(AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=torch.float32))
    arguments = GRPOConfig(**{
        "output_dir": str(folder / case), "max_steps": 4, "per_device_train_batch_size": 8 // ranks,
        "num_generations": GROUP, "max_completion_length": LONGEST, "learning_rate": 1e-4, "logging_steps": 1,
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "bf16": False, "seed": 1, **CASES[case],
    })  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), reward_funcs=rewards, args=arguments,
        train_dataset=rows(folder), processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if case == "adapter" else None,
    )  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    logged = {key: [one[key] for one in history if key in one] for key in NAMES}
    trainer.save_model(str(folder / case / "final"))
    return {key: values for key, values in logged.items() if values}


def main():
    name, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(os.environ.get("WORLD_SIZE", "1"))
    folder.mkdir(parents=True, exist_ok=True)
    plain, found = GenerationMixin.generate, {}
    for case in CASES:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        found[case] = train(name, folder, case, ranks)
    GenerationMixin.generate = plain
    if PartialState().is_main_process:
        (folder / "result.json").write_text(json.dumps(found))


main()
