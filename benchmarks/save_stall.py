"""Measures how long a save blocks training: synchronous, asynchronous, and with torch's own methods; two Gloo ranks.

    python benchmarks/save_stall.py                 # 2.1 GB of weights, files in the current folder
    python benchmarks/save_stall.py --optimizer     # with Adam's moments: three times as much

Each method saves the same model several times in one job; reported are medians of the slower rank. For asynchronous
saves, this is the time until the call returns; the first one, which allocates buffers, is reported separately. `dcp` is
`torch.distributed.checkpoint.save` with its own storage (as in Accelerate's sharded saves), `dcp_async` its
`async_save`, and `gathered` gathers the full state on rank 0 and uses `torch.save` (as in Accelerate's full saves).
None of these computes checksums. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
RANKS, LAYERS, SHAPE = 2, 16, (4096, 8192)


def build() -> torch.nn.Module:
    """16 layers of 134 MB, sharded one by one so that no rank ever holds the model."""
    import fullshard.spmd as xs
    from fullshard import FSDPv2

    mesh = xs.get_1d_mesh("fsdp")
    layers = [FSDPv2(torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False), mesh) for _ in range(LAYERS)]
    return FSDPv2(torch.nn.Sequential(*layers), mesh)


def measure(rank: int, port: int, folder: str, rounds: int, with_optimizer: bool, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import fullshard.runtime as xr
    from fullshard import CheckpointManager

    xr.use_spmd(device="cpu")
    model = build()
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        state["optimizer"] = optimizer
    saved = sum(p._local_tensor.nbytes for p in model.parameters()) * RANKS * (3 if with_optimizer else 1)
    root, counter = Path(folder), iter(range(10_000))
    manager = CheckpointManager(root / "ours", 1)
    pending: list[Any] = []

    def tensors() -> dict[str, Any]:
        found = dict(model.state_dict())
        if with_optimizer:
            for i, own in enumerate(optimizer.state.values()):
                found |= {f"optimizer.{i}.{key}": value for key, value in own.items()}
        return found

    def gathered() -> None:
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors().items()}
        number = next(counter)
        if rank == 0:
            torch.save(whole, root / f"gathered-{number}.pt")
        dist.barrier()

    routes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "sync": (lambda: manager.save(next(counter), state), lambda: None),
        "async": (lambda: manager.save_async(next(counter), state), manager.join),
        "dcp": (lambda: dcp.save(tensors(), checkpoint_id=root / f"dcp-{next(counter)}"), lambda: None),
        "dcp_async": (
            lambda: pending.append(dcp.async_save(tensors(), checkpoint_id=root / f"dcp-{next(counter)}")),
            lambda: pending.pop().result(),
        ),
        "gathered": (gathered, lambda: None),
    }
    stalls: dict[str, list[float]] = {name: [] for name in routes}
    whole: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(rounds + 1):
        for name, (save, finish) in routes.items():
            os.sync() if rank == 0 else None
            dist.barrier()
            start = time.perf_counter()
            save()
            stall = time.perf_counter() - start
            finish()
            dist.barrier()
            times = torch.tensor([stall, time.perf_counter() - start])
            dist.all_reduce(times, dist.ReduceOp.MAX)
            stalls[name].append(times[0].item())
            whole[name].append(times[1].item())
            if rank == 0:
                for old in [*root.glob("dcp-*"), *root.glob("gathered-*"), *(root / "ours").glob("step-*")]:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
    checks = []
    for step in range(200):
        start = time.perf_counter()
        manager.reached_preemption(step)
        checks.append(time.perf_counter() - start)
    manager.close()
    if rank == 0:
        results.put({
            "saved_gb": round(saved / 1e9, 2),
            "stall_s": {name: round(statistics.median(values[1:]), 3) for name, values in stalls.items()},
            "until_published_s": {name: round(statistics.median(values[1:]), 3) for name, values in whole.items()},
            "first_stall_s": {name: round(values[0], 3) for name, values in stalls.items()},
            "preemption_check_us": round(statistics.median(checks) * 1e6),
        })  # fmt: skip
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", action="store_true", help="save Adam's moments too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=".", help="where to write; removed afterwards")
    options = parser.parse_args()
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="save-stall-", dir=options.directory) as folder:
        mp.spawn(measure, (port, folder, options.rounds, options.optimizer, results), nprocs=RANKS)
    found = results.get()
    stalls = found["stall_s"]
    ratio = stalls["async"] / stalls["sync"]
    line = {"benchmark": "save_stall", "torch": torch.__version__, **found}
    print(
        json.dumps(
            {
                **line,
                "async_over_sync": round(ratio, 4),
                "goal": 0.1,
                "sync_over_dcp": round(stalls["sync"] / stalls["dcp"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
