"""Compares the two engines on the same Llama: step and compile time, memory, and what is sent between devices.

    python benchmarks/xla_engine.py --xla-python .venv-xla/bin/python        # `--devices 2`, `--hidden 256` for less

The torch engine runs on Gloo ranks in this interpreter, the XLA engine on CPU devices of one process in the other one
(`make test-xla` makes it). Both shard the same model by the same plan and train on the same global batch; losses are
compared. Times are medians over steps, in wall-clock time and in CPU time of all threads and processes, which is less
sensitive to other load. The first step, in which the compiler runs, is reported apart. Memory is the largest resident
size of a process, summed over processes.

What the compiler inserted is read from its own dump of the partitioned, optimized program of a step, made in a run of
its own: collectives by kind with the bytes of their values (gathered ones, gradients before they are scattered), and
what a ring algorithm would send. The torch engine's figures are those of `model.meter`, for one rank; it counts one
collective per unit, the compiler one per tensor or group of tensors.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VOCABULARY, LENGTH, ROWS = 4096, 64, 4
MARK = "RESULT "


# --- one engine, in a process of its own ------------------------------------------------------------------------------


def train(hidden: int, layers: int, steps: int) -> None:
    """Train on the engine of this process; process 0 prints the measurements as JSON."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fullshard.runtime as xr
    import fullshard.spmd as xs
    from fullshard import FSDPv2
    from fullshard.distributed import engines
    from fullshard.fsdp.wrap import transformer_auto_wrap_policy

    xr.use_spmd()
    devices = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(devices), (devices,), ("fsdp",))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(xr.device())

    def shard_output(output: Any, mesh: xs.Mesh) -> None:
        xs.mark_sharding(output.logits, mesh, ("fsdp", None, None))

    model = FSDPv2(model, mesh, shard_output, auto_wrap_policy=transformer_auto_wrap_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    x = xs.mark_sharding(tokens.to(xr.device()), mesh, ("fsdp", None))
    xr.sync(wait=True)
    times, busy, losses = [], [], []
    for step in range(steps + 2):  # the second step may compile once more: then there is an optimizer state
        if step == 2 and not engines.is_xla():
            model.meter.reset()
        xr.barrier()
        began, worked = time.perf_counter(), time.process_time()
        logits = model(input_ids=x).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xr.sync(wait=True)
        xr.barrier()
        times.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
        losses.append(loss.detach())  # read at the end: reading would be a step of its own on XLA
    result: dict[str, Any] = {
        "first": times[:2], "seconds": statistics.median(times[2:]), "times": times[2:],
        "cpu": statistics.median(busy[2:]), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": [float(xs.full_tensor(loss)) for loss in losses],
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }  # fmt: skip
    if engines.is_xla():
        result |= _compilations()
    else:
        meter = model.meter
        result["collectives"] = {
            "all-gather": (sum(meter.gathers.values()) / steps, meter.bytes_gathered / steps),
            "reduce-scatter": (sum(meter.reduces.values()) / steps, meter.bytes_reduced / steps),
        }
        result["sent"] = meter.bytes_sent / steps
        result["cpu"], result["peak"] = _sums(xr, devices, result["cpu"], result["peak"])
    xr.print0(MARK + json.dumps(result))


def _sums(xr: Any, ranks: int, *values: float) -> list[float]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(values, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(total)
    return total.tolist()


def _compilations() -> dict[str, Any]:
    """How many programs were compiled, and the seconds that this took."""
    import torch_xla
    import torch_xla.debug.metrics as metrics

    count, nanoseconds = (metrics.metric_data("CompileTime") or (0, 0))[:2]
    return {"compilations": count, "compile": nanoseconds / 1e9, "torch_xla": torch_xla.__version__}


# --- the compiler's dump ----------------------------------------------------------------------------------------------

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
INSTRUCTION = re.compile(rf"= (\(?[^=]*?\)?) ({'|'.join(KINDS)})(?:-start)?\(")
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


def collectives(program: str) -> Iterator[tuple[str, int, int]]:
    """Each collective of a program in the compiler's text: its kind, the bytes of its result on one device, and the
    number of devices that take part."""
    for line in program.splitlines():
        if found := INSTRUCTION.search(line):
            shapes = SHAPE.findall(found[1])
            size = sum(WIDTHS.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in shapes)
            yield found[2], size, _group_size(line)


def _group_size(line: str) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    return 2  # a permutation: each device sends to one other


def ring_bytes(kind: str, size: int, devices: int) -> float:
    """What one device sends if a collective with this result runs on a ring."""
    share = (devices - 1) / devices
    factor = {"all-reduce": 2 * share, "reduce-scatter": devices - 1, "collective-permute": 1}
    return size * factor.get(kind, share)


def read_dump(folder: Path) -> dict[str, Any]:
    """The collectives of the step: of the program with the most bytes in them."""
    best: dict[str, Any] = {"collectives": {}, "sent": 0.0}
    for file in folder.glob("*after_optimizations.txt"):
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        sent = 0.0
        for kind, result, devices in collectives(file.read_text()):
            count[kind] += 1
            size[kind] += result * devices if kind == "reduce-scatter" else result
            sent += ring_bytes(kind, result, devices)
        if sent > best["sent"]:
            best = {"collectives": {kind: (count[kind], size[kind]) for kind in KINDS if count[kind]}, "sent": sent}
    return best


# --- side by side -----------------------------------------------------------------------------------------------------


def run(engine: str, python: str, options: argparse.Namespace, steps: int, dump: Path | None = None) -> dict[str, Any]:
    """The measurements of one engine, from a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "FULLSHARD_ENGINE": engine}
    command = [python]
    if engine == "torch":
        environment |= {"OMP_NUM_THREADS": "1", "FULLSHARD_DEVICE": "cpu"}
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.devices)]
    else:
        environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(options.devices)}
    if dump is not None:
        environment["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    sizes = ["--hidden", options.hidden, "--layers", options.layers, "--steps", steps]
    command += [__file__, "--child", *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise SystemExit(f"{engine}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--xla-python", default=os.environ.get("FULLSHARD_XLA_PYTHON", ".venv-xla/bin/python"))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.hidden, options.layers, options.steps)
        return
    interpreters = {"torch": sys.executable, "xla": options.xla_python}
    runs: dict[str, list[dict[str, Any]]] = {"torch": [], "xla": []}
    for _ in range(options.repeat):
        for engine, python in interpreters.items():
            print(f"load {os.getloadavg()[0]:.1f}: {engine} …", file=sys.stderr, flush=True)
            runs[engine].append(run(engine, python, options, options.steps))
    with tempfile.TemporaryDirectory() as folder:
        run("xla", options.xla_python, options, 1, Path(folder))
        compiled = read_dump(Path(folder))
    best = {engine: min(of_one, key=lambda one: one["seconds"]) for engine, of_one in runs.items()}
    best["xla"] |= compiled
    report(best, runs, options)


def report(best: dict[str, dict[str, Any]], runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    ours, xla = best["torch"], best["xla"]
    off = max(abs(a - b) for a, b in zip(ours["losses"], xla["losses"], strict=True))
    print(f"torch {ours['versions']['torch']}; torch {xla['versions']['torch']} with torch_xla {xla['torch_xla']}; "
          f"transformers {ours['versions']['transformers']}, {xla['versions']['transformers']}")  # fmt: skip
    print(f"Llama of {ours['parameters'] / 1e6:.1f} M parameters (hidden {options.hidden}, {options.layers} layers), "
          f"{ROWS} × {LENGTH} tokens, fp32, AdamW, {options.devices} devices")  # fmt: skip
    print(f"losses differ by at most {off:.1e}\n")
    rows: list[tuple[str, Any, Any]] = [
        ("step, s", *(f"{one['seconds']:.3f}" for one in (ours, xla))),
        ("medians of all runs, s", *(", ".join(f"{one['seconds']:.3f}" for one in runs[e]) for e in ("torch", "xla"))),
        ("CPU time of a step, s", *(f"{one['cpu']:.3f}" for one in (ours, xla))),
        ("first and second step, s", *(" / ".join(f"{t:.1f}" for t in one["first"]) for one in (ours, xla))),
        ("programs compiled, and seconds", "none", f"{xla['compilations']}, {xla['compile']:.1f}"),
        ("peak resident memory, all processes", *(f"{one['peak'] / 2**30:.2f} GiB" for one in (ours, xla))),
    ]
    for kind in KINDS:
        if kind in ours["collectives"] or kind in xla["collectives"]:
            cells = (one["collectives"].get(kind) for one in (ours, xla))
            rows.append((kind, *(f"{c[0]:g} of {c[1] / 1e6:.1f} MB" if c else "none" for c in cells)))
    rows.append(("sent by one device, MB", *(f"{one['sent'] / 1e6:.1f}" for one in (ours, xla))))
    print("| a step | torch engine | XLA engine |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
