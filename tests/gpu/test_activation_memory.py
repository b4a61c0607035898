"""Activation memory by budget on a GPU: the size holds, the prediction is near, the losses are those without one."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fullshard.activations.levels import Level
from fullshard.device import accelerator
from fullshard.distributed import runtime
from tests.data.tiny import make_tokenizer
from tests.gpu.programs import exact_kernels
from tests.pool import gpu_ranks, note
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_model

ROWS, LENGTH, LAYERS = 8, 1024, 8
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": LAYERS,
        "max_position_embeddings": LENGTH}  # fmt: skip


class Found(NamedTuple):
    """What is left of a run: no tensors, so that the next one starts with the memory of the first."""

    levels: list[Level]
    predicted: float
    text: str
    losses: list[float]
    peak: int
    """Of the last steps."""


def run(folder: Path, value: Any, **changes: Any) -> Found:
    data = [{"input_ids": list(range(3, 3 + 400)) * 3} for _ in range(8 * ROWS)]
    rows = [{"input_ids": row["input_ids"][: LENGTH - i % 7]} for i, row in enumerate(data)]
    config = settings(
        folder / f"{value}{len(changes)}", gradient_checkpointing=value, max_steps=12, max_length=LENGTH, bf16=True,
        use_peft_lora=True, lora_dropout=0.1, lora_target_modules="all-linear", per_device_train_batch_size=ROWS,
        **changes,
    )  # fmt: skip

    class Mark:
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 9:
                accelerator.mark_peak(runtime.device())

    gc.collect()
    accelerator.empty_cache(runtime.device())
    with exact_kernels():
        trainer = train(make_model(**WIDE), config, rows, tokenizer=make_tokenizer(), callbacks=[Mark()])
    chosen, peak = trainer.loop.activations, accelerator.peak_since_mark(runtime.device())
    return Found(chosen.levels, chosen.predicted, chosen.describe(), losses(trainer), peak)


@gpu_ranks(1)
def test_sizes_hold_and_losses_are_the_same(tmp_path: Path) -> None:
    if torch.accelerator.current_accelerator(check_available=True) is None:
        pytest.skip("needs a GPU: a CPU does not count memory")
    plain, kept = run(tmp_path, True), run(tmp_path, False)
    low, high = plain.peak, kept.peak
    assert kept.losses == plain.losses and high > 2 * low
    hosted = run(tmp_path, True, activation_offloading=True)
    assert hosted.losses == plain.losses and hosted.peak < low
    assert hosted.levels == [Level.OFFLOAD] * (LAYERS - 1) + [Level.RECOMPUTE]
    for share in (0.0, 0.3, 0.6):
        size = int(low + share * (high - low))
        found = run(tmp_path, f"{size}B")
        note(f"{size / 2**20:.0f} MiB: {found.text}; measured {found.peak / 2**20:.1f} MiB")
        assert found.losses == plain.losses and found.peak <= size
        assert found.peak <= found.predicted * 1.02 and found.predicted <= found.peak + 0.1 * (high - low)
    found = run(tmp_path, "auto")
    assert found.losses == plain.losses and found.levels == [Level.KEEP_ALL] * LAYERS
    assert found.peak <= found.predicted * 1.02


@gpu_ranks(2)
def test_two_ranks_choose_alike(tmp_path: Path) -> None:
    assert run(tmp_path, "auto").losses == run(tmp_path, True).losses
