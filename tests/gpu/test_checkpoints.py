"""Checkpoints and exports on NCCL ranks that share one GPU, bit for bit: saved in the foreground and in the background,
continued on as many ranks, restored on fewer and in another layout, exported and read back by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from fullshard import CheckpointManager
from fullshard.distributed import runtime
from tests.checkpoint.resume_programs import assert_same_bits
from tests.gpu.cases import Case
from tests.gpu.programs import VOCABULARY, base, exact_kernels, optimizer_for, sharded
from tests.pool import gpu_ranks

BEFORE, AFTER = 3, 3
MOVES = [
    (Case("FULL_SHARD"), Case("FULL_SHARD"), False),
    (Case("HYBRID_SHARD", (2, 2), "full", "bf16", place="offload"), Case("SHARD_GRAD_OP", (), "full", "bf16"), True),
    (Case("SHARD_GRAD_OP", (), "lora", "bf16"), Case("FULL_SHARD", (), "lora", "bf16"), True),
    (Case("FULL_SHARD", (), "qlora"), Case("HYBRID_SHARD", (2, 1), "qlora"), True),
    (Case("FULL_SHARD", place="offload", words="tied"), Case("FULL_SHARD", place="offload", words="tied"), False),
    (
        Case("HYBRID_SHARD_ZERO2", (4, 1), "qlora", "bf16", place="offload"),
        Case("NO_SHARD", (), "qlora", "bf16"),
        False,
    ),
]
"""What is saved on four ranks, as what it is restored on two, and whether it is saved in the background."""


class Training:
    """A model, its optimizer and schedule; batches are drawn from this rank's generators, so that those matter too."""

    def __init__(self, case: Case, fresh: bool = False):
        self.model = sharded(case)
        if fresh:  # other values than those to be restored
            with torch.no_grad():
                for p in self.model.parameters():
                    if p.requires_grad:
                        p.mul_(1.5)
        self.optimizer = optimizer_for(self.model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "losses": self.losses,
        }  # fmt: skip

    def run(self, steps: int) -> None:
        for _ in range(steps):
            ids = torch.randint(3, VOCABULARY, (2, 32), device=runtime.device())
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def values(self, whole: bool) -> dict[str, torch.Tensor]:
        """Parameters, buffers and optimizer state, on the CPU: this rank's pieces, or whole."""
        found: dict[str, Any] = dict(self.model.full_state_dict() if whole else self.model.state_dict())
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found |= {f"{names[id(p)]}:{k}": torch.as_tensor(v) for k, v in state.items()}
        pieces = {n: _whole(t) if whole else getattr(t, "_local_tensor", t) for n, t in found.items()}
        return {n: t.detach().cpu().clone() for n, t in pieces.items()}


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@gpu_ranks(4)
def _save(case, folder, background):
    """A training that goes on, and one that is saved half-way."""
    with exact_kernels():
        straight = Training(case)
        runtime.seed(17, per_rank=True)
        straight.run(BEFORE + AFTER)
        torch.save((straight.losses, straight.values(whole=False)), folder / f"straight-{runtime.rank()}.pt")
        half = Training(case)
        runtime.seed(17, per_rank=True)
        half.run(BEFORE)
        whole = half.values(whole=True)
        if runtime.is_main():
            torch.save(whole, folder / "half.pt")
        with CheckpointManager(folder / "checkpoints", BEFORE) as manager:
            assert (manager.save_async if background else manager.save)(BEFORE, half.state)
            if background:
                half.run(2)  # changes what is being written
        half.run(1)


@gpu_ranks(4)
def _continue(case, folder):
    losses, values = torch.load(folder / f"straight-{runtime.rank()}.pt", weights_only=False)
    with exact_kernels():
        resumed = Training(case, fresh=True)
        with CheckpointManager(folder / "checkpoints", BEFORE) as manager:
            state = resumed.state
            assert manager.restore(None, state) == BEFORE
        resumed.losses = state["losses"]
        resumed.run(AFTER)
    assert resumed.losses == losses
    assert_same_bits(resumed.values(whole=False), values)


@gpu_ranks(2)
def _move(case, folder):
    expected = torch.load(folder / "half.pt")
    with exact_kernels():
        moved = Training(case, fresh=True)
        with CheckpointManager(folder / "checkpoints", BEFORE) as manager:
            state = moved.state
            del state["losses"]  # each rank's own
            assert manager.restore(None, state) == BEFORE
        got = moved.values(whole=True)
        moved.run(1)  # and it trains
    assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("saved", "restored", "background"), MOVES, ids=[f"{a}-to-{b.strategy}" for a, b, _ in MOVES])
def test_saved_on_four_ranks_and_restored(saved: Case, restored: Case, background: bool, tmp_path: Path) -> None:
    _save(saved, tmp_path, background)
    _continue(saved, tmp_path)
    _move(restored, tmp_path)


# --- exports --------------------------------------------------------------------------------------------------------


@gpu_ranks(2, 4)
@pytest.mark.parametrize("trains", ["full", "lora", "qlora"])
@pytest.mark.parametrize(("place", "words"), [("device", "tied"), ("offload", "untied")])
def test_exports_are_read_back(trains, place, words, tmp_path):
    case = Case(trains=trains, place=place, words=words)
    training = Training(case)
    training.run(1)
    training.model.save_pretrained(tmp_path / "out")
    values = training.model.full_state_dict()
    if trains == "full":
        read = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    else:
        plain = base(trains, words == "tied")
        read = PeftModel.from_pretrained(plain, tmp_path / "out").state_dict()
        assert {n for n in read if "lora" in n} and all(values[n].any() for n in read if "lora" in n)
    assert_same_bits({n: t.cpu() for n, t in read.items()}, values)
