"""Compares the engine with torch's `fully_shard` (FSDP2) and `FullyShardedDataParallel` (FSDP1) on two Gloo ranks.

    python benchmarks/engine.py            # every case; `--quick` for the smallest, `--case NAME` for one

Each case runs the same Llama on the same data with every engine. The engines' steps alternate inside one job, so that
other load on the machine affects all of them equally. Reported are medians and their ratios, of wall-clock time and of
the CPU time of rank 0 (all threads), which is less sensitive to other load. Peak memory is measured in one job per
engine: bytes allocated by torch (from the profiler), and resident memory above that before the model was built. One
JSON line per case.

`gloo_collectives` is our engine with Gloo's all-gather and reduce-scatter instead of point-to-point messages; the
difference shows what the messages gain.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")

CASES: dict[str, dict[str, Any]] = {
    "tiny-full": {"hidden": 128, "layers": 4, "lora": False, "steps": 12},
    "small-full": {"hidden": 256, "layers": 6, "lora": False, "steps": 9},
    "small-lora": {"hidden": 256, "layers": 6, "lora": True, "steps": 9},
    "medium-full": {"hidden": 512, "layers": 6, "lora": False, "steps": 7},
    "medium-lora": {"hidden": 512, "layers": 6, "lora": True, "steps": 7},
    "large-full": {"hidden": 768, "layers": 6, "lora": False, "steps": 5},
}
ENGINES = ("ours", "gloo_collectives", "fully_shard", "fsdp1")
RANKS, ROWS, LENGTH, VOCABULARY = 2, 1, 64, 4096


def build(case: dict[str, Any]) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden = case["hidden"]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=case["layers"],
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=128,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if case["lora"]:  # about 2 % trains, spread over every layer
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("k_proj" in name or "norm" in name)
    return model


def wrap(engine: str, model: torch.nn.Module) -> torch.nn.Module:
    layers = list(model.model.layers)
    if engine in ("ours", "gloo_collectives"):
        import numpy as np

        import fullshard.spmd as xs
        from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

        mesh = xs.Mesh(np.arange(RANKS), (RANKS,), ("fsdp",))
        model = FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy)
        if engine == "gloo_collectives":
            _use_gloo_collectives(model)
        return model
    if engine == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}), use_orig_params=True, device_id=torch.device("cpu")
    )


def _use_gloo_collectives(model: Any) -> None:
    """Replace the point-to-point routes of a wrapped model's links by Gloo's collectives."""
    from fullshard.fsdp import comm
    from fullshard.fsdp.point_to_point import PointToPoint

    class GlooCollectives(PointToPoint):
        def gather(self, pairs: Any, unit: int) -> comm.Pending:
            works = [comm._all_gather(w.view(-1), p.view(-1), group=self.group, async_op=True) for w, p in pairs]
            return comm.Pending(works, self, keep=pairs)

        def scatter_sum(self, wholes: Any, average: bool, unit: int) -> comm.Pending:
            pieces = [w.new_empty(w.numel() // self.size) for w in wholes]
            works = [
                comm._reduce_scatter(p, w.view(-1), group=self.group, async_op=True)
                for p, w in zip(pieces, wholes, strict=True)
            ]
            return comm.Pending(works, self, lambda: [p.div_(self.size) for p in pieces], keep=wholes)

    context = model._fullshard_engine.context
    for name in ("gather_link", "reduce_link"):
        old = getattr(context, name)
        setattr(context, name, GlooCollectives(old.group, old.watch, old.device, old.meter))


class Job:
    """One engine's model, optimizer and data."""

    def __init__(self, engine: str, case: dict[str, Any]):
        self.model = wrap(engine, build(case))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)

    def step(self) -> float:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def time_job(rank: int, case: dict[str, Any], port: int, results: Any) -> None:
    _join(rank, port)
    jobs = {engine: Job(engine, case) for engine in ENGINES}
    losses = {engine: [job.step() for _ in range(2)] for engine, job in jobs.items()}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    worked: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    meter = jobs["ours"].model.meter
    meter.reset()
    for _ in range(case["steps"]):
        for engine, job in jobs.items():
            gc.disable()
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            job.step()
            worked[engine].append(time.process_time() - busy)
            dist.barrier()
            times[engine].append(time.perf_counter() - start)
            gc.enable()
    if rank == 0:
        steps = case["steps"]
        wanted = (meter.bytes_gathered + meter.bytes_reduced) // steps
        results.put(
            {
                "seconds": {e: round(statistics.median(t), 4) for e, t in times.items()},
                "cpu_seconds": {e: round(statistics.median(t), 4) for e, t in worked.items()},
                "losses": {e: round(values[-1], 5) for e, values in losses.items()},
                "bytes_requested_per_step": wanted,
                "bytes_sent_per_rank_and_step": meter.bytes_sent // steps,
                # At n ranks Gloo's gather sends what ours does, its reduce-scatter as much as an all-reduce.
                "bytes_sent_with_gloo_collectives": (
                    meter.bytes_gathered * (RANKS - 1) // RANKS + meter.bytes_reduced * 2 * (RANKS - 1) // RANKS
                )
                // steps,
                "parameters": sum(p.numel() for p in jobs["ours"].model.parameters()),
            }
        )


def memory_job(rank: int, case: dict[str, Any], port: int, results: Any, engine: str) -> None:
    _join(rank, port)
    from transformers import LlamaForCausalLM  # noqa: F401 - part of the baseline

    gc.collect()
    before = _resident()
    job = Job(engine, case)
    for _ in range(2):
        job.step()
    gc.collect()
    alive = _alive_bytes(job)
    Path("/proc/self/clear_refs").write_text("5")
    job.step()
    resident = _resident(peak=True) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        job.step()
    running = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            running += event.nbytes()
            peak = max(peak, running)
    if rank == 0:
        results.put({"tracked": alive + peak, "at_rest": alive, "resident": resident})


def _alive_bytes(job: Job) -> int:
    """Bytes of the tensors that exist between steps: shards and optimizer state, and what an engine keeps besides."""
    storages = {}
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
                local = thing._local_tensor if hasattr(thing, "_local_tensor") else thing
                storage = local.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        except (RuntimeError, NotImplementedError, ReferenceError):
            continue
    return sum(storages.values())


def _resident(peak: bool = False) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM" if peak else "VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def _join(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    import fullshard.runtime as xr

    xr.use_spmd(device="cpu")


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run(job: Any, *args: Any) -> dict[str, Any]:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(job, args=(args[0], _free_port(), results, *args[1:]), nprocs=RANKS)
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    chosen = [options.case] if options.case else ["tiny-full"] if options.quick else list(CASES)
    for name in chosen:
        case = CASES[name]
        timed = _run(time_job, case)
        memory = {e: _run(memory_job, case, e) for e in ENGINES if e != "gloo_collectives"}
        seconds = timed["seconds"]
        line = {
            "case": name,
            "torch": torch.__version__,
            "time_ratio_to_fully_shard": round(seconds["ours"] / seconds["fully_shard"], 3),
            "cpu_ratio_to_fully_shard": round(timed["cpu_seconds"]["ours"] / timed["cpu_seconds"]["fully_shard"], 3),
            "time_ratio_to_fsdp1": round(seconds["ours"] / seconds["fsdp1"], 3),
            "time_ratio_without_point_to_point": round(seconds["gloo_collectives"] / seconds["fully_shard"], 3),
            "tracked_ratio_to_fully_shard": round(memory["ours"]["tracked"] / memory["fully_shard"]["tracked"], 3),
            "tracked_ratio_to_fsdp1": round(memory["ours"]["tracked"] / memory["fsdp1"]["tracked"], 3),
            "resident_ratio_to_fully_shard": round(memory["ours"]["resident"] / memory["fully_shard"]["resident"], 3),
            **timed,
            "memory_mb": {e: {k: round(v / 1e6, 1) for k, v in m.items()} for e, m in memory.items()},
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
