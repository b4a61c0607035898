"""The engine on one GPU.

    python benchmarks/engine_gpu.py            # `--quick` for a smaller model and fewer steps

1. World size 1: step time and peak memory of the same Llama unwrapped, with our engine, and with torch's `fully_shard`.
   In pure bf16, where wrapping should cost nothing, and in mixed precision with fp32 master weights.
2. Two ranks share the GPU with Gloo: losses and parameters must match one device, with and without offload.

One JSON line per case; the exit status is nonzero if part 2 did not match.
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
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

FULL = {"hidden": 2048, "layers": 12, "rows": 4, "length": 1024, "steps": 12}
QUICK = {"hidden": 1024, "layers": 8, "rows": 4, "length": 512, "steps": 8}


def build(size: dict[str, int], dtype: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=size["hidden"], intermediate_size=size["hidden"] * 11 // 4,
        num_hidden_layers=size["layers"], num_attention_heads=size["hidden"] // 64,
        num_key_value_heads=size["hidden"] // 256, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(dtype)


def wrap(engine: str, model: Any, mixed: bool) -> Any:
    import torch

    if engine == "unwrapped":
        return model
    if engine == "ours":
        import numpy as np

        import fullshard.spmd as xs
        from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

        mesh = xs.Mesh(np.arange(1), (1,), ("fsdp",))
        precision = "bf16" if mixed else None
        return FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision=precision)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh("cuda", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def measure(engine: str, mixed: bool, size: dict[str, int]) -> dict[str, float]:
    """Median step time and peak memory of one engine in this process."""
    import torch

    import fullshard.runtime as xr

    xr.use_spmd(device="cuda")
    model = wrap(engine, build(size, torch.float32 if mixed else torch.bfloat16), mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 32000, (size["rows"], size["length"]), device="cuda")
    times = []
    for step in range(size["steps"]):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=mixed and engine == "unwrapped")
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(times[3:]),
        "peak_mb": torch.cuda.max_memory_allocated() / 1e6,
        "loss": loss.item(),
    }


def two_ranks(offload: bool) -> None:
    """One of two ranks on one GPU: train, compare with one device, print the largest difference."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fullshard.runtime as xr
    import fullshard.spmd as xs
    from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

    xr.use_spmd(device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    config = LlamaConfig(
        vocab_size=515, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip

    def train(sharded: bool) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if sharded:
            mesh = xs.Mesh(np.arange(2), (2,), ("fsdp",))
            model = FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, cpu_offload=offload)
        else:
            model = model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(3):
            ids = torch.randint(0, 515, (4, 32), generator=torch.Generator().manual_seed(step)).cuda()
            rows = ids.chunk(2)[xr.rank()] if sharded else ids
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            norm = model.clip_grad_norm_(1.0) if sharded else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.isfinite(norm)
            optimizer.step()
            optimizer.zero_grad()
            both = [None, None]
            torch.distributed.all_gather_object(both, loss.item())
            losses.append(sum(both) / 2)  # type: ignore[arg-type]
        values = model.full_state_dict() if sharded else model.state_dict()
        return losses, {name: value.float().cpu() for name, value in values.items()}

    expected, reference = train(False)
    losses, values = train(True)
    if xr.rank() == 0:
        far = max((values[n] - v).abs().max().item() for n, v in reference.items())
        off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(json.dumps({"loss_difference": off, "parameter_difference": far, "losses": losses}), flush=True)


def _child(*arguments: str, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _answer(job: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = job.communicate(timeout=500)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert job.returncode == 0 and lines, f"a child failed with exit code {job.returncode}: {out[-2000:]}"
    return json.loads(lines[-1])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE", "MIXED"))
    parser.add_argument("--two-ranks", metavar="OFFLOAD")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.measure:
        print(json.dumps(measure(options.measure[0], options.measure[1] == "1", size)), flush=True)
        return 0
    if options.two_ranks:
        two_ranks(options.two_ranks == "1")
        return 0

    import torch

    about = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    flag = ["--quick"] if options.quick else []
    for mixed in ("0", "1"):
        got = {e: [] for e in ("unwrapped", "ours", "fully_shard")}  # type: ignore[var-annotated]
        for _ in range(2):  # the engines take turns
            for engine in got:
                got[engine].append(_answer(_child("--measure", engine, mixed, *flag, port=_free_port())))
        best = {e: min(r["seconds"] for r in runs) for e, runs in got.items()}
        peak = {e: runs[0]["peak_mb"] for e, runs in got.items()}
        line = {
            "case": "world size 1, " + ("mixed precision" if mixed == "1" else "bf16"),
            "time_ratio_to_unwrapped": round(best["ours"] / best["unwrapped"], 4),
            "time_ratio_to_fully_shard": round(best["ours"] / best["fully_shard"], 4),
            "memory_ratio_to_unwrapped": round(peak["ours"] / peak["unwrapped"], 4),
            "memory_ratio_to_fully_shard": round(peak["ours"] / peak["fully_shard"], 4),
            "seconds": {e: round(s, 5) for e, s in best.items()},
            "peak_mb": {e: round(p, 1) for e, p in peak.items()},
            "losses": {e: runs[0]["loss"] for e, runs in got.items()},
        }
        print(json.dumps({**line, **about}), flush=True)
    matched = True
    for offload in ("0", "1"):
        port = _free_port()
        jobs = [_child("--two-ranks", offload, rank=rank, world=2, port=port) for rank in range(2)]
        found = _answer(jobs[0])
        jobs[1].wait(60)
        ok = found["loss_difference"] < 1e-5 and found["parameter_difference"] < 1e-4
        matched &= ok
        name = "two ranks on one GPU" + (", offload" if offload == "1" else "")
        print(json.dumps({"case": name, "matches_one_device": ok, **found, **about}), flush=True)
    return 0 if matched else 1


if __name__ == "__main__":
    raise SystemExit(main())
