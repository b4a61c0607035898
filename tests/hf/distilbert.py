"""Masked language modelling with DistilBERT, which names no layers to split at: `distilbert.py trainer|accelerate`.

In the shape of transformers' `run_mlm.py` and of Accelerate's `nlp_example.py`; it knows nothing of fullshard. Which
tokens are masked depends on the row alone, so that losses do not depend on the number of processes.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

WORDS, LENGTH, MASK, BATCH = 40, 12, 3, 8

parser = argparse.ArgumentParser()
parser.add_argument("library", choices=["trainer", "accelerate"])
parser.add_argument("--output_dir", type=Path, required=True)
options = parser.parse_args()


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Words that count up from one of three numbers; every third one is masked, and is to be predicted."""
    begins = torch.randint(3, (count,), generator=torch.Generator().manual_seed(seed))
    masked = torch.arange(LENGTH) % 3 == 1
    texts = [4 + (begin + torch.arange(LENGTH)) % (WORDS - 4) for begin in begins]
    return [{"input_ids": text.masked_fill(masked, MASK), "labels": text.where(masked, -100)} for text in texts]


def count_right(logits: torch.Tensor, labels: torch.Tensor) -> int:
    return int((logits.argmax(-1) == labels).sum())


set_seed(3)
model = DistilBertForMaskedLM(DistilBertConfig(
    vocab_size=WORDS, max_position_embeddings=LENGTH, dim=16, n_layers=2, n_heads=2, hidden_dim=32, dropout=0.0,
    attention_dropout=0.0, initializer_range=0.2,
))  # fmt: skip
if options.library == "trainer":
    import os

    each = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(options.output_dir), max_steps=8, per_device_train_batch_size=each, learning_rate=3e-2,
        per_device_eval_batch_size=each, logging_steps=1, report_to="none", disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows(64, 1), eval_dataset=rows(24, 2),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda both: {"right": int((both.predictions == both.label_ids).sum())},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    losses, right = [one["loss"] for one in trainer.state.log_history if "loss" in one], metrics["eval_right"]
    is_main = trainer.is_world_process_zero()
else:
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=loading)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 8)
    train, test = DataLoader(rows(64, 1), BATCH, shuffle=True), DataLoader(rows(24, 2), BATCH)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    losses, right = [], 0
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    model.eval()
    for batch in test:
        with torch.no_grad():
            logits = model(**batch).logits
        right += count_right(*accelerator.gather_for_metrics((logits, batch["labels"])))
    accelerator.save_model(model, str(options.output_dir))
    is_main = accelerator.is_main_process
if is_main:
    (options.output_dir / "result.json").write_text(json.dumps({"losses": losses, "right": right}))
