"""Runs on one GPU: the same losses as on the CPU, in fp32, bf16 and fp16, packed and not; memory of the head's loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fullshard.distributed import runtime
from fullshard.models.chunked_loss import chunked_cross_entropy, whole_cross_entropy
from fullshard.models.deferred_logits import DeferredLogits
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_model


def curves(folder: Path, device: str) -> dict[str, list[float]]:
    runtime.use_spmd(device=device)
    cases: dict[str, dict[str, Any]] = {
        "plain": {}, "packed": {"packing": True}, "bf16": {"bf16": True}, "fp16": {"fp16": True},
        "checkpointed": {"gradient_checkpointing": True, "bf16": True},
    }  # fmt: skip
    found = {}
    for name, changes in cases.items():
        config = settings(folder / device / name, max_steps=10, per_device_train_batch_size=4, **changes)
        found[name] = losses(train(make_model(), config))
    runtime.shutdown()
    return found


def head_memory(chunked: bool, tokens: int = 16384, width: int = 2048, vocabulary: int = 128256) -> tuple[float, float]:
    """Peak GiB above weights and hidden states of the head's loss, forward and backward; and the loss."""
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if chunked:
        loss = chunked_cross_entropy(DeferredLogits.of(hidden, head), labels, 0, 1 / tokens).scaled
    else:
        loss = whole_cross_entropy(head(hidden), labels, 1 / tokens).scaled
    loss.backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30, float(loss.detach())


def main(folder: Path) -> None:
    gpu, cpu = curves(folder, "cuda"), curves(folder, "cpu")
    apart = {name: max(abs(a - b) for a, b in zip(gpu[name], cpu[name], strict=True)) for name in gpu}
    print("largest difference between GPU and CPU:", json.dumps(apart))
    assert apart["plain"] < 1e-3 and apart["packed"] < 1e-3, apart
    assert all(apart[name] < 0.05 for name in ("bf16", "fp16", "checkpointed")), apart
    lean, lean_loss = head_memory(True)
    whole, whole_loss = head_memory(False)
    print(f"head's loss, 16,384 tokens, 128,256 words: {lean:.2f} GiB chunked, {whole:.2f} GiB whole")
    assert abs(lean_loss - whole_loss) < 1e-3 and lean < 0.5 * whole
    print("all right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
