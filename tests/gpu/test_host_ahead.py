"""Between log lines the host never waits for the GPU: torch raises where it would (`set_sync_debug_mode`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from fullshard.device import accelerator
from fullshard.distributed import runtime
from tests.pool import gpu_ranks
from tests.sft.runs import settings, train
from tests.sft.test_host_ahead import KINDS
from tests.sft.tiny import make_model

STEPS, FROM = 8, 3
"""The first steps allocate memory and compile."""


class NoWaits(TrainerCallback):
    """From the third step on, until the last has been issued, a wait of the host is an error."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= FROM:
            set_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STEPS:
            set_mode("default")


def set_mode(mode: str) -> None:
    module = torch.get_device_module(runtime.device())
    if accelerator.is_accelerator(runtime.device()):
        module.set_sync_debug_mode(mode)


@gpu_ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_no_wait_between_log_lines(kind: str, tmp_path: Path) -> None:
    config = settings(
        tmp_path, max_steps=STEPS, logging_steps=100, per_device_train_batch_size=2, bf16=True, **KINDS[kind]
    )
    try:
        trainer = train(make_model(hidden_size=64, intermediate_size=128), config, callbacks=[NoWaits()])
    finally:
        set_mode("default")
    assert trainer.loop.guard is not None and trainer.loop.progress.loss_steps == STEPS
