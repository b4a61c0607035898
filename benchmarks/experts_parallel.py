"""Experts divided among ranks against experts that are gathered: bytes and time of a step on CPU ranks.

Starts the processes itself and prints one JSON line: for each `ep_size`, what the first rank sends in a step by kind,
and the median time of a step. The losses of all runs must agree. On CPUs messages cross memory, so times say little
about GPUs; the bytes are those of any device.

    python benchmarks/experts_parallel.py --ranks 4 --experts 16 --tokens 256
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fullshard.distributed import runtime
from fullshard.parallel.model import shard_model
from fullshard.parallel.settings import EngineSettings

WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--choices", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of a rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--frozen", action="store_true", help="train everything but the experts")
    return parser.parse_args()


def measure(args: argparse.Namespace, ep: int) -> dict[str, Any]:
    """Some steps of one `ep_size`."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=args.hidden // 4, num_experts=args.experts, num_experts_per_tok=args.choices,
        moe_intermediate_size=args.hidden // 2, output_router_logits=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for name, p in model.named_parameters():
        p.requires_grad_(not (args.frozen and ".experts." in name))
    model = shard_model(model, EngineSettings(ep_size=ep, use_cpu=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    draw, losses, seconds = torch.Generator().manual_seed(runtime.rank()), [], []
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            model.meter.reset()
        ids = torch.randint(0, 512, (1, args.tokens), generator=draw)
        runtime.barrier()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    counts = {
        "gathered": model.meter.gather_sent,
        "reduced": model.meter.reduce_sent,
        "tokens": model.meter.tokens_sent,
    }
    sent = {kind: sum(by_unit.values()) // args.steps for kind, by_unit in counts.items()}
    return {"ep_size": ep, "sent": sent, "seconds": statistics.median(seconds[WARM_UP:]), "losses": losses}


def rank(args: argparse.Namespace) -> None:
    """What each process does."""
    runtime.use_spmd(device="cpu")
    sizes = [n for n in range(1, args.ranks + 1) if args.ranks % n == 0 and args.experts % n == 0]
    results = [measure(args, ep) for ep in sizes]
    first = results[0]["losses"]
    for one in results:
        torch.testing.assert_close(torch.tensor(one.pop("losses")), torch.tensor(first), rtol=1e-4, atol=1e-4)
    if runtime.is_main():
        print(json.dumps({"settings": vars(args), "torch": torch.__version__, "results": results}))


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        rank(args)
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", "--standalone"]
    sys.exit(subprocess.run([*command, __file__, *sys.argv[1:]], check=False).returncode)


if __name__ == "__main__":
    main()
