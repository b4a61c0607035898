"""LoRA layers of many architectures: fullshard's fused layers and attention against PEFT's and transformers' own.

    python benchmarks/lora_architectures.py                    # on a GPU; layers are not compiled on either side
    python benchmarks/lora_architectures.py --only qwen2 phi3
    python benchmarks/lora_architectures.py --tiny             # on a CPU: only whether it runs

Two layers of each architecture, 4096 wide, random bf16 weights, LoRA of rank 8 on all linear layers, forward and
backward of 4 × 2048 tokens in one process, a step of one and a step of the other by turns. One line per architecture:
milliseconds of a step (the 20 % quantile, because hosts are disturbed), of the kernels in it, and peak memory, each
with the ratio (below 1, ours is better); and how far the logits are apart, relative to the largest (where a router
sends bf16 values elsewhere, far). Narrow layers (`--width 2048`) wait for the host.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, whose names are no modules' names
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from fullshard.lora.fused import fuse_lora  # noqa: E402
from fullshard.lora.gated_mlp import fuse_mlps  # noqa: E402
from fullshard.models.attention import use_own_attention  # noqa: E402
from fullshard.models.layer_groups import gated_mlps, shared_inputs  # noqa: E402
from tests.lora.fused_models import ARCHITECTURES, adapted, bare  # noqa: E402

HEADS, EXPERTS = {"head_dim": 128}, {"moe_intermediate_size": 2048}
LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "qwen3": HEADS, "gemma2": {**HEADS, "sliding_window": 1024}, "gemma3": {**HEADS, "sliding_window": 1024},
    "deepseek": {**LATENT, **EXPERTS}, "qwen3_moe": {**HEADS, **EXPERTS}, "mixtral": {"intermediate_size": 4096},
    "gpt_oss": {**HEADS, "intermediate_size": 4096, "sliding_window": 128},
}  # fmt: skip
ALL_HEADS = ("neox", "deepseek")
"""Those whose key and value heads are as many as the query heads."""


def sizes(name: str, width: int) -> dict[str, Any]:
    heads = width // 128
    return {
        "hidden_size": width, "intermediate_size": width * 7 // 2, "num_attention_heads": heads,
        "num_key_value_heads": heads if name in ALL_HEADS else heads // 4, "vocab_size": 4096,
        "max_position_embeddings": 4096, **MORE.get(name, {}),
    }  # fmt: skip


SOFT_CAPPED = ("gemma2",)
"""transformers' SDPA leaves out the soft-caps of scores; only its eager attention computes the model."""


def build(name: str, ours: bool, width: int) -> Any:
    model = bare(name, **(sizes(name, width) if width else {})).to(torch.bfloat16)
    if not ours and name in SOFT_CAPPED:
        model.set_attn_implementation("eager")
    known = (shared_inputs(model), gated_mlps(model)) if ours else None
    # PEFT makes adapters in fp32, and LoRA layers of another dtype than their adapter run PEFT's forward.
    torch.manual_seed(1)
    model = adapted(model, r=8, lora_alpha=16, lora_dropout=0.0).to(torch.bfloat16)
    if known is not None:
        use_own_attention(model)
        if not fuse_lora(model, known[0]).groups:
            raise ValueError("no LoRA layers were fused")
        fuse_mlps(model, known[1])
    return model


class Contestant:
    """A model, and what its steps take."""

    def __init__(self, name: str, ours: bool, options: argparse.Namespace) -> None:
        self.device = "cpu" if options.tiny else "cuda"
        with torch.device(self.device):
            self.model = build(name, ours, 0 if options.tiny else options.width).to(self.device)
            self.ids = torch.randint(3, 60, (2, 16) if options.tiny else (4, 2048))
        self.times: list[float] = []
        self.peak = 0.0

    def step(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start, before = time.perf_counter(), self._allocated()
        self._logits().float().logsumexp(-1).mean().backward()
        self.model.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        self.times.append(1e3 * (time.perf_counter() - start))

    @property
    def milliseconds(self) -> float:
        return sorted(self.times)[len(self.times) // 5]

    def kernels(self) -> float:
        """Milliseconds of the kernels of a step."""
        if self.device == "cpu":
            return 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
        return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return self._logits().float()

    def _logits(self) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=self.ids, use_cache=False, logits_to_keep=8).logits
        return found

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


def line(name: str, options: argparse.Namespace) -> str:
    stock, ours = Contestant(name, False, options), Contestant(name, True, options)
    expected = stock.logits()
    apart = float((ours.logits() - expected).abs().max() / expected.abs().max())
    for turn in range(2 + options.steps):
        if turn == 2:
            stock.times, ours.times = [], []
        stock.step()
        ours.step()
    cells = [f"{stock.milliseconds:.1f}", f"{ours.milliseconds:.1f}", f"{ours.milliseconds / stock.milliseconds:.2f}"]
    if not options.tiny:
        for one, other in ((stock.kernels(), ours.kernels()), (stock.peak, ours.peak)):
            cells += [f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}"]
    return " | ".join([name, *cells, f"{apart:.1e}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after two others")
    parser.add_argument("--width", type=int, default=4096, help="of hidden states (default 4096)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("there is no GPU here; --tiny runs tiny models on the CPU", file=sys.stderr)
        return 2
    pairs = ["PEFT, {}", "fullshard, {}", "ratio"]
    units = ["ms"] if options.tiny else ["ms", "ms of kernels", "GiB"]
    columns = ["architecture", *(one.format(unit) for unit in units for one in pairs), "logits apart"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in options.only:
        try:
            found = line(name, options)
        except (RuntimeError, ValueError, TypeError) as error:
            found = f"{name} | failed: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
        print(f"| {found} |", flush=True)
        gc.collect()
        if not options.tiny:
            torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "steps": options.steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
