"""TRL's trainers other than SFT, one after the other. argv: MODEL OUTPUT_DIR CASE…

The first case is also resumed. Sampling is made the same in any number of processes: the noise of a token depends on
its place and on whether its row is even or odd, and the groups of GRPO and RLOO have two rows.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationMixin
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

NAME, FOLDER = sys.argv[1], Path(sys.argv[2])
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def load():
    return AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32)


def judge():
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=1, dtype=torch.float32)


def letters(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def rows(kind):
    """From a file: TRL keeps what it has computed for a data set beside its file."""
    asked = [f"What is {i} plus {i + 1}? " for i in range(16)]
    right, wrong = [f"It is {2 * i + 1}." for i in range(16)], [f"No idea, {i}" for i in range(16)]
    made = {
        "DPO": [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in zip(asked, right, wrong, strict=True)],
        "Reward": [{"chosen": p + a, "rejected": p + b} for p, a, b in zip(asked, right, wrong, strict=True)],
        "KTO": [
            {"prompt": p, "completion": (wrong, right)[i % 2][i], "label": bool(i % 2)} for i, p in enumerate(asked)
        ],
    }.get(kind, [{"prompt": f"Say {10 + i}: "} for i in range(16)])  # fmt: skip
    file = FOLDER / f"{kind}.jsonl"
    with PartialState().main_process_first():
        if not file.exists():
            file.write_text("\n".join(map(json.dumps, made)))
    return load_dataset("json", data_files=str(file), split="train", cache_dir=str(FOLDER / "data"))


def trainer_of(kind, how, resumes):
    common = {
        "output_dir": str(FOLDER / f"{kind}_{how}"), "max_steps": 3, "per_device_train_batch_size": 4 // RANKS,
        "per_device_eval_batch_size": 4 // RANKS, "learning_rate": 1e-3, "logging_steps": 1, "seed": 1, "bf16": False,
        "report_to": "none", "disable_tqdm": True, "save_steps": 2, "save_strategy": "no" if resumes else "steps",
    }  # fmt: skip
    given = {"train_dataset": rows(kind), "processing_class": AutoTokenizer.from_pretrained(NAME)}
    if how == "adapter":
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    if kind == "Reward":
        return RewardTrainer(
            judge(), RewardConfig(max_length=64, eval_strategy="steps", eval_steps=1, **common),
            eval_dataset=given["train_dataset"].select(range(8)), **given,
        )  # fmt: skip
    if kind == "DPO":
        options = {
            "sync": {"sync_ref_model": True, "ref_model_sync_steps": 1},
            "before": {"precompute_ref_log_probs": True},
        }
        return DPOTrainer(load(), None, DPOConfig(max_length=64, **options.get(how, {}), **common), **given)
    if kind == "KTO":
        return KTOTrainer(load(), None, KTOConfig(max_length=64, **common), **given)
    trainer, config = (GRPOTrainer, GRPOConfig) if kind == "GRPO" else (RLOOTrainer, RLOOConfig)
    arguments = config(max_completion_length=6, num_generations=2, beta=0.1, **common)
    rewards = [judge(), letters] if how == "judged" else letters
    return trainer(model=load(), reward_funcs=rewards, args=arguments, **given)


def sample_alike():
    """`torch.multinomial` with noise that does not depend on the number of processes."""
    place, generate = [0], GenerationMixin.generate

    def counted(self, *args, **kwargs):
        place[0] = 0
        return generate(self, *args, **kwargs)

    def draw(probabilities, num_samples):
        place[0] += 1
        noise = [torch.Generator().manual_seed(2 * place[0] + odd) for odd in (0, 1)]
        uniform = torch.stack([torch.rand(probabilities.shape[1], generator=one) for one in noise])
        uniform = uniform.repeat(len(probabilities) // 2, 1).clamp(1e-9)
        return (probabilities.clamp_min(1e-20).log() - (-uniform.log()).log()).argmax(1, keepdim=True)

    GenerationMixin.generate, torch.multinomial = counted, draw


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    sample_alike()
    found = {}
    for case in sys.argv[3:]:
        kind, how = case.split("_")
        for resumes in (False, True)[: 2 if case == sys.argv[3] else 1]:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            trainer = trainer_of(kind, how, resumes)
            trainer.train(resume_from_checkpoint=str(FOLDER / case / "checkpoint-2") if resumes else None)
            kept = ("loss", "eval_loss", "kl", "reward", "rewards/margins")
            logged = {key: [one[key] for one in trainer.state.log_history if key in one] for key in kept}
            found[f"{case}{' resumed' * resumes}"] = {key: values for key, values in logged.items() if values}
        trainer.save_model(str(FOLDER / case / "final"))
    if trainer.is_world_process_zero():
        (FOLDER / "result.json").write_text(json.dumps(found))


main()
