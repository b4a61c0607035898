"""Planned against measured memory: `fullshard plan`'s peak beside the peak of the same run.

    python benchmarks/plan_accuracy.py                    # CPU ranks, every byte that torch allocates is counted
    python benchmarks/plan_accuracy.py --only "2 ranks"   # settings whose names contain this
    python benchmarks/plan_accuracy.py --gpu              # one GPU: torch.cuda.max_memory_allocated, models up to 8B

Plans are made from a config.json; runs train three steps with `fullshard.SFTTrainer` from files with random weights.
The table has the peak of a step: planned, measured, their ratio, and a mark where they differ by more than 3 %. With
`--gpu` two ranks are nodes of their own to NCCL, which then accepts them on one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, whose names are no modules' names
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import sft_files  # noqa: E402
from benchmarks.sft_files import SHAPES  # noqa: E402
from fullshard.errors import CapacityError  # noqa: E402
from tests.capacity.measured_run import MOMENTS, Setting, compare, measure, plan, released, write_model  # noqa: E402

ALLOWED = 0.03
FREE: dict[str, Any] = {"gradient_checkpointing": False}
BF16 = {"bf16": True}
LORA = {"use_peft_lora": True, "lora_r": 8, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
IN_BF16 = {**BF16, "torch_dtype": "bfloat16"}
NF4 = {**LORA, **IN_BF16, "use_4bit_quantization": True, "use_nested_quant": True}
DEEP = {"num_hidden_layers": 8}


def _engine(strategy: str, **more: Any) -> dict[str, Any]:
    return {"sharding_strategy": strategy, **more}


ON_CPUS = [
    Setting("full, fp32, no checkpointing", train=FREE),
    Setting("full, fp32, checkpointing"),
    Setting("full, bf16, checkpointing", train=BF16),
    Setting("LoRA, bf16, no checkpointing", sizes=DEEP, train={**FREE, **LORA, **IN_BF16}),
    Setting("LoRA with dropout, bf16, checkpointing", sizes=DEEP, train={**LORA, **IN_BF16, "lora_dropout": 0.1}),
    Setting("QLoRA, no checkpointing", sizes=DEEP, train={**FREE, **NF4}),
    Setting("QLoRA, checkpointing", sizes=DEEP, train=NF4),
    Setting("packed, bf16, no checkpointing", train={**FREE, **BF16, "packing": True}),
    Setting("full logits, accumulation", train={**FREE, "chunked_loss": False, "gradient_accumulation_steps": 2}),
    Setting("Qwen2, AdamW not fused", architecture="qwen2", train={**FREE, **BF16, "optim": "adamw_torch"}),
    Setting("GPT-2, bf16, checkpointing", architecture="gpt2", train=BF16),
    Setting("Mixtral, bf16", architecture="mixtral", train={**FREE, **BF16},
            sizes={"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}),
    Setting("Gemma 2, bf16", architecture="gemma2", train={**FREE, **BF16}, sizes={"head_dim": 32}),
    Setting("FULL_SHARD, 2 ranks, bf16", 2, train={**FREE, **BF16}),
    Setting("FULL_SHARD, 2 ranks, checkpointing, no_sync", 2,
            train={**BF16, "gradient_accumulation_steps": 2, "sync_each_batch": False}),
    Setting("SHARD_GRAD_OP, 2 ranks, bf16", 2, train={**FREE, **BF16}, engine=_engine("SHARD_GRAD_OP")),
    Setting("NO_SHARD, 2 ranks, fp32", 2, train=FREE, engine=_engine("NO_SHARD")),
    Setting("offload, 2 ranks, bf16", 2, train=BF16, engine=_engine("FULL_SHARD", offload_params=True)),
    Setting("QLoRA, 2 ranks", 2, sizes=DEEP, train=NF4),
    Setting("one unit, 2 ranks, fp32", 2, engine=_engine("FULL_SHARD", auto_wrap_policy="NO_WRAP")),
    Setting("BACKWARD_POST, no forward prefetch, 2 ranks", 2, train=BF16,
            engine=_engine("FULL_SHARD", backward_prefetch="BACKWARD_POST", forward_prefetch=False)),
    Setting("FULL_SHARD, 4 ranks, bf16", 4, train={**FREE, **BF16}),
    Setting("HYBRID_SHARD, 2 × 2 ranks, bf16", 4, train={**FREE, **BF16},
            engine=_engine("HYBRID_SHARD", dp_replicate_size=2)),
    Setting("HYBRID_SHARD_ZERO2, 2 × 2 ranks, LoRA", 4, sizes=DEEP, train={**FREE, **LORA, **IN_BF16},
            engine=_engine("HYBRID_SHARD_ZERO2", dp_replicate_size=2)),
]  # fmt: skip


def _gpu(
    name: str, shape: str, layers: int, ranks: int = 1, rows: int = 4, length: int = 2048, **train: Any
) -> Setting:
    engine, steps = train.pop("engine", {}), train.pop("steps", 3)
    sizes = {**SHAPES[shape], "num_hidden_layers": layers}
    return Setting(name, ranks, "llama", sizes, train, engine, rows, length, steps, "cuda")


MASTERS = {**BF16, "torch_dtype": "float32"}
ON_GPU = [
    _gpu("8B LoRA, checkpointing", "8b", 32, **LORA, **IN_BF16),
    _gpu("8B LoRA, no checkpointing", "8b", 32, **FREE, **LORA, **IN_BF16),
    _gpu("8B LoRA, budget 24GiB", "8b", 32, gradient_checkpointing="24GiB", steps=9, **LORA, **IN_BF16),
    _gpu("8B QLoRA, checkpointing", "8b", 32, **NF4),
    _gpu("8B QLoRA, inputs on the host", "8b", 32, activation_offloading=True, **NF4),
    _gpu("8 layers LoRA, compiled", "8b", 8, **FREE, **LORA, **IN_BF16, torch_compile=True),
    _gpu("8 layers LoRA, dropout", "8b", 8, **FREE, **{**LORA, "lora_dropout": 0.1}, **IN_BF16),
    _gpu("8 layers QLoRA, no checkpointing", "8b", 8, **FREE, **NF4),
    _gpu("8 layers fp8", "8b", 8, **FREE, **LORA, **IN_BF16, base_dtype="fp8"),
    _gpu("1B full, no checkpointing", "1b", 16, **FREE, **MASTERS),
    _gpu("1B full, checkpointing", "1b", 16, **MASTERS),
    _gpu("1B full, packed", "1b", 16, **FREE, **MASTERS, packing=True),
    _gpu("1B full, offload", "1b", 16, **MASTERS, engine=_engine("FULL_SHARD", offload_params=True)),
    _gpu("1B full, AdamW not fused, accumulation", "1b", 16, **MASTERS, optim="adamw_torch",
         gradient_accumulation_steps=2),
    _gpu("1B full, 2 ranks", "1b", 16, 2, rows=2, **MASTERS),
    _gpu("1B full, SHARD_GRAD_OP, 2 ranks", "1b", 16, 2, rows=2, **FREE, **MASTERS, engine=_engine("SHARD_GRAD_OP")),
    _gpu("8 layers QLoRA, 2 ranks", "8b", 8, 2, rows=2, **NF4),
    _gpu("8 layers QLoRA, offload, 2 ranks", "8b", 8, 2, rows=2, **NF4,
         engine=_engine("FULL_SHARD", offload_params=True)),
]  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


def run_ranks(settings: list[Setting], models: dict[str, Path], folder: Path, timeout: float) -> dict[str, Any]:
    """Measure settings with the same number of ranks in one set of processes; peaks of the first rank by name."""
    jobs = folder / f"jobs-{settings[0].ranks}.json"
    found = folder / f"found-{settings[0].ranks}.jsonl"
    listed = [{"setting": dataclasses.asdict(s), "model": str(models[s.name])} for s in settings]
    jobs.write_text(json.dumps(listed))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--jobs", str(jobs), "--found", str(found)]
    processes = []
    for rank in range(settings[0].ranks):
        log = (folder / f"log-{settings[0].ranks}-{rank}.txt").open("w")
        env = {**os.environ, "PYTHONPATH": str(ROOT), **_environment(settings[0], rank, port)}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
    until = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{settings[0].ranks} ranks: no result within {timeout:.0f} s", flush=True)
    finally:
        for process in processes:
            process.kill()
    lines = found.read_text().splitlines() if found.exists() else []
    results = {line["name"]: line for line in map(json.loads, lines)}
    for setting in settings:
        if setting.name not in results:
            text = (folder / f"log-{setting.ranks}-0.txt").read_text()
            print(f"--- {setting.name}: not measured\n{text[-2000:]}", flush=True)
            break
    return results


def _environment(setting: Setting, rank: int, port: str) -> dict[str, str]:
    if setting.ranks == 1:
        return {}
    ranks = str(setting.ranks)
    common = {"RANK": str(rank), "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if setting.device == "cpu":
        return {**common, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}
    return {
        **common, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def measure_jobs(jobs: Path, found: Path) -> None:
    """What a rank does: measure one setting after the other."""
    from fullshard import runtime

    for job in json.loads(jobs.read_text()):
        setting = Setting(**job["setting"])
        began = time.monotonic()
        with released():
            tracker = measure(setting, Path(job["model"]), jobs.parent / f"run-{setting.ranks}")
        if runtime.rank() == 0:
            line = {"name": setting.name, "peaks": tracker.peaks, "seconds": time.monotonic() - began}
            with found.open("a") as file:
                file.write(json.dumps(line) + "\n")
        del tracker


def write_models(settings: list[Setting], folder: Path, weights: bool) -> dict[str, Path]:
    """The folders with the models, by name of setting; for a plan, config.json is enough."""
    known: dict[str, Path] = {}
    for setting in settings:
        key = json.dumps([setting.architecture, setting.sizes])
        if key not in known:
            known[key] = folder / f"model-{len(known)}"
            if setting.device == "cpu":
                write_model(setting, known[key])
            elif not weights:
                known[key].mkdir()
                (known[key] / "config.json").write_text(json.dumps(sft_files.config(setting.sizes)))
            else:
                shape = next(n for n, s in SHAPES.items() if s["hidden_size"] == setting.sizes["hidden_size"])
                words = [str(known[key]), shape, str(setting.sizes["num_hidden_layers"])]
                subprocess.run([sys.executable, "-m", "benchmarks.sft_files", *words], cwd=ROOT, check=True)
    return {s.name: known[json.dumps([s.architecture, s.sizes])] for s in settings}


# --- the table --------------------------------------------------------------------------------------------------------


def planned_peaks(setting: Setting, model: Path, folder: Path) -> dict[str, Any]:
    import torch

    on_gpu = setting.device != "cpu"
    memory = torch.cuda.mem_get_info()[1] if on_gpu and torch.cuda.is_available() else None
    began, estimate = time.perf_counter(), None
    try:
        _, estimate = plan(setting, model, folder, setting.ranks if on_gpu else 1, memory)
    except CapacityError as error:
        print(f"{setting.name}: not planned: {error}", flush=True)
    return {"estimate": estimate, "seconds": time.perf_counter() - began}


def line_of(setting: Setting, planned: dict[str, Any], measured: dict[str, Any] | None, moments: bool) -> float | None:
    """Print a line; returns the ratio."""
    estimate = planned["estimate"]
    if estimate is None:
        print(f"| {setting.name} | not planned | | | |")
        return None
    peak = max(sum(estimate.moments[moment].values()) for moment in MOMENTS)
    if measured is None:
        print(f"| {setting.name} | {peak / 2**20:,.1f} | not measured | | |")
        return None
    there = max(measured["peaks"].get(moment, 0) for moment in MOMENTS)
    ratio = peak / there
    mark = "" if abs(ratio - 1) <= ALLOWED else f"more than {ALLOWED:.0%}"
    print(f"| {setting.name} | {peak / 2**20:,.2f} | {there / 2**20:,.2f} | {ratio:.4f} | {mark} |")
    if moments:
        for name, (a, b) in {"load": _load(estimate, measured), **compare(estimate, measured["peaks"])}.items():
            print(
                f"|   {name} | {a / 2**20:,.2f} | {b / 2**20:,.2f} | {a / max(b, 1):.4f} | {estimate.moments[name]} |"
            )
    return ratio


def _load(estimate: Any, measured: dict[str, Any]) -> tuple[int, int]:
    return sum(estimate.moments["load"].values()), measured["peaks"]["load"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on one GPU instead of CPU ranks")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of settings")
    parser.add_argument("--moments", action="store_true", help="every moment of a step, with the parts planned for it")
    parser.add_argument("--plan-only", action="store_true", help="do not measure")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for the settings of one number of ranks")
    parser.add_argument("--folder", default=None, help="where models are written")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        measure_jobs(options.jobs, options.found)
        sys.stdout.flush()
        os._exit(0)  # without waiting for the libraries to take themselves down
    chosen = [
        s for s in (ON_GPU if options.gpu else ON_CPUS) if not options.only or any(o in s.name for o in options.only)
    ]
    shared = Path("/dev/shm") if options.gpu and Path("/dev/shm").exists() else None
    folder = Path(tempfile.mkdtemp(dir=options.folder or shared))
    try:
        models = write_models(chosen, folder, not options.plan_only)
        planned = {s.name: planned_peaks(s, models[s.name], folder) for s in chosen}
        measured: dict[str, Any] = {}
        for ranks in [] if options.plan_only else sorted({s.ranks for s in chosen}):
            same = [s for s in chosen if s.ranks == ranks]
            measured |= run_ranks(same, models, folder, options.timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n| setting | planned MiB | measured MiB | ratio | |\n|---|---|---|---|---|")
    ratios = [line_of(s, planned[s.name], measured.get(s.name), options.moments) for s in chosen]
    known = [ratio for ratio in ratios if ratio is not None]
    summary = {
        "settings": len(chosen), "measured": len(known), "within": sum(abs(r - 1) <= ALLOWED for r in known),
        "lowest": min(known, default=None), "highest": max(known, default=None),
        "seconds_to_plan": round(sum(p["seconds"] for p in planned.values()), 1),
    }  # fmt: skip
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
