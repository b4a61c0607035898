"""LoRA layers of many architectures: fullshard's fused layers and attention against PEFT's and transformers' own.

    python benchmarks/lora_architectures.py                    # on a GPU; layers are not compiled on either side
    python benchmarks/lora_architectures.py --only qwen2 phi3
    python benchmarks/lora_architectures.py --tiny             # on a CPU: only whether it runs

Two layers of each architecture, 2048 wide, random bf16 weights, LoRA of rank 8 on all linear layers, forward and
backward of 4 × 2048 tokens in one process; the median of several steps. One line per architecture: milliseconds and
peak memory of both, and their ratio (below 1, ours is better).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from fullshard.models.gated_mlps import gated_mlps  # noqa: E402
from fullshard.models.shared_inputs import shared_inputs  # noqa: E402
from tests.lora.fused_models import ARCHITECTURES, adapted, bare  # noqa: E402

WIDE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
HEADS, EXPERTS = {"head_dim": 128}, {"moe_intermediate_size": 1024}
LATENT = {
    "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_key_value_heads": 16,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "qwen3": HEADS, "gemma2": {**HEADS, "sliding_window": 1024}, "gemma3": {**HEADS, "sliding_window": 1024},
    "neox": {"num_key_value_heads": 16}, "deepseek": {**LATENT, **EXPERTS}, "qwen3_moe": {**HEADS, **EXPERTS},
    "mixtral": {"intermediate_size": 2048}, "gpt_oss": {**HEADS, "intermediate_size": 2048, "sliding_window": 128},
}  # fmt: skip


def build(name: str, ours: bool, tiny: bool) -> Any:
    model = bare(name, **({} if tiny else {**WIDE, **MORE.get(name, {})})).to(torch.bfloat16)
    known = (shared_inputs(model), gated_mlps(model)) if ours else None
    # PEFT makes adapters in fp32, and LoRA layers of another dtype than their adapter run PEFT's forward.
    model = adapted(model, r=8, lora_alpha=16, lora_dropout=0.0).to(torch.bfloat16)
    if known is not None:
        use_own_attention(model)
        if not fuse_lora(model, known[0]).groups:
            raise ValueError("no LoRA layers were fused")
        fuse_mlps(model, known[1])
    return model


def measure(name: str, ours: bool, options: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a step, and its peak memory in GiB."""
    device = "cpu" if options.tiny else "cuda"
    model = build(name, ours, options.tiny).to(device)
    ids = torch.randint(3, 60, (2, 16) if options.tiny else (4, 2048), device=device)
    times = []
    for _ in range(2 + options.steps):
        if not options.tiny:
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=ids, use_cache=False, logits_to_keep=8).logits.float().logsumexp(-1).mean().backward()
        model.zero_grad(set_to_none=True)
        if not options.tiny:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    if options.tiny:
        return statistics.median(times[2:]), 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return statistics.median(times[2:]), peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two others")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("there is no GPU here; --tiny runs tiny models on the CPU", file=sys.stderr)
        return 2
    print("| architecture | PEFT, ms | fullshard, ms | ratio | PEFT, GiB | fullshard, GiB | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only:
        try:
            (stock, before), (ours, after) = measure(name, False, options), measure(name, True, options)
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"| {name} | failed: {type(error).__name__}: {str(error).splitlines()[0][:150]} |", flush=True)
            continue
        memory = f"{before:.2f} | {after:.2f} | {after / before:.2f}" if before else "| |"
        print(f"| {name} | {stock:.1f} | {ours:.1f} | {ours / stock:.2f} | {memory} |", flush=True)
    print(json.dumps({"torch": torch.__version__, "steps": options.steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
