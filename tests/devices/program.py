"""Trains a small model on the stand-in device, and the same on one CPU; rank 0 prints both losses as JSON.

Arguments: the folder of the compiled device, a folder for the checkpoint.
"""

import functools
import json
import sys

import numpy as np
import torch
from torch import nn

import fullshard
import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.device import accelerator
from fullshard.fsdp import FSDPv2
from fullshard.fsdp.wrap import size_based_auto_wrap_policy
from tests.devices import stand_in

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 12), nn.Linear(12, 30), nn.GELU(), nn.LayerNorm(30), nn.Linear(30, 32))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (4, 9), generator=generator) for _ in range(STEPS)]


def train(net: nn.Module, data: list[torch.Tensor], norm) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for tokens in data:
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm(net)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str, checkpoint: str) -> None:
    clip = lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # noqa: E731
    stand_in.register(folder)
    alone = train(model(), batches(), clip)
    xr.use_spmd()
    device = xr.device()
    mesh = xs.Mesh(np.arange(xr.world_size()), (xr.world_size(),), ("fsdp",))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    results = {"one CPU": alone, "device": str(device), "transport": str(xr.transport())}
    for way in ("plain", "offload"):
        net = FSDPv2(model(), mesh, auto_wrap_policy=policy,
                     cpu_offload=way == "offload")  # fmt: skip
        mine = [xs.mark_sharding(tokens.to(device), mesh, ("fsdp", None)) for tokens in batches()]
        results[way] = train(net, mine, lambda net: net.clip_grad_norm_(1.0))
        results[f"{way} lives on"] = sorted({p.device.type for p in net.parameters()})
    fullshard.save_state(checkpoint, {"model": net, "x": torch.arange(6.0, device=device)})
    other = {"model": FSDPv2(model(), mesh), "x": torch.zeros(6, device=device)}
    fullshard.load_state(checkpoint, other)
    saved, loaded = net.full_state_dict(), other["model"].full_state_dict()
    results["restored"] = all(torch.equal(saved[name].cpu(), loaded[name].cpu()) for name in saved)
    results["x"] = other["x"].tolist()
    results["allocated"] = accelerator.allocated_memory(device)
    results["peak"] = accelerator.peak_memory(device)
    if xr.is_main():
        print(json.dumps(results))
    xr.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
