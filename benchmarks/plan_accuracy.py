"""Planned against measured memory: `fullshard plan`'s peak beside the peak of the same run.

    python benchmarks/plan_accuracy.py                    # CPU ranks, every byte that torch allocates is counted
    python benchmarks/plan_accuracy.py --only "2 ranks"   # settings whose names contain this
    python benchmarks/plan_accuracy.py --gpu              # one GPU: torch.cuda.max_memory_allocated, models up to 8B

Plans are made from a config.json; runs train three steps with `fullshard.SFTTrainer` from files with random weights.
The table has the peak of a step: planned, measured, their ratio, the seconds of the run, and a mark where they differ
by more than 3 %; a line appears as soon as its run has ended. With `--gpu` two ranks are nodes of their own to NCCL,
which then accepts them on one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, whose names are no modules' names
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import sft_files  # noqa: E402
from benchmarks.sft_files import SHAPES  # noqa: E402
from fullshard.config.errors import CapacityError  # noqa: E402
from tests.planner.measured_run import (  # noqa: E402
    LITTLE,
    MOMENTS,
    Setting,
    measure,
    model_config,
    plan,
    released,
    write_model,
)

ALLOWED = 0.03
OTHERS = 3 * 2**30
"""Bytes of a GPU that may be in use besides a run's own, by the processes that plan and write models. The engine keeps
copies only where most of a GPU is unused, so planned and measured memory differ where others use much of it."""
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
    _gpu("8 layers QLoRA, 2 ranks", "8b", 8, 2, rows=2, **NF4),
    _gpu("1B full, 2 ranks", "1b", 16, 2, rows=2, **MASTERS),
    _gpu("1B full, SHARD_GRAD_OP, 2 ranks", "1b", 16, 2, rows=2, **FREE, **MASTERS, engine=_engine("SHARD_GRAD_OP")),
    _gpu("8 layers QLoRA, offload, 2 ranks", "8b", 8, 2, rows=2, **NF4,
         engine=_engine("FULL_SHARD", offload_params=True)),
    _gpu("1B full, compiled", "1b", 16, rows=8, steps=5, **FREE, **MASTERS, torch_compile=True),
    _gpu("1B full, AdamW not fused, accumulation", "1b", 16, **MASTERS, optim="adamw_torch",
         gradient_accumulation_steps=2),
    _gpu("8 layers LoRA, compiled", "8b", 8, **FREE, **LORA, **IN_BF16, torch_compile=True),
    _gpu("8 layers LoRA, dropout", "8b", 8, **FREE, **{**LORA, "lora_dropout": 0.1}, **IN_BF16),
    _gpu("8 layers QLoRA, no checkpointing", "8b", 8, **FREE, **NF4),
    _gpu("8 layers fp8", "8b", 8, **FREE, **LORA, **IN_BF16, base_dtype="fp8"),
    _gpu("8B LoRA, checkpointing", "8b", 32, **LORA, **IN_BF16),
    _gpu("8B LoRA, no checkpointing", "8b", 32, **FREE, **LORA, **IN_BF16),
    _gpu("8B QLoRA, checkpointing", "8b", 32, **NF4),
    _gpu("8B QLoRA, inputs on the host", "8b", 32, activation_offloading=True, **NF4),
    _gpu("8B LoRA, budget 24GiB", "8b", 32, gradient_checkpointing="24GiB", steps=14, **LORA, **IN_BF16),
    _gpu("1B full, no checkpointing", "1b", 16, **FREE, **MASTERS),
    _gpu("1B full, checkpointing", "1b", 16, **MASTERS),
    _gpu("1B full, packed", "1b", 16, **FREE, **MASTERS, packing=True),
    _gpu("1B full, offload", "1b", 16, **MASTERS, engine=_engine("FULL_SHARD", offload_params=True)),
]  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes that measure settings with the same number of ranks, one setting after the other."""

    def __init__(self, settings: list[Setting], models: dict[str, Path], folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.found = folder / "found.jsonl"
        folder.mkdir()
        jobs = [{"setting": dataclasses.asdict(s), "model": str(models[s.name])} for s in settings]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--jobs", str(folder)]
        self.processes = []
        for rank in range(settings[0].ranks):
            log = self.log(rank).open("w")
            env = {**os.environ, "PYTHONPATH": str(ROOT), **_environment(settings[0], rank, port)}
            self.processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))

    def log(self, rank: int) -> Path:
        return self.folder / f"log-{rank}.txt"

    def results(self, timeout: float, meanwhile: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """What is found, as soon as it is; ends when all is, when a rank ends before, or after `timeout` seconds
        without a result."""
        count, last = 0, time.monotonic()
        try:
            while count < len(self.settings):
                codes = [process.poll() for process in self.processes]
                ended = codes[0] is not None or any(codes)
                lines = self.found.read_text().split("\n")[:-1] if self.found.exists() else []
                for line in lines[count:]:
                    yield json.loads(line)
                    count, last = count + 1, time.monotonic()
                if ended and count == len(lines) or time.monotonic() - last > timeout:
                    return
                meanwhile()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def why_not(self) -> str:
        """The ends of the ranks' logs."""
        codes = [process.returncode for process in self.processes]
        tails = [f"rank {rank} ({code}):\n{self.log(rank).read_text()[-1500:]}" for rank, code in enumerate(codes)]
        return "\n".join(tails)


def measure_all(
    settings: list[Setting], models: dict[str, Path], folder: Path, timeout: float, meanwhile: Callable[[], None]
) -> Iterator[tuple[Setting, dict[str, Any] | None]]:
    """Each setting with what was measured; None where a run did not end. The next ones are measured all the same."""
    left, starts = list(settings), itertools.count()
    while left:
        same = [*itertools.takewhile(lambda s: s.ranks == left[0].ranks, left)]
        ranks = Ranks(list(same), models, folder / f"ranks-{next(starts)}")
        for result in ranks.results(timeout, meanwhile):
            same.pop(0)
            yield left.pop(0), result
        if same:
            print(f"--- {same[0].name}: not measured\n{ranks.why_not()}\n---", flush=True)
            yield left.pop(0), None


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


def measure_jobs(folder: Path) -> None:
    """What a rank does: measure one setting after the other."""
    from fullshard.distributed import runtime

    for job in json.loads((folder / "jobs.json").read_text()):
        setting, model = Setting(**job["setting"]), Path(job["model"])
        while not _written(model).exists():
            time.sleep(0.1)
        began = time.monotonic()
        with released():
            tracker = measure(setting, model, folder / "run")
        if runtime.rank() == 0:
            seen = {name: getattr(tracker, name, 0) for name in ("before", "others")}
            line = {"peaks": tracker.peaks, **seen, "seconds": time.monotonic() - began}
            with (folder / "found.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        del tracker


def model_folders(settings: list[Setting], folder: Path) -> dict[str, Path]:
    """Where the model of each setting is, by its name."""
    shapes = {s.name: json.dumps([s.architecture, s.sizes]) for s in settings}
    places = {shape: folder / f"model-{i}" for i, shape in enumerate(dict.fromkeys(shapes.values()))}
    return {name: places[shape] for name, shape in shapes.items()}


def write_models(settings: list[Setting], models: dict[str, Path]) -> None:
    """Write each model, in the order in which they are needed; a file beside it says that it is complete."""
    for setting in settings:
        model = models[setting.name]
        if _written(model).exists():
            continue
        if setting.device == "cpu":
            write_model(setting, model)
        else:
            shape = next(n for n, s in SHAPES.items() if s["hidden_size"] == setting.sizes["hidden_size"])
            words = [str(model), shape, str(setting.sizes["num_hidden_layers"])]
            subprocess.run([sys.executable, "-m", "benchmarks.sft_files", *words], cwd=ROOT, check=True)
        _written(model).touch()


def _written(model: Path) -> Path:
    return model.with_suffix(".written")


# --- the table --------------------------------------------------------------------------------------------------------


class Plans:
    """The plans of settings, made while others are measured."""

    def __init__(self, settings: list[Setting], folder: Path) -> None:
        self.left, self.folder, self.seconds = list(settings), folder, 0.0
        self.known: dict[str, Any] = {}

    def make_one(self) -> None:
        """Make the next plan; a short break if all are made."""
        if not self.left:
            time.sleep(0.1)
            return
        setting, began = self.left.pop(0), time.perf_counter()
        model = self.folder / f"plan-{len(self.left)}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(_config(setting)))
        try:
            self.known[setting.name] = plan(setting, model, self.folder, *_place(setting))[1]
        except CapacityError as error:
            print(f"{setting.name}: not planned: {error}", flush=True)
            self.known[setting.name] = None
        self.seconds += time.perf_counter() - began

    def of(self, setting: Setting) -> Any:
        while setting.name not in self.known:
            self.make_one()
        return self.known[setting.name]


def _config(setting: Setting) -> dict[str, Any]:
    return model_config(setting).to_dict() if setting.device == "cpu" else sft_files.config(setting.sizes)


def _place(setting: Setting) -> tuple[int, int | None]:
    """The nodes of a setting, and the memory of a device."""
    import torch

    if setting.device == "cpu":
        return 1, None
    return setting.ranks, torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def line_of(setting: Setting, estimate: Any, measured: dict[str, Any] | None, moments: bool) -> float | None:
    """Print a line; returns the ratio."""
    peak = max(sum(estimate.moments[moment].values()) for moment in MOMENTS) if estimate is not None else 0
    there = max(measured["peaks"].get(moment, 0) for moment in MOMENTS) if measured is not None else 0
    ratio = peak / there if peak and there else None
    sizes = [f"{peak / 2**20:,.2f}" if peak else "not planned", f"{there / 2**20:,.2f}" if there else "not measured"]
    seconds = f"{measured['seconds']:.0f}" if measured is not None else ""
    mark = f"more than {ALLOWED:.0%}" if ratio is not None and abs(ratio - 1) > ALLOWED else ""
    if measured is not None and measured["before"] > LITTLE:
        mark += f" {measured['before'] / 2**20:,.0f} MiB of earlier runs were not released"
    if measured is not None and setting.ranks == 1 and measured["others"] > OTHERS:
        mark += f" {measured['others'] / 2**20:,.0f} MiB of other processes"
    cells = [setting.name, *sizes, "" if ratio is None else f"{ratio:.4f}", seconds, mark]
    print(f"| {' | '.join(cells)} |", flush=True)
    if moments and ratio is not None and measured is not None:
        print_moments(estimate, measured["peaks"])
    return ratio


def print_moments(estimate: Any, peaks: dict[str, int]) -> None:
    for name in ("load", "first step", *MOMENTS):
        parts = estimate.moments.get(name, {})
        a, b = sum(parts.values()), peaks.get(name, 0)
        ratio = f"{a / b:.4f}" if a and b else ""
        print(f"|   {name} | {a / 2**20:,.2f} | {b / 2**20:,.2f} | {ratio} | | {parts or ''} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on one GPU instead of CPU ranks")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of settings")
    parser.add_argument("--moments", action="store_true", help="every moment of a step, with the parts planned for it")
    parser.add_argument("--plan-only", action="store_true", help="do not measure")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one setting")
    parser.add_argument("--folder", default=None, help="where models are written")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        measure_jobs(options.jobs)
        sys.stdout.flush()
        os._exit(0)  # without waiting for the libraries to take themselves down
    chosen = [
        s for s in (ON_GPU if options.gpu else ON_CPUS) if not options.only or any(o in s.name for o in options.only)
    ]
    shared = Path("/dev/shm") if options.gpu and Path("/dev/shm").exists() else None
    folder = Path(tempfile.mkdtemp(dir=options.folder or shared))
    print("| setting | planned MiB | measured MiB | ratio | s | |\n|---|---|---|---|---|---|", flush=True)
    ratios, plans, models = [], Plans(chosen, folder), model_folders(chosen, folder)
    try:
        found: Iterable[tuple[Setting, Any]] = ((s, None) for s in chosen)
        if not options.plan_only:
            threading.Thread(target=write_models, args=(chosen, models), daemon=True).start()
            found = measure_all(chosen, models, folder, options.timeout, plans.make_one)
        for setting, measured in found:
            ratios.append(line_of(setting, plans.of(setting), measured, options.moments))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    known = [ratio for ratio in ratios if ratio is not None]
    summary = {
        "settings": len(chosen), "measured": len(known), "within": sum(abs(r - 1) <= ALLOWED for r in known),
        "lowest": min(known, default=None), "highest": max(known, default=None),
        "seconds_to_plan": round(plans.seconds, 1),
    }  # fmt: skip
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
