"""The time of the host per training step: autocast, `fully_shard` and this engine in mixed precision, on one rank.

    python benchmarks/engine_host.py          # tensors so small that a step is the host's work alone; CPU time
    python benchmarks/engine_host.py --gpu    # 0.75B parameters, 4 × 1024 tokens, on one GPU

A step is forward, backward, clipping and fused AdamW of a Llama with 12 layers, fp32 masters, computed in bf16. The
contestants take turns, so that a change in the load of the machine reaches all of them. On the CPU the figure is the
process's CPU time. On a GPU it is the time until the host has issued a step whose predecessor was waited for, and the
time until the GPU has done it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fullshard.spmd as xs
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

LAYERS = 12
SMALL = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LARGE = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
WARM_UP = 4
"""Steps that are not timed. This engine decides after two whether it keeps copies in bf16 until backward."""


def model(gpu: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=2, use_cache=False, **(LARGE if gpu else SMALL))
    with runtime.device():
        return LlamaForCausalLM(config)


def sharded_by_torch(gpu: bool) -> LlamaForCausalLM:
    made = model(gpu)
    mesh = init_device_mesh(runtime.device().type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(made, mesh=mesh, mp_policy=policy)
    return made


def sharded_by_us(gpu: bool) -> LlamaForCausalLM:
    mesh = xs.Mesh(np.arange(1), (1,), ("fsdp",))
    return FSDPv2(model(gpu), mesh, auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision="bf16")


def step_of(made: LlamaForCausalLM, ids: torch.Tensor, autocast: bool) -> Callable[[], None]:
    parameters = list(made.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            loss = made(input_ids=ids).logits.float().logsumexp(-1).mean()
        loss.backward()
        if isinstance(made, FSDPv2):
            made.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], None], gpu: bool) -> tuple[float, float]:
    """Milliseconds of the host, and of the step."""
    clock = time.perf_counter if gpu else time.process_time
    begin = clock()
    step()
    issued = clock()
    if gpu:
        torch.accelerator.synchronize()
    return 1e3 * (issued - begin), 1e3 * (clock() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of each (default: 40, on a GPU 15)")
    options = parser.parse_args()
    if not options.gpu:
        torch.set_num_threads(1)
    runtime.use_spmd(device=None if options.gpu else "cpu")
    shape = (4, 1024) if options.gpu else (1, 8)
    ids = torch.randint(0, 500, shape, device=runtime.device())
    steps = {
        "autocast": step_of(model(options.gpu), ids, autocast=True),
        "fully_shard": step_of(sharded_by_torch(options.gpu), ids, autocast=False),
        "fullshard": step_of(sharded_by_us(options.gpu), ids, autocast=False),
    }
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(options.steps or (15 if options.gpu else 40)):
        for name, step in steps.items():
            found[name].append(timed(step, options.gpu))
    report(found, options.gpu)
    runtime.shutdown()


def report(found: dict[str, list[tuple[float, float]]], gpu: bool) -> None:
    """A table: the median, and the fifth of the steps that other programs disturbed least."""
    what = ("host", "step") if gpu else ("CPU time",)
    for column, name in enumerate(what):
        print(f"{name + ', ms':<14}{'median':>9}{'/ autocast':>12}{'20 %':>9}{'/ autocast':>12}")
        rows = {kind: [pair[column] for pair in times] for kind, times in found.items()}
        middle = {kind: statistics.median(times) for kind, times in rows.items()}
        low = {kind: sorted(times)[len(times) // 5] for kind, times in rows.items()}
        for kind in rows:
            ratios = middle[kind] / middle["autocast"], low[kind] / low["autocast"]
            print(f"{kind:<14}{middle[kind]:>9.1f}{ratios[0]:>12.2f}{low[kind]:>9.1f}{ratios[1]:>12.2f}")


if __name__ == "__main__":
    main()
