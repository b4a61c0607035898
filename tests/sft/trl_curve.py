"""Loss curves of TRL's own `SFTTrainer` on the tiny model: the oracle of `test_trl.py`.

    python -m tests.sft.trl_curve        # needs trl; writes tests/sft/trl_curve.json

The file records the versions it was made with.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.data.tiny import chat_rows, make_tokenizer, text_rows
from tests.sft.tiny import make_trained

FILE = Path(__file__).with_suffix(".json")
STEPS = 30
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine", "warmup_steps": 4, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 7,
    "logging_steps": 1, "train_sampling_strategy": "sequential",
}  # fmt: skip
KINDS = ("full", "lora", "assistant")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rows(kind: str) -> list[dict[str, Any]]:
    return chat_rows(70) if kind == "assistant" else text_rows(70)


def tokenizer(kind: str) -> Any:
    made = make_tokenizer()
    if kind == "assistant":
        made.chat_template = TEMPLATE
    return made


def trl_losses(kind: str) -> list[float]:
    """TRL's loss at every step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder, report_to="none", use_cpu=True, bf16=False, max_length=256, save_strategy="no",
            assistant_only_loss=kind == "assistant", gradient_checkpointing=False, packing=False, disable_tqdm=True,
            **SETTINGS,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=make_trained(kind),
            args=args,
            train_dataset=Dataset.from_list(rows(kind)),
            processing_class=tokenizer(kind),
        )
        trainer.train()
        return [r["loss"] for r in trainer.state.log_history if "loss" in r]


def main() -> None:
    packages = ("trl", "transformers", "peft", "accelerate", "torch", "tokenizers")
    made = {"versions": {name: importlib.metadata.version(name) for name in packages}}
    for kind in KINDS:
        made[kind] = trl_losses(kind)  # type: ignore[assignment]
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
