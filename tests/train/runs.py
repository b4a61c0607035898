"""Short runs for tests, inside a rank or a process of their own; what is compared is the loss of every step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fullshard.train.config import SFTConfig
from fullshard.train.sft import SFTTrainer
from fullshard.weights.meeting import exchange
from tests.data.tiny import make_tokenizer, text_rows


def settings(folder: Path, **changes: Any) -> SFTConfig:
    """A run of few steps that logs every one; `folder` is this run's own."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "out"), "cache_dir": str(folder / "cache"), "max_steps": 30, "learning_rate": 5e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "progress": "quiet", "max_seq_len": 48,
    }  # fmt: skip
    return SFTConfig(**{**values, **changes})


def global_batch(world: int, rows: int = 8) -> dict[str, int]:
    """The same global batch on any number of ranks, by micro-batches of two rows."""
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": rows // (2 * world)}


def train(model: Any, config: SFTConfig, rows: Any = None, engine: dict[str, Any] | None = None, **more: Any) -> Any:
    """A trainer that has trained."""
    more.setdefault("tokenizer", make_tokenizer())
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows if rows is not None else text_rows(60), **more)
    if engine:
        trainer.parts.engine = dataclasses.replace(trainer.parts.engine, **engine)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    """The loss of every step, on every rank."""
    found = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    return exchange(found, 0, "losses")[0]
