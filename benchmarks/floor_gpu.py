"""What a step's matrix products and attention take on a GPU when nothing else runs: the floor of `sft_gpu.py`'s steps.

    python benchmarks/floor_gpu.py                 # Llama-3-8B's shape, 8 × 2048 tokens, bf16 and fp8 products
    python benchmarks/floor_gpu.py --seconds 10

A step of LoRA multiplies each frozen weight twice, forward and for the input's gradient. Those products, causal
attention forward and backward (cuDNN), and the head run here in the order of a step, into memory that is allocated
once, over and over. A chip that is busy all the time lowers its clock until its power fits, so a product takes longer
than alone: the first half second and the rest are reported apart, with clock and power.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, whose names are no modules' names

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from benchmarks.sft_files import SHAPES, linear_layers  # noqa: E402
from fullshard.device.torch_private import scaled_mm  # noqa: E402
from fullshard.quant.fp8 import DTYPE as FP8  # noqa: E402

ROWS, LENGTH, DISTINCT, HEAD_CHUNKS = 8, 2048, 4, 16


class Step:
    """The products and the attention of one step."""

    def __init__(self, shape: dict[str, Any], fp8: bool) -> None:
        self.layers, self.fp8, tokens = shape["num_hidden_layers"], fp8, ROWS * LENGTH
        width, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
        side = width // heads
        narrow = side * shape["num_key_value_heads"]
        sizes = linear_layers(shape).items()
        self.weights = [{name: self._matrix(*size) / size[1] ** 0.5 for name, size in sizes} for _ in range(DISTINCT)]
        self.values = {size: self._matrix(tokens, size) for size in {width, narrow, inner}}
        self.found = {size: torch.empty_like(t) for size, t in self.values.items()}
        if fp8:
            self.scales = torch.ones(max(tokens, inner, width), device="cuda")
            self.values8 = {size: t.to(FP8) for size, t in self.values.items()}
            self.weights8 = [{name: ((w * w.shape[1] ** 0.5).to(FP8), (w * w.shape[1] ** 0.5).t().contiguous().to(FP8))
                              for name, w in layer.items()} for layer in self.weights]  # fmt: skip
        self.q, self.dy = (self._heads(tokens, heads, side) for _ in range(2))
        self.kv = [self._heads(tokens, shape["num_key_value_heads"], side) for _ in range(2)]
        self.head = self._matrix(shape["vocab_size"], width) / width**0.5
        self.logits = torch.empty(tokens // HEAD_CHUNKS, len(self.head), device="cuda", dtype=torch.bfloat16)
        self.logits.normal_()

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    def _heads(self, tokens: int, heads: int, side: int) -> torch.Tensor:
        return self._matrix(tokens, heads * side).view(ROWS, LENGTH, heads, side).transpose(1, 2).requires_grad_()

    def product(self, layer: int, name: str, backward: bool) -> None:
        weight = self.weights[layer % DISTINCT][name]
        out_size, in_size = weight.shape if not backward else weight.shape[::-1]
        if not self.fp8:
            torch.mm(self.values[in_size], weight if backward else weight.t(), out=self.found[out_size])
            return
        right = self.weights8[layer % DISTINCT][name][backward].t()
        left, out = self.values8[in_size], self.found[out_size]
        ones = {"scale_a": self.scales[: len(left), None], "scale_b": self.scales[None, :out_size]}
        scaled_mm(left, right, **ones, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)

    def run(self) -> None:
        names, (k, v) = list(self.weights[0]), self.kv
        attended = []
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for layer in range(self.layers):
                for name in names:
                    self.product(layer, name, backward=False)
                attended.append(F.scaled_dot_product_attention(self.q, k, v, is_causal=True, enable_gqa=True))
            width = self.head.shape[1]
            for x, dx in zip(self.values[width].chunk(HEAD_CHUNKS), self.found[width].chunk(HEAD_CHUNKS), strict=True):
                logits = torch.mm(x, self.head.t())
                del logits
                torch.mm(self.logits, self.head, out=dx)
            for layer in reversed(range(self.layers)):
                for name in reversed(names):
                    self.product(layer, name, backward=True)
                torch.autograd.grad(attended.pop(), (self.q, k, v), self.dy)


def measure(run: Callable[[], None], seconds: float) -> tuple[list[float], str]:
    """Milliseconds of each run, one after the other for some seconds, and the chip's clock and power at the end."""
    run()
    torch.cuda.synchronize()
    marks, total = [_mark()], 0.0
    while total < 1e3 * seconds:
        for _ in range(2):
            run()
            marks.append(_mark())
        marks[-2].synchronize()  # one run stays ahead
        total = marks[0].elapsed_time(marks[-2])
    words = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit", "--format=csv,noheader"]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], asked.stdout.strip()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6, help="how long each kind of product runs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    print("| products | ms, first half second | ms, later | tok/s, later | clock, its maximum, power, its limit |")
    print("|---|---|---|---|---|")
    for fp8 in (False, True):
        step = Step(SHAPES["8b"], fp8)
        times, state = measure(step.run, options.seconds)
        early = [t for i, t in enumerate(times) if sum(times[: i + 1]) < 500] or times[:1]
        late = statistics.median(times[len(times) // 2 :])
        cells = "fp8" if fp8 else "bf16", f"{statistics.median(early):.0f}", f"{late:.0f}"
        print(f"| {' | '.join(cells)} | {ROWS * LENGTH / late * 1e3:,.0f} | {state} |", flush=True)
        del step
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
