"""Fine-tuning on one GPU: fullshard, TRL + PEFT (+ Liger, + bitsandbytes) and Unsloth on the same numbers.

    python benchmarks/sft_gpu.py                               # every case and contestant that is installed
    python benchmarks/sft_gpu.py --case lora qlora --contestants ours trl --out results.jsonl
    python benchmarks/sft_gpu.py --ladder                      # what each technique brings, added one by one
    python benchmarks/sft_gpu.py --profile --case lora         # where the time of one of our steps goes
    python benchmarks/sft_gpu.py --two-ranks                   # the losses of two NCCL ranks and of one
    python benchmarks/sft_gpu.py --quick                       # a smoke run of a tiny model, on a CPU too

Random weights of Llama-3-8B's shape (1B's for full fine-tuning), LoRA of rank 8 on all linear layers, 8 rows of 2048
tokens a step. Each contestant trains in a process of its own, ours by `fullshard.SFTTrainer`. Tokens per second are
real tokens, without padding, over the median of the timed steps; memory is torch's peak from the start of the process,
allocated and reserved. Losses are compared with the reference's (TRL + PEFT): the first steps one by one, the timed
ones by their mean. A contestant that fails or takes too long is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, whose names are no modules' names
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # which would ask the hub
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", os.path.join(tempfile.gettempdir(), "unsloth_compiled"))

from benchmarks.sft_files import SHAPES  # noqa: E402
from benchmarks.sft_process import Run, finish_together  # noqa: E402
from benchmarks.sft_rank import GPU  # noqa: E402

WARM_UP = 4
FREE, ON = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}
LIGER = {"use_liger_kernel": True}


NODE = {
    "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""The environment of one of two ranks that are nodes for themselves, so that NCCL lets them share a GPU."""


def budget(size: str) -> dict[str, Any]:
    """Our settings for a peak of at most this size."""
    return {"gradient_checkpointing": size}


@dataclass(frozen=True)
class Case:
    """What is trained, by whom with which settings of their own."""

    goal: str
    contestants: dict[str, dict[str, Any]]
    same_losses: str
    """Cases of one name train the same numbers, so that their losses are compared."""
    shape: str = "8b"
    rows: int = 8
    four_bit: bool = False
    full: bool = False
    packed: bool = False


CASES = {
    "lora": Case("18,500 tok/s at 76 GiB", {
        "liger": {**FREE, **LIGER}, "unsloth": FREE, "ours": FREE, "dropout": FREE,
    }, "lora"),
    "lora-19.5": Case("12,500 tok/s at 19.5 GiB", {
        "trl": ON, "liger": {**ON, **LIGER}, "unsloth": ON, "ours": budget("19.5GiB"), "dropout": budget("19.5GiB"),
    }, "lora"),
    "qlora": Case("16,500 tok/s", {"ours": FREE, "dropout": FREE}, "qlora", four_bit=True),
    "qlora-9.8": Case("11,700 tok/s at 9.8 GiB", {
        "trl": ON, "unsloth": ON, "ours": budget("9.8GiB"),
    }, "qlora", four_bit=True),
    "fp8": Case("26,000 tok/s", {"ours": {**FREE, "base_dtype": "fp8"}}, "lora"),
    "full-1b": Case("1.4 × TRL", {"trl": ON, "liger": {**ON, **LIGER}, "ours": FREE}, "full-1b", shape="1b", full=True),
    "packed": Case("3 × unpacked TRL", {
        "trl": ON, "unsloth": ON, "ours": FREE,
    }, "packed", packed=True),
    "qlora-smallest": Case("6.0 GiB", {"trl": ON, "unsloth": ON, "ours": budget("6GiB")}, "qlora-smallest",
                           rows=1, four_bit=True),
}  # fmt: skip
SAME_LOSSES = {"ladder": "lora", **{name: case.same_losses for name, case in CASES.items()}}
LADDER = (
    ("eager, PEFT's layers, checkpointing", {
        **ON, "torch_compile": False, "fused_lora": False, "attn_implementation": "sdpa", "log_entropy": True}),
    ("compiled layers", {"torch_compile": True}),
    ("LoRA groups and gated MLPs", {"fused_lora": None}),
    ("attention by batch", {"attn_implementation": None}),
    ("no entropy", {"log_entropy": None}),
    ("checkpointing by budget, 40 GiB", budget("40GiB")),
    ("no checkpointing", FREE),
    ("fp8 base", {"base_dtype": "fp8"}),
)  # fmt: skip
"""Settings that are added one by one; None takes one out again, so that its default holds."""
WHO = {"ours": "ours", "dropout": "ours", "trl": "trl", "liger": "trl", "unsloth": "unsloth"}
"""Contestants, and the program that runs them."""
NEEDS = {"trl": ("trl",), "liger": ("trl", "liger_kernel"), "unsloth": ("unsloth",)}
SHOWN = {"ours": "fullshard", "dropout": "fullshard, dropout 0.1", "trl": "TRL + PEFT", "liger": "TRL + PEFT + Liger",
         "unsloth": "Unsloth"}  # fmt: skip


# --- runs -------------------------------------------------------------------------------------------------------------


def job_of(case: Case, contestant: str, options: argparse.Namespace) -> dict[str, Any]:
    shape = "tiny" if options.quick else case.shape
    settings = case.contestants[contestant]
    if WHO[contestant] == "ours":  # a run of so few steps would not be compiled by default
        settings = {"torch_compile": not options.quick, **settings, **dict(options.set)}
    return {
        "who": WHO[contestant], "model": str(model_folder(shape, options)), "shape": shape,
        "vocabulary": SHAPES[shape]["vocab_size"], "rows": min(case.rows, 4) if options.quick else case.rows,
        "length": 64 if options.quick else 2048, "packed": case.packed, "four_bit": case.four_bit, "full": case.full,
        "dropout": 0.1 if contestant == "dropout" else 0.0, "settings": settings, "warm_up": WARM_UP,
        "steps": WARM_UP + options.steps + bool(options.profile), "profile": options.profile,
    }  # fmt: skip


def model_folder(shape: str, options: argparse.Namespace) -> Path:
    return Path(options.folder, f"{shape}-{options.layers or 'all'}")


def write_models(runs: list[Run], options: argparse.Namespace) -> None:
    """Write the models that are not there yet, in a process, so that this one never has a GPU context."""
    for shape in dict.fromkeys(run.job["shape"] for run in runs):
        folder = model_folder(shape, options)
        if (folder / "whole").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        words = [str(folder), shape, *([str(options.layers)] if options.layers else [])]
        subprocess.run([sys.executable, "-m", "benchmarks.sft_files", *words], cwd=ROOT, check=True)
        (folder / "whole").touch()
        print(f"{folder} written in {time.monotonic() - began:.1f} s", flush=True)


def run_all(runs: list[Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one after the other; each process is started while the one before it trains."""
    found: list[dict[str, Any]] = []
    end = time.monotonic() + options.limit
    try:
        for run in runs[:1]:
            run.start()
        write_models(runs, options)
        for i, run in enumerate(runs):
            for one in runs[i : i + 2]:
                if one.process is None and time.monotonic() < end:
                    one.start()
            left = min(options.timeout, end - time.monotonic())
            result = run.finish(left) if run.process is not None else {"error": "left out, the time is over"}
            found.append(record(run, result, options))
    finally:
        for run in runs:
            run.stop()
    return found


def record(run: Run, result: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A line of what was measured, printed and kept."""
    facts = {name: run.job[name] for name in ("shape", "rows", "length", "dropout", "settings")}
    line = {"case": run.name, "contestant": run.contestant, **result, **facts, "layers": options.layers}
    print(json.dumps(line), flush=True)
    if options.out:
        with open(options.out, "a") as file:
            file.write(json.dumps(line) + "\n")
    return line


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What runs before this one have measured, of models of the same size."""
    if not options.out or not Path(options.out).exists():
        return []
    lines = [json.loads(line) for line in Path(options.out).read_text().splitlines()]
    return [line for line in lines if line["layers"] == options.layers and (line["shape"] == "tiny") == options.quick]


def compare(lines: list[dict[str, Any]], before: list[dict[str, Any]], groups: dict[str, str]) -> None:
    """Add each line's largest loss difference from the reference of its group, relative to the loss. The reference is
    TRL's, if it has run, else the first."""
    for line in lines:
        group = groups[line["case"]]
        others = [o for o in (*before, *lines) if groups.get(o["case"]) == group and o.get("losses")]
        others = [o for o in others if o["dropout"] == 0]
        reference = next((o for o in others if o["contestant"] == "trl"), others[0] if others else None)
        if reference is None or not line.get("losses"):
            continue
        pairs = [(line["losses"][k], v) for k, v in reference["losses"].items() if k in line["losses"]]
        line["loss_difference"] = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
        line["reference"] = "itself" if reference is line else reference["contestant"]


def table(lines: list[dict[str, Any]]) -> None:
    heads = ("case", "contestant", "tok/s", "peak GiB allocated", "reserved", "timed steps", "loss, first → timed",
             "loss difference")  # fmt: skip
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for line in lines:
        goal = CASES[line["case"]].goal if line["case"] in CASES else ""
        who = SHOWN.get(line["contestant"], line["contestant"])
        name = f"{line['case']}{f' ({goal})' if goal else ''}"
        if "error" in line:
            print(f"| {name} | {who} | {line['error']} | | | | | |")
            continue
        losses = line["losses"]
        first, last = (losses[k] for k in (min(losses, key=int), max(losses, key=int))) if losses else (0.0, 0.0)
        memory = [line.get(k) for k in ("peak_allocated", "peak_reserved", "steps_allocated")]
        shown = " | ".join("" if m is None else f"{m:.1f}" for m in memory)
        difference = f"{line['loss_difference']:.1e} ({line['reference']})" if "loss_difference" in line else ""
        left = f"; without {', '.join(line['left_out'])}" if line.get("left_out") else ""
        speed = f"{line.get('tok_s', 0):,.0f}"
        print(f"| {name} | {who}{left} | {speed} | {shown} | {first:.4f} → {last:.4f} | {difference} |")


def show_profile(line: dict[str, Any]) -> None:
    found = line.get("profile")
    if not found:
        return
    print(f"\n{line['case']}: {found['step_ms']} ms from a step's first to its last kernel, {found['idle_ms']} ms idle")
    for kind, ms in found["classes"].items():
        print(f"  {kind:<24}{ms:>9.2f} ms {ms / max(found['step_ms'], 1e-9):>7.1%}")
    for one in found["top"]:
        print(f"    {one['ms']:>8.2f} ms {one['calls']:>5} × {one['class']:<22} {one['kernel']}")


# --- modes ------------------------------------------------------------------------------------------------------------


def contest(options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    for name in options.case:
        for contestant in [one for one in CASES[name].contestants if one in options.contestants]:
            libraries = options.unsloth_libraries if contestant == "unsloth" else None
            if missing := [need for need in NEEDS.get(contestant, ()) if not installed(need, libraries)]:
                print(f"{name}: {contestant} is left out, {', '.join(missing)} is not installed", flush=True)
            else:
                runs.append(Run(name, contestant, job_of(CASES[name], contestant, options), libraries))
    before, lines = earlier(options), run_all(runs, options)
    compare(lines, before, SAME_LOSSES)
    table(lines)
    for line in lines:
        show_profile(line)
    return lines


def installed(library: str, folder: str | None) -> bool:
    return importlib.util.find_spec(library) is not None or (folder is not None and Path(folder, library).is_dir())


def ladder(options: argparse.Namespace) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {}
    runs = []
    for label, added in LADDER:
        settings = {name: value for name, value in {**settings, **added}.items() if value is not None}
        job = {**job_of(CASES["lora"], "ours", options), "settings": {**settings, **dict(options.set)}}
        runs.append(Run("ladder", label, job))
    before, lines = earlier(options), run_all(runs, options)
    compare(lines, before, SAME_LOSSES)
    print("\n| | tok/s | peak GiB | ms per step | of the line above | loss difference |\n|---|---|---|---|---|---|")
    before = None
    for line in lines:
        if "step_ms" not in line:
            print(f"| {line['contestant']} | {line.get('error')} | | | | |")
            continue
        ratio = f"{line['step_ms'] / before:.3f}" if before else ""
        figures = f"{line['tok_s']:,.0f} | {line.get('peak_allocated', 0):.1f} | {line['step_ms']:.0f} | {ratio}"
        print(f"| {line['contestant']} | {figures} | {line['loss_difference']:.1e} |")
        before = line["step_ms"]
    return lines


def two_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same steps on one rank and on two, which NCCL takes for two nodes of one GPU each."""
    lines = []
    for name in options.case:
        job = {**job_of(CASES[name], "ours", options), "warm_up": WARM_UP + options.steps - 1}
        one, two = Run(name, "one rank", job), [Run(name, "two ranks", job) for _ in range(2)]
        write_models([one], options)
        one.start()
        lines.append(record(one, one.finish(options.timeout), options))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        for rank, run in enumerate(two):
            run.start(NODE | {"RANK": str(rank), "MASTER_PORT": port, "NCCL_HOSTID": f"node{rank}"})
        lines.append(record(two[0], finish_together(two, options.timeout)[0], options))
    compare(lines, [], {name: name for name in options.case})
    table(lines)
    return lines


def default_folder() -> str:
    """Memory where 40 GB of it are free, else a disk."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 40e9
    return str((memory if fits else Path(tempfile.gettempdir())) / "sft_gpu")


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=None)
    parser.add_argument("--contestants", nargs="+", choices=WHO, default=list(WHO))
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after the first ones")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--set", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help="settings of ours")
    parser.add_argument("--folder", default=default_folder(), help="where the models are written, and kept")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one contestant in one case")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument("--out", help="a file to append JSON lines to; its references are used again")
    parser.add_argument("--unsloth-libraries", help="a folder with Unsloth and the versions of libraries it needs")
    parser.add_argument("--profile", action="store_true", help="trace one step of ours")
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--two-ranks", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    few = ["lora"] if options.profile or options.two_ranks else list(CASES)
    options.case = options.case or few
    if options.profile:
        options.contestants = [name for name in options.contestants if WHO[name] == "ours" and name != "dropout"]
    if not GPU and not options.quick:
        raise SystemExit("there is no GPU here; --quick trains a tiny model on the CPU.")
    if options.two_ranks and not options.layers and not options.quick:
        options.layers = 4
    mode = two_ranks if options.two_ranks else ladder if options.ladder else contest
    return 0 if all("error" not in line for line in mode(options)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
