"""Compares 4-bit weights on one GPU with bitsandbytes.

    python benchmarks/qlora_gpu.py             # `--quick` for the checks and fewer shapes

1. The kernels must equal the CPU reference bit for bit, for every type, block size and odd shape (else exit status 1).
2. Dequantization compared with a copy of the same size and with bitsandbytes; quantization with bitsandbytes.
3. Forward and backward of `NF4Linear` compared with bitsandbytes' `Linear4bit`: time, and memory above the weights.
4. Two ranks share the GPU with Gloo: the losses of a QLoRA run must match one device, with and without offload.

One JSON line per case and a table at the end. bitsandbytes is skipped if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from fullshard.quant import blocks, nf4  # noqa: E402
from fullshard.quant.linear import NF4Linear  # noqa: E402
from fullshard.quant.sharded_groups import Scheme, dense, quantize_shard  # noqa: E402

try:
    import bitsandbytes as bnb
    import bitsandbytes.functional as bnbf
except ImportError:
    bnb = None

SHAPES = {
    "7B attention": (4096, 4096),
    "7B mlp": (11008, 4096),
    "70B key": (1024, 8192),
    "70B attention": (8192, 8192),
    "70B mlp": (28672, 8192),
}
TOKENS = 4096
CACHE_TWICE = 200 << 20
"""Bytes, more than any cache holds."""


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8).cpu()


def check() -> dict[str, Any]:
    """Compare the kernels with the CPU, and count where bitsandbytes' own CUDA kernels differ from either."""
    cases = wrong = usual = other_cases = 0
    torch.manual_seed(0)
    for shape in [(64, 64), (1000, 333), (129,), (1, 1), (7, 9), (4096, 320), (3, 5, 7), (2048, 2048)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            w = (torch.randn(shape) * 0.02).to(dtype)
            zeros = 1000 < w.numel() < 1 << 20
            if zeros:
                w.view(-1)[:200] = 0
            for kind in ("nf4", "fp4"):
                for blocksize in (32, 64, 256, 4096):
                    for double in (False, True):
                        options = {"quant_type": kind, "blocksize": blocksize, "compress_statistics": double}
                        packed, state = nf4.quantize_4bit(w, **options)
                        got, held = nf4.quantize_4bit(w.cuda(), **options)
                        same = torch.equal(bits(packed), bits(got)) and torch.equal(
                            bits(state.absmax), bits(held.absmax)
                        )
                        if double:
                            same &= torch.equal(bits(state.nested.absmax), bits(held.nested.absmax))
                            same &= torch.equal(bits(state.offset), bits(held.offset))
                        for out in (torch.float32, torch.bfloat16, torch.float16):
                            one = nf4.dequantize_4bit(packed, state, out)
                            other = nf4.dequantize_4bit(got, held, out)
                            same &= torch.equal(bits(one), bits(other))
                            scheme = Scheme(kind, blocksize, double)
                            parts = quantize_shard(w.cuda().view(-1), w.numel(), scheme)
                            same &= torch.equal(bits(one), bits(dense(parts, tuple(shape), scheme, out)))
                        cases += 1
                        wrong += not same
                        if not same:
                            print("differs from the CPU:", shape, dtype, options, flush=True)
                        if bnb is not None and not double:
                            other, _ = bnbf.quantize_4bit(w.cuda(), blocksize=blocksize, quant_type=kind)
                            differs = not torch.equal(bits(other), bits(packed))
                            if kind == "nf4" and w.numel() % blocksize == 0 and not zeros:
                                usual += differs
                            else:
                                other_cases += differs
    odd = torch.randn(4, 64)
    odd[0, 3], odd[1, 5], odd[2, 6] = float("nan"), float("inf"), -float("inf")
    on_cpu, on_gpu = nf4.quantize_4bit(odd), nf4.quantize_4bit(odd.cuda())
    wrong += not (
        torch.equal(bits(on_cpu[0]), bits(on_gpu[0])) and torch.equal(bits(on_cpu[1].absmax), bits(on_gpu[1].absmax))
    )
    return {
        "case": "bits", "cases": cases + 1, "differ_from_cpu": wrong,
        "bitsandbytes_cuda_differs_nf4_whole_blocks": usual,
        "bitsandbytes_cuda_differs_fp4_short_or_zero_blocks": other_cases,
    }  # fmt: skip


def milliseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """The median time of one run on the GPU alone, replayed as a graph, so that the host has no part in it.

    Each run has data of its own, together more than the cache holds; what they return is kept.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for run in runs:
            kept.append(run())
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(runs))
    return statistics.median(times[2:])


def host_microseconds(run: Callable[[], Any], count: int = 300) -> float:
    """How long the host is busy with one run, while the GPU is not waited for."""
    for _ in range(30):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / count * 1e6


def speed(name: str, shape: tuple[int, int], double: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    scheme = Scheme(double=double)
    moved = sum(a * b for a, b in scheme.shapes(shape[0] * shape[1]).values()) + 2 * shape[0] * shape[1]
    sets = max(2, -(-CACHE_TWICE // moved))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    held = [quantize_shard(w.view(-1), w.numel(), scheme) for w in weights]
    # Whole pages, since a copy of an odd number of bytes is slower than it need be.
    sources = [torch.randint(0, 255, (moved // 8192, 4096), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    ours = milliseconds([partial(dense, parts, shape, scheme, torch.bfloat16) for parts in held])
    copy = milliseconds([source.clone for source in sources])
    line = {
        "case": "dequantise", "layer": name, "double": double, "ms": round(ours, 4), "copy_ms": round(copy, 4),
        "tb_per_s": round(moved / ours / 1e9, 3), "of_copy_bandwidth": round(copy / ours, 3),
        "quantise_ms": round(milliseconds([partial(blocks.quantize, w.view(-1), 64, "nf4") for w in weights]), 4),
    }  # fmt: skip
    if bnb is not None:
        theirs = [bnbf.quantize_4bit(w, quant_type="nf4", compress_statistics=double) for w in weights]
        taken = milliseconds([partial(bnbf.dequantize_4bit, packed, state) for packed, state in theirs])
        line |= {"bitsandbytes_ms": round(taken, 4), "times_as_fast": round(taken / ours, 3)}
    return line


def peak_of(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def layer(name: str, shape: tuple[int, int], tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, shape[0], device="cuda", dtype=torch.bfloat16)
    ours = NF4Linear.of(linear, Scheme(double=True), compute_dtype=torch.bfloat16)
    line: dict[str, Any] = {"case": "linear", "layer": name, "tokens": tokens}
    runs: dict[str, nn.Module] = {"ours": ours}
    if bnb is not None:
        their = bnb.nn.Linear4bit(
            shape[1], shape[0], bias=False, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4"
        )
        weight = linear.weight.detach().cpu()
        their.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
        runs["bitsandbytes"] = their.cuda()
        out, other = ours(x).detach().float(), their(x).detach().float()
        line["relative_difference"] = ((out - other).norm() / other.norm()).item()
        del out, other
    linear.requires_grad_(False)
    runs["dense"] = linear
    for who, module in runs.items():

        def step(module: nn.Module = module) -> Any:
            return torch.autograd.grad(module(x), x, grad)

        line[f"{who}_ms"] = round(milliseconds([step] * 4), 4)
        line[f"{who}_mb"] = round(peak_of(step), 1)
        line[f"{who}_host_us"] = round(host_microseconds(partial(module, x)), 1)
    if bnb is not None:
        line["times_as_fast"] = round(line["bitsandbytes_ms"] / line["ours_ms"], 3)
        line["memory_ratio"] = round(line["ours_mb"] / line["bitsandbytes_mb"], 3)
    return line


def two_ranks(offload: bool) -> None:
    """One of two ranks on one GPU: train a small QLoRA model sharded and alone, print the largest difference."""
    import numpy as np
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import fullshard.runtime as xr
    import fullshard.spmd as xs
    from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
    from fullshard.quant.quantize import quantize_model

    xr.use_spmd(device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    config = LlamaConfig(
        vocab_size=515, hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)

    def train(sharded: bool) -> list[float]:
        torch.manual_seed(0)
        model = get_peft_model(quantize_model(LlamaForCausalLM(config), Scheme(double=True)), lora)
        if sharded:
            mesh = xs.Mesh(np.arange(2), (2,), ("fsdp",))
            model = FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, cpu_offload=offload)
        else:
            model = model.cuda()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses = []
        for step in range(10):
            ids = torch.randint(0, 515, (4, 32), generator=torch.Generator().manual_seed(step)).cuda()
            rows = ids.chunk(2)[xr.rank()] if sharded else ids
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            both: list[Any] = [None, None]
            torch.distributed.all_gather_object(both, loss.item())
            losses.append(sum(both) / 2)
        return losses

    expected, losses = train(False), train(True)
    if xr.rank() == 0:
        off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(json.dumps({"loss_difference": off, "first": losses[0], "last": losses[-1]}), flush=True)


def run_two_ranks(offload: bool) -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jobs = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, __file__, "--two-ranks", str(int(offload))]
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    out, _ = jobs[0].communicate(timeout=240)
    jobs[1].wait(60)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {"loss_difference": float("inf")}
    matches = found["loss_difference"] < 1e-5 and all(job.returncode == 0 for job in jobs)
    return {"case": "two ranks", "layer": "offload" if offload else "device", "matches_one_device": matches, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="bits,dequantise,linear,ranks", help="parts to run, with commas")
    parser.add_argument("--two-ranks", metavar="OFFLOAD")
    options = parser.parse_args()
    if options.two_ranks:
        two_ranks(options.two_ranks == "1")
        return 0
    about = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "bitsandbytes": getattr(bnb, "__version__", None),
    }
    shapes = dict(list(SHAPES.items())[-1:]) if options.quick else SHAPES
    cases: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "bits": [check],
        "dequantise": [
            partial(speed, name, shape, double) for name, shape in shapes.items() for double in (False, True)
        ],
        "linear": [partial(layer, name, shape, tokens) for name, shape in shapes.items() for tokens in (TOKENS, 512)],
        "ranks": [partial(run_two_ranks, offload) for offload in (False, True)],
    }
    lines = []
    for part in options.only.split(","):
        for case in cases[part]:
            lines.append(case())
            print(json.dumps({**lines[-1], **about}), flush=True)
            torch.cuda.empty_cache()
    print()
    for line in lines:
        kind = line.get("tokens", {True: "double", False: "single", None: ""}[line.get("double")])
        shown = {k: v for k, v in line.items() if k not in ("case", "layer", "tokens", "double")}
        label = f"{line['case']:<11}{line.get('layer', ''):<15}{kind!s:<7}"
        print(label, " ".join(f"{k}={v:.4g}" for k, v in shown.items()))
    return 0 if all(line.get("matches_one_device", True) and not line.get("differ_from_cpu") for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
