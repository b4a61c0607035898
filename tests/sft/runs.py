"""Short runs for tests, inside a rank or a process of their own; what is compared is the loss of every step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from fullshard.config.options import names_of
from fullshard.distributed.ranks import exchange
from fullshard.sft.cli_args import CommandConfig
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows


def settings(folder: Path, **changes: Any) -> SFTConfig:
    """A run of few steps that logs every one, with the defaults of `fullshard sft`; `folder` is this run's own."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "out"), "cache_dir": str(folder / "cache"), "max_steps": 30, "learning_rate": 5e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "progress": "quiet", "max_length": 48,
        "add_special_tokens": False, "skip_plan": True,
    }  # fmt: skip
    names = names_of(CommandConfig)
    return CommandConfig(**{**values, **{names.get(name, name): value for name, value in changes.items()}})


def global_batch(world: int, rows: int = 8) -> dict[str, int]:
    """The same global batch on any number of ranks, by micro-batches of two rows."""
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": rows // (2 * world)}


def train(model: Any, config: SFTConfig, rows: Any = None, engine: dict[str, Any] | None = None, **more: Any) -> Any:
    """A trainer that has trained."""
    more.setdefault("tokenizer", make_tokenizer())
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows if rows is not None else text_rows(60), **more)
    if engine:
        trainer.parts = dataclasses.replace(trainer.parts, engine=dataclasses.replace(trainer.parts.engine, **engine))
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    """The loss of every step, on every rank."""
    found = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    return exchange(found, "losses")[0]


def plain_losses(made: Any, optimizer: Any, schedule: Any, table: Any, order: Any, config: SFTConfig) -> list[float]:
    """The steps of a plain loop on one device, with each document in a row of its own."""
    trained = [p for p in made.parameters() if p.requires_grad]
    found = []
    for step in range(config.max_steps):
        documents = [torch.tensor(ids.astype("int64")) for row in order.step(step) for ids, _ in table.documents(row)]
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=2)
        labels = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-100)
        # Padding is behind: nobody sees it. Virtual tokens stand before the row.
        logits = made(input_ids=ids, use_cache=False).logits[:, -ids.shape[1] :]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found
