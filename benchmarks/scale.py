"""Measures the overhead of thousands of ranks on one of them, without thousands of machines.

    python benchmarks/scale.py                  # CPU; `--device cuda` for realistic host time, `--quick` for less

torch's fake process group replaces the other ranks: its collectives return at once, so only this rank's own work is
measured. (Its all-gathers fill the result with one copy of the shard per rank; that is not this rank's work and is
excluded, see `WithoutData`.) A Llama with the layer sizes of Llama-8B (two layers, bf16) is wrapped as rank 0 of 8, 256
and 4,096, with FULL_SHARD and with HYBRID_SHARD in groups of 8, full fine-tuning and LoRA with rank 8, each case in its
own process. Reported per case:

- start-up: `use_spmd()` on the group, the mesh, wrapping on the meta device (no data), process groups created, the
  longest name of a group;
- a step on one token: forward and backward ("pass"), and the whole step with clipping and AdamW. On a GPU, the host
  time is the wall time until the calls return, without waiting for the GPU, and launches are kernels, copies and fills.
  On a CPU, kernels run in the same thread; their time in the profiler is subtracted, and launches are calls of
  operators other than views. That is a rough estimate without the cost of the calls; the number of Python calls
  is exact;
- collectives launched in a step (coalesced ones count once), and the tensors in them.

From the plan alone, for Llama-8B and Llama-70B: bytes moved by a unit's all-gathers and reductions, relative to the
bytes of its parameters. A table is printed to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

GROUP = 8
WORLDS = (8, 256, 4096)
STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD")
KINDS = ("full", "lora")
PLAN_WORLDS = (2, 4, 8, 16, 64, 256, 1024, 4096)
WIDTHS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
}
STEPS = {"cpu": (1, 3), "cuda": (10, 60)}
"""Steps to warm up, and steps measured."""
VIEWS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "permute",
    "reshape", "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "chunk", "narrow",
    "movedim", "flatten", "result_type", "to", "is_nonzero", "item", "_local_scalar_dense",
}  # fmt: skip
"""Operators without a kernel."""


# --- a model on the meta device ---------------------------------------------------------------------------------------


def build(size: str, kind: str, vocabulary: int, layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, use_cache=False, **WIDTHS[size])
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
        if kind == "full":
            return model
        from peft import LoraConfig, get_peft_model

        if kind == "qlora":
            from fullshard.quant.quantize import quantize_model

            quantize_model(model, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True})
        lora = LoraConfig(r=8, target_modules="all-linear")
        model = get_peft_model(model, lora)
        return model.to(torch.bfloat16) if kind == "lora in bf16" else model


def wrap(model: Any, world: int, strategy: str) -> Any:
    import numpy as np

    import fullshard.spmd as xs
    from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

    if strategy == "HYBRID_SHARD":
        mesh = xs.Mesh(np.arange(world), (world // GROUP, GROUP), ("replica", "fsdp"))
    else:
        mesh = xs.Mesh(np.arange(world), (world,), ("fsdp",))
    return FSDPv2(
        model, mesh, strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy, sync_module_states=False
    )


def give_values(model: Any, device: str) -> None:
    """Zeros everywhere: nothing that is measured depends on values."""
    import torch

    for unit in model._fullshard_engine.units:
        for p in unit.parameters:
            p.give_memory()
            p.local.zero_()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)


def join(world: int, device: str) -> float:
    """Become rank 0 of a fake group; seconds that `use_spmd` took."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fullshard.distributed import runtime

    runtime.get_logger().setLevel("WARNING")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    started = time.perf_counter()
    runtime.use_spmd(device=device)
    return time.perf_counter() - started


class WithoutData:
    """Inside, gathers and reductions of process groups return finished work without touching data, and are counted."""

    def __init__(self) -> None:
        self.launches = self.members = 0
        """Calls, and the tensors that travelled in them."""

    def __enter__(self) -> WithoutData:
        import torch
        import torch.distributed as dist

        kind: Any = dist.ProcessGroup
        # Their names differ from one version of torch to the next.
        self._plain = {name: getattr(kind, name) for name in dir(kind) if "gather" in name or "reduce" in name}
        nothing = torch.zeros(1)
        done = self._plain["allreduce"]  # of the fake group: it returns at once

        def stand_in(group: Any, first: Any, *rest: Any, **options: Any) -> Any:
            self.launches += 1
            self.members += len(first) if isinstance(first, list) else 1
            return done(group, [nothing])

        for name in self._plain:
            setattr(kind, name, stand_in)
        return self

    def __exit__(self, *_: Any) -> None:
        import torch.distributed as dist

        for name, method in self._plain.items():
            setattr(dist.ProcessGroup, name, method)


# --- one case ---------------------------------------------------------------------------------------------------------


def measure(world: int, strategy: str, kind: str, device: str, quick: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    started = time.perf_counter()
    import fullshard.fsdp  # noqa: F401

    imports = time.perf_counter() - started
    joined = join(world, device)
    groups = dist.distributed_c10d._world.pg_names
    before = set(groups.values())
    model = build("8B", kind, vocabulary=1024, layers=2)
    started = time.perf_counter()
    model = wrap(model, world, strategy)
    wrapped = time.perf_counter() - started
    made = [name for group, name in groups.items() if name not in before and group.size() > 1]
    ratios = unit_ratios(model)

    give_values(model, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)

    def forward_backward() -> None:
        model(input_ids=ids).logits.float().sum().backward()

    def finish() -> None:
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    warm, steps = STEPS[device] if not quick else (1, 1 if device == "cpu" else 10)
    with WithoutData() as traffic:
        for _ in range(warm):
            forward_backward()
            finish()
        traffic.launches = traffic.members = 0
        forward_backward()
        finish()
        collectives = {"collectives": traffic.launches, "tensors": traffic.members}
        timed = (on_gpu if device == "cuda" else on_cpu)(forward_backward, finish, steps)
    return {
        "world": world,
        "strategy": strategy,
        "kind": kind,
        "import_s": round(imports, 2),
        "use_spmd_s": round(joined, 4),
        "wrap_s": round(wrapped, 4),
        "groups": len(made),
        "longest_name": max(map(len, made), default=0),
        **ratios,
        **collectives,
        **timed,
    }


def on_gpu(forward_backward: Any, finish: Any, steps: int) -> dict[str, Any]:
    import torch

    times: dict[str, list[float]] = {"pass": [], "step": []}
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        forward_backward()
        times["pass"].append(time.perf_counter() - started)
        finish()
        times["step"].append(time.perf_counter() - started)
    counts = {}
    for name, calls in (("pass", [forward_backward]), ("step", [forward_backward, finish])):
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for call in calls:
                call()
            torch.cuda.synchronize()
        if name == "pass":
            finish()
        on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        counts[f"{name}_launches"] = sum(not getattr(e, "is_user_annotation", False) for e in on_device)
    return counts | {f"{name}_ms": round(1e3 * statistics.median(found), 3) for name, found in times.items()}


def on_cpu(forward_backward: Any, finish: Any, steps: int) -> dict[str, Any]:
    import cProfile
    import pstats

    import torch

    rows: list[dict[str, float]] = []
    for _ in range(steps):
        row: dict[str, float] = {}
        for name, call in (("pass", forward_backward), ("finish", finish)):
            started = time.perf_counter()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                started = time.perf_counter()
                call()
                wall = time.perf_counter() - started
            operators = [e for e in profile.events() if e.name.startswith("aten::")]
            leaves = [e for e in operators if not any(c.name.startswith("aten::") for c in e.cpu_children)]
            kernels = [e for e in leaves if e.name.removeprefix("aten::") not in VIEWS]
            row[f"{name}_ms"] = 1e3 * wall - sum(e.self_cpu_time_total for e in operators) / 1e3
            row[f"{name}_launches"] = len(kernels)
        rows.append(row)
    calls = cProfile.Profile()
    calls.runcall(forward_backward)
    finish()
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {
        "pass_launches": int(middle["pass_launches"]),
        "step_launches": int(middle["pass_launches"] + middle["finish_launches"]),
        "pass_calls": pstats.Stats(calls).total_calls,
        "pass_ms": round(middle["pass_ms"], 3),
        "step_ms": round(middle["pass_ms"] + middle["finish_ms"], 3),
    }


# --- the plan alone ---------------------------------------------------------------------------------------------------


def unit_ratios(model: Any) -> dict[str, float]:
    """The worst unit's bytes gathered and reduced, over its parameters' own."""
    gathered = [unit.gather_traffic for unit in model.plan.units]
    reduced = [unit.reduce_traffic for unit in model.plan.units]
    return {
        "gather_ratio": round(max((a / b for a, b in gathered if b), default=1.0), 4),
        "reduce_ratio": round(max((a / b for a, b in reduced if b), default=1.0), 4),
    }


def plan_ratios() -> list[dict[str, Any]]:
    join(max(PLAN_WORLDS), "cpu")
    return [
        {"size": size, "kind": kind, "world": world}
        | unit_ratios(wrap(build(size, kind, vocabulary=128256, layers=1), world, "FULL_SHARD"))
        for size in WIDTHS
        for kind in ("full", "lora", "lora in bf16", "qlora")
        for world in PLAN_WORLDS
    ]


# --- all cases --------------------------------------------------------------------------------------------------------


def child(arguments: list[str]) -> Any:
    """Run this file again in a process of its own, as a launcher would start a rank."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        # Gathered values come and go; giving their pages back to the system each time would be counted as host time.
        "MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


RATIOS = (
    "wrap_s", "collectives", "tensors", "pass_launches", "step_launches", "pass_calls", "pass_ms", "step_ms",
)  # fmt: skip


def against_smallest(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each strategy and kind on the most ranks, over the same on the fewest."""
    found = []
    for strategy in STRATEGIES:
        for kind in KINDS:
            mine = [c for c in cases if (c["strategy"], c["kind"]) == (strategy, kind)]
            few, many = min(mine, key=lambda c: c["world"]), max(mine, key=lambda c: c["world"])
            keys = [key for key in RATIOS if key in few]
            row: dict[str, Any] = {key: round(many[key] / few[key], 3) if few[key] else None for key in keys}
            found.append({"strategy": strategy, "kind": kind, "worlds": [many["world"], few["world"]], **row})
    return found


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table on stderr."""
    keys = list(rows[0])
    lines = [keys, *([str(row[key]) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    print(f"\n{title}", file=sys.stderr)
    for line in lines:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="one measured step on a CPU, ten on a GPU")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help="numbers of ranks")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; more than one blurs host times")
    parser.add_argument("--plan-only", action="store_true", help="only the bytes that plans move")
    parser.add_argument("--case", nargs=3, metavar=("WORLD", "STRATEGY", "KIND"), help="one case, in this process")
    options = parser.parse_args()
    if options.case:
        world, strategy, kind = options.case
        print(json.dumps(measure(int(world), strategy, kind, options.device, options.quick)))
        return
    if options.plan_only:
        rows = plan_ratios()
        show("bytes moved over own, worst unit", rows)
        print(json.dumps(rows))
        return
    import torch

    flags = ["--device", options.device, *(["--quick"] if options.quick else [])]
    arguments = [
        [*flags, "--case", str(world), strategy, kind]
        for strategy in STRATEGIES
        for kind in KINDS
        for world in options.worlds
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = list(pool.map(child, arguments))
    show(f"one rank of many, {options.device}", cases)
    ratios = against_smallest(cases)
    show("most ranks over fewest", ratios)
    plans = child(["--plan-only"]) if options.device == "cpu" else []
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(
        json.dumps({"torch": torch.__version__, "device": where, "cases": cases, "ratios": ratios, "plans": plans}),
        flush=True,
    )


if __name__ == "__main__":
    main()
