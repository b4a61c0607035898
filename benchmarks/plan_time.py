"""Compares estimated step times with measured ones, and the shares of datasheet rates that they assume with a GPU's.

    python benchmarks/plan_time.py             # no GPU needed: estimates of the runs on one H200 in RESULTS.md
    python benchmarks/plan_time.py --rates     # on a GPU, half a minute: products, fp8, attention, copies, transfers

One JSON line per case and a table at the end. The exit status is 1 if an estimate is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.sft_files import SHAPES, config  # noqa: E402
from fullshard.device import accelerator  # noqa: E402
from fullshard.launch.plan_command import read_request  # noqa: E402
from fullshard.planner import step_time  # noqa: E402
from fullshard.planner.estimate import Estimator  # noqa: E402
from fullshard.planner.machines import this_machine  # noqa: E402

TOLERANCE = 0.1
RUN = ("--bf16", "--max_length", "2048", "--machine", "h200", "--torch_compile", "true")
LORA = ("--use_peft_lora", "--lora_r", "8", "--lora_alpha", "16", "--lora_dropout", "0",
        "--lora_target_modules", "all-linear")  # fmt: skip
QLORA = (*LORA, "--use_4bit_quantization", "--use_nested_quant")
RECOMPUTED = ("--gradient_checkpointing", "true")
ON_HOST = (*RECOMPUTED, "--activation_offloading", "true")
MEASURED: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "LoRA": ("8b", 17_878, LORA),
    "LoRA, full recomputation": ("8b", 13_534, (*LORA, *RECOMPUTED)),
    "LoRA, full recomputation, not compiled": ("8b", 9_977, (*LORA, *RECOMPUTED, "--torch_compile", "false")),
    "QLoRA": ("8b", 17_635, QLORA),
    "QLoRA, full recomputation, inputs on the host": ("8b", 13_423, (*QLORA, *ON_HOST)),
    "LoRA on fp8 weights": ("8b", 26_196, (*LORA, "--base_dtype", "fp8")),
    "LoRA, packed rows": ("8b", 17_708, (*LORA, "--packing")),
    "full fine-tuning, 1B": ("1b", 62_432, ()),
    "QLoRA, 1 × 2048 tokens": ("8b", 3_831, (*QLORA, *ON_HOST, "--per_device_train_batch_size", "1")),
}
"""Shape, tokens per second and flags of the runs in RESULTS.md; 8 × 2048 tokens a step if not said otherwise."""


# --- estimates of runs that were measured ---------------------------------------------------------------------------


def estimated(name: str, folder: Path) -> float:
    """Tokens per second that are planned for a run."""
    shape, _, flags = MEASURED[name]
    place = folder / f"{shape}.json"
    place.write_text(json.dumps(config(SHAPES[shape])))
    request, _ = read_request([str(place), *RUN, *flags])
    return float(Estimator()(request).time.tokens_per_second)


def compare_runs() -> list[dict[str, Any]]:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, measured, _) in MEASURED.items():
            found = estimated(name, Path(folder))
            lines.append({"case": name, "estimated": round(found), "measured": measured, "ratio": found / measured})
            print(json.dumps(lines[-1]), flush=True)
    return lines


# --- shares of a GPU's rates ----------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], Any], seconds: float = 2.0) -> float:
    """The median time of a call on the device, repeated until clocks are as low as in a long run."""
    module = torch.get_device_module()
    times: list[float] = []
    while sum(times) < 1e3 * seconds:
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[len(times) // 2 :])


def compare_rates() -> list[dict[str, Any]]:
    """What operations of an 8B layer over 16,384 tokens reach of the rates in the table."""
    machine, device = this_machine(), accelerator.current()
    x, w = (torch.randn(n, 4096, device=device, dtype=torch.bfloat16) for n in (16384, 14336))
    q, k = (torch.randn(8, heads, 2048, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8))
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    product = 2 * 16384 * 4096 * 14336
    work: dict[str, tuple[float, float, float, Callable[[], Any]]] = {
        "products": (step_time.PRODUCTS, product, machine.flops["bfloat16"], lambda: x @ w.T),
        "attention": (step_time.ATTENTION, 2 * 8 * 32 * 2048**2 * 128, machine.flops["bfloat16"], lambda: (
            torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True))),
        "copies": (step_time.MEMORY, 2 * x.nbytes, machine.memory_bandwidth, x.clone),
        "from the host": (step_time.HOST_LINK, host.nbytes, machine.host_link,
                          lambda: there.copy_(host, non_blocking=True)),
        "to the host": (step_time.HOST_LINK, host.nbytes, machine.host_link,
                        lambda: host.copy_(there, non_blocking=True)),
    }  # fmt: skip
    if "float8" in machine.flops:
        a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        rows, columns = torch.ones(16384, 1, device=device), torch.ones(1, 14336, device=device)
        work["fp8 products"] = (step_time.FP8_PRODUCTS, product, machine.flops["float8"], lambda: torch._scaled_mm(
            a, b.T, rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True))  # fmt: skip
    lines = []
    for name, (assumed, amount, rate, call) in work.items():
        reached = amount / (milliseconds(call) / 1e3) / rate
        lines.append({"case": name, "estimated": assumed, "measured": round(reached, 3), "ratio": assumed / reached})
        print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", action="store_true", help="measure the shares of the rates on this GPU")
    options = parser.parse_args()
    lines = compare_rates() if options.rates else compare_runs()
    print(f"\n| {'case':46} | estimated | measured | ratio |\n|---|---|---|---|")
    for line in lines:
        print(f"| {line['case']:46} | {line['estimated']:9,} | {line['measured']:8,} | {line['ratio']:.2f} |")
    return int(not options.rates and any(abs(line["ratio"] - 1) > TOLERANCE for line in lines))


if __name__ == "__main__":
    sys.exit(main())
