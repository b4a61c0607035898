"""QLoRA of a 70B model on two ranks that share one GPU, each limited to 24 GB, with parameters offloaded to the host.

    python benchmarks/qlora_70b.py             # `--layers 4` for a quick run, `--tiny` for a machine without a GPU
    python benchmarks/qlora_70b.py --nccl --layers 12 --steps 3 --in-flight 1 2

The model has the shape of Llama-2-70B and random weights. Each rank generates and quantizes its own slices (with double
quantization), one weight at a time. Training: LoRA with rank 8 on every layer except the head, 2 × 2048 tokens per
rank, activation checkpointing, offload. One JSON line: seconds, and peak GPU and host memory.

With `--nccl` the two ranks are nodes of their own to NCCL, which then accepts them on one GPU and talks over sockets.
The line has a floor: for each pass over the layers the slowest of what link, bus and products take alone, measured in
the same run on both ranks at once, and the ratio of the last step to it. `--in-flight` is how many layers are gathered
ahead of the one that computes; with several numbers the steps are repeated for each.
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
    from fullshard.models.host_weights import offload_embedding
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
    assert not offload_embedding(model)
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


def seconds_of(run: Any, count: int) -> float:
    """Seconds of one run on the device, of `count` in a row that all ranks start together."""
    import torch

    import fullshard.runtime as xr

    for repeats in (1, count):
        xr.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def floor(model: Any, shape: dict[str, int], tokens: int) -> dict[str, float]:
    """What a step takes at least if all that link, bus and products do runs side by side, in seconds."""
    import torch
    import torch.distributed as dist

    import fullshard.runtime as xr

    root, *layers = model._fullshard_engine.units
    link, device = model._fullshard_engine.context.gather_link, xr.device()
    moved = [p for p in layers[0].parameters if p.plan.gathers]
    whole = torch.empty(sum(p.plan.gathered_bytes for p in moved) // 2 * 2, dtype=torch.uint8, device=device)
    piece = torch.empty(whole.numel() // 2, dtype=torch.uint8, device=device)
    there = [torch.empty_like(p.local, device=device) for p in moved]
    h, f, kv = shape["hidden"], shape["intermediate"], shape["hidden"] // shape["heads"] * shape["kv"]
    sizes = [(h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f)]
    weights = [torch.randn(size, dtype=torch.bfloat16, device=device) for size in dict.fromkeys(sizes)]
    inputs = {n: torch.randn(tokens, n, dtype=torch.bfloat16, device=device) for n in (h, f, kv)}
    by_size = {tuple(w.shape): w for w in weights}

    def products(backward: bool) -> None:
        for size in sizes:
            inputs[size[1]] @ by_size[size].T
            if backward:
                inputs[size[0]] @ by_size[size]

    link_s = seconds_of(lambda: dist.all_gather_into_tensor(whole, piece, group=link.group), 4)
    bus_s = seconds_of(lambda: [t.copy_(p.local, non_blocking=True) for t, p in zip(there, moved, strict=True)], 4)
    forward_s, backward_s = (seconds_of(lambda back=back: products(back), 4) for back in (False, True))
    rest_s = link_s * sum(p.plan.gathered_bytes for p in root.parameters if p.plan.gathers) / whole.numel()
    passes = max(link_s, bus_s, forward_s) + max(link_s, bus_s, backward_s)
    return {
        "layer_gb": whole.numel() / 1e9, "link_s": link_s, "link_gb_s": piece.numel() / link_s / 1e9, "bus_s": bus_s,
        "bus_gb_s": sum(p.local.numel() * p.local.itemsize for p in moved) / bus_s / 1e9, "forward_s": forward_s,
        "backward_s": backward_s, "root_s": rest_s, "step_s": len(layers) * passes + rest_s,
    }  # fmt: skip


def rank_program(
    shape: dict[str, int], rows: int, length: int, steps: int, limit_gb: float, nccl: bool, in_flight: list[int]
) -> None:
    import numpy as np
    import torch

    import fullshard.runtime as xr
    import fullshard.spmd as xs
    from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
    from fullshard.lora import summary
    from fullshard.models.chunked_loss import ChunkedLossHead

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
    head = ChunkedLossHead(model)
    model = FSDPv2(
        model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision="bf16", cpu_offload=True,
        gathers_in_flight=in_flight[0],
    )  # fmt: skip
    start = time.perf_counter()
    fill(model)
    seconds: dict[str, Any] = {"fill": round(time.perf_counter() - start, 1), "steps": []}
    xr.print0(summary(model), f"filled in {seconds['fill']} s")
    held = sum(p.local.numel() * p.local.itemsize for u in model._fullshard_engine.units for p in u.parameters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(steps * len(in_flight)):
        model._fullshard_engine.settings.in_flight = in_flight[step // steps]
        start = time.perf_counter()
        ids = torch.randint(0, shape["vocabulary"], (rows, length), device=xr.device())
        with head.loss_pass(scale=1.0 / (rows * (length - 1))):
            loss = model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter() - start
        loss.backward()
        backward = time.perf_counter() - start - forward
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds["steps"].append(round(time.perf_counter() - start, 3))
        parts = f"forward {forward:.2f} s, backward {backward:.2f} s, all {seconds['steps'][-1]} s"
        xr.print0(f"step {step}: loss {losses[-1]:.4f}, {parts}")
    host.look()
    mine = {
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        "host_anonymous_gb": host.anonymous, "host_all_gb": host.total, "host_before_gb": before["RssAnon"],
        "shards_gb": held / 1e9,
    }  # fmt: skip
    allowed = {key: round(value, 4) for key, value in floor(model, shape, rows * length).items()} if nccl else {}
    if allowed:
        last = dict(zip(in_flight, seconds["steps"][steps - 1 :: steps], strict=True))
        ratios = {str(ahead): round(taken / allowed["step_s"], 3) for ahead, taken in last.items()}
        seconds |= {"floor": allowed, "of_floor_by_in_flight": ratios}
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
    parser.add_argument("--nccl", action="store_true", help="two ranks as two nodes, and the floor of a step")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1], help="layers gathered ahead")
    parser.add_argument("--rank", action="store_true", help="run as one of the ranks")
    options = parser.parse_args()
    shape = dict(TINY if options.tiny else SHAPE)
    shape["layers"] = options.layers or shape["layers"]
    length = min(options.length, 64) if options.tiny else options.length
    if options.rank:
        rank_program(
            shape, options.rows, length, options.steps, options.limit_gb, options.nccl and not options.tiny,
            options.in_flight,
        )  # fmt: skip
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
        if options.nccl:
            environment |= {
                "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        jobs.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank"], env=environment))
    return max(job.wait() for job in jobs)


if __name__ == "__main__":
    raise SystemExit(main())
