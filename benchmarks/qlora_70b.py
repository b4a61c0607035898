"""QLoRA of a 70B model on two ranks that share one GPU, each limited to 24 GB, with parameters offloaded to the host.

    python benchmarks/qlora_70b.py             # `--layers 4` for a quick run, `--tiny` for a machine without a GPU

The model has the shape of Llama-2-70B and random weights. Each rank generates and quantizes its own slices (with double
quantization), one weight at a time. Training: LoRA with rank 8 on every layer except the head, 2 × 2048 tokens per
rank, activation checkpointing, offload. One JSON line: seconds, and peak GPU and host memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPE = {"hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64, "kv": 8, "vocabulary": 32000}
TINY = {"hidden": 128, "intermediate": 352, "layers": 2, "heads": 4, "kv": 2, "vocabulary": 256}


class HostMemory(threading.Thread):
    """Follows this process's memory: the most that was not backed by files, and the most there was in all."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.total = 0.0

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.2)

    def look(self) -> dict[str, float]:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("Rss")}
        self.anonymous = max(self.anonymous, found["RssAnon"])
        self.total = max(self.total, sum(found.values()))
        return found


class Random:
    """Stands for a weight in a file: any range of it, made when it is asked for."""

    def __init__(self, name: str, device: Any):
        self.seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
        self.device = device

    def flat(self, start: int, stop: int) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(self.seed + start)
        made = torch.empty(stop - start, dtype=torch.bfloat16, device=self.device)
        return made.normal_(std=0.02, generator=generator)


def build(shape: dict[str, int]) -> Any:
    """The model on the meta device: quantised layers, adapters, checkpointed layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from fullshard.fsdp import checkpoint_module
    from fullshard.quant import quantize_model

    config = LlamaConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
        max_position_embeddings=4096, use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(quantize_model(model, {**four_bits, "bnb_4bit_compute_dtype": "bfloat16"}), lora)
    for layer in model.base_model.model.model.layers:
        checkpoint_module(layer)
    return model


def fill(model: Any) -> None:
    """Give every shard its values, one weight at a time."""
    import torch

    import fullshard.runtime as xr
    from fullshard.quant import quantized_layers
    from fullshard.weights.init import compute_buffers
    from fullshard.weights.transforms import piece_of

    parameters = [p for unit in model._fullshard_engine.units for p in unit.parameters]
    by_site = {(module, name): p for p in parameters for module, name in p.sites}
    compute_buffers(model, parameters)
    for p in parameters:
        p.give_memory()
        if p.local.is_floating_point():
            with torch.no_grad():
                if "norm" in p.plan.name:
                    p.local.fill_(1.0)
                elif "lora_B" in p.plan.name:
                    p.local.zero_()
                else:
                    p.local.normal_(std=0.02)
    for name, layer in quantized_layers(model).items():
        pieces = {part: piece_of(by_site[layer, part]) for part in layer.made_parameters()}
        layer.finish_reading(layer.read_files({"weight": Random(name, xr.device())}, pieces), pieces)


def rank_program(shape: dict[str, int], rows: int, length: int, steps: int, limit_gb: float) -> None:
    import numpy as np
    import torch

    import fullshard.runtime as xr
    import fullshard.spmd as xs
    from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
    from fullshard.lora import summary
    from fullshard.models.chunked_loss import LeanHead

    host = HostMemory()
    xr.use_spmd()
    cuda = xr.device().type == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(xr.device()).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_gb * 1e9 / total)
    before = host.look()
    host.start()
    mesh = xs.Mesh(np.arange(xr.world_size()), (xr.world_size(),), ("fsdp",))
    model = build(shape)
    head = LeanHead(model)
    model = FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision="bf16", cpu_offload=True)
    start = time.perf_counter()
    fill(model)
    seconds: dict[str, Any] = {"fill": round(time.perf_counter() - start, 1), "steps": []}
    xr.print0(summary(model), f"filled in {seconds['fill']} s")
    held = sum(p.local.numel() * p.local.itemsize for u in model._fullshard_engine.units for p in u.parameters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(steps):
        start = time.perf_counter()
        ids = torch.randint(0, shape["vocabulary"], (rows, length), device=xr.device())
        with head.loss_pass(scale=1.0 / (rows * (length - 1))):
            loss = model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter() - start
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds["steps"].append(round(time.perf_counter() - start, 1))
        xr.print0(f"step {step}: loss {losses[-1]:.4f}, forward {forward:.1f} s, all {seconds['steps'][-1]} s")
    host.look()
    mine = {
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        "host_anonymous_gb": host.anonymous, "host_all_gb": host.total, "host_before_gb": before["RssAnon"],
        "shards_gb": held / 1e9,
    }  # fmt: skip
    everyone: list[Any] = [None] * xr.world_size()
    torch.distributed.all_gather_object(everyone, mine)
    if xr.rank() == 0:
        together = {key: round(sum(m[key] for m in everyone), 2) for key in mine if key.startswith(("host", "shards"))}
        peaks = {key: round(max(m[key] for m in everyone), 2) for key in mine if key.startswith("gpu")}
        about = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if cuda else "none"}
        line = {"case": "qlora 70B", **shape, **peaks, **together, "seconds": seconds, "losses": losses, **about}
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-gb", type=float, default=24.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rank", action="store_true", help="run as one of the ranks")
    options = parser.parse_args()
    shape = dict(TINY if options.tiny else SHAPE)
    shape["layers"] = options.layers or shape["layers"]
    length = min(options.length, 64) if options.tiny else options.length
    if options.rank:
        rank_program(shape, options.rows, length, options.steps, options.limit_gb)
        return 0
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jobs = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        jobs.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank"], env=environment))
    return max(job.wait() for job in jobs)


if __name__ == "__main__":
    raise SystemExit(main())
