"""Measures loading, saving and exporting a 2.2 GB model on one GPU, and how much a save slows the GPU down.

    python -m torch.distributed.run --nproc_per_node 1 benchmarks/weights_gpu.py

Two ranks on one GPU work too (with Gloo). Prints one JSON line.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fullshard.runtime as xr
from fullshard import CheckpointManager, save_pretrained
from tests.weights.gpu_program import Allocations, Run, shared_directory

CONFIG = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4, max_position_embeddings=2048,
)  # fmt: skip


def measure(place: Path) -> dict[str, float]:
    """A model of 2.2 GB: time to load, to save, to go on."""
    files = place / "files"
    if xr.is_main():
        with torch.device("cuda"):
            LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(files)
    torch.cuda.empty_cache()
    xr.barrier()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run = Run(files)
    torch.cuda.synchronize()
    out = {"load_s": time.perf_counter() - start, "load_peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    start = time.perf_counter()
    theirs = LlamaForCausalLM.from_pretrained(files, device_map={"": torch.cuda.current_device()})
    torch.cuda.synchronize()
    out["from_pretrained_s"] = time.perf_counter() - start
    del theirs
    run.step(1)
    with CheckpointManager(place / "large", save_interval=1, max_to_keep=2) as manager:
        for number in (2, 3, 4):
            run.step(number)
            torch.cuda.synchronize()
            start = time.perf_counter()
            manager.save_async(number, run.state)
            out["async_stall_s"] = time.perf_counter() - start  # the last: buffers are there
            manager.join()
        run.step(5)
        torch.cuda.synchronize()
        start = time.perf_counter()
        manager.save(5, run.state)
        out["sync_s"] = time.perf_counter() - start
        start = time.perf_counter()
        torch.distributed.checkpoint.save(
            {"model": run.model.state_dict(), "optimizer": dict(enumerate(run.optimizer.state.values()))},
            checkpoint_id=place / "torch",
        )
        out["torch_sync_s"] = time.perf_counter() - start
        start = time.perf_counter()
        manager.restore(None, run.state)
        out["restore_s"] = time.perf_counter() - start
        out["checkpoint_gib"] = manager.read_manifest().bytes / 2**30
    with Allocations() as made:
        start = time.perf_counter()
        save_pretrained(run.model, place / "export")
        out["export_s"] = time.perf_counter() - start
    out["export_gpu_gib"] = made.bytes / 2**30
    return out


def main() -> None:
    xr.use_spmd()
    place = shared_directory()
    try:
        out = measure(place)
        out["stall_ratio"] = out["async_stall_s"] / out["sync_s"]
        out["ranks"] = xr.world_size()
        xr.print0(json.dumps({key: round(value, 3) for key, value in out.items()}))
    finally:
        xr.barrier()
        if xr.is_main():
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
