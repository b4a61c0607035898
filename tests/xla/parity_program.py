"""Trains tiny models on the interpreter's engine and writes losses and gradients: `parity_program.py FOLDER NAME…`.

The initial values are in `FOLDER/NAME-initial.npz`. The torch engine runs it on several ranks, XLA on several devices.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

STEPS = 3


def made(name: str) -> Any:
    """A tiny model in fp32 without dropout, drawn on the host."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def tokens() -> torch.Tensor:
    """The global batch."""
    return torch.from_numpy(np.random.RandomState(0).randint(0, 96, (8, 16)))


def train(model: nn.Module, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """The losses of some steps, and the gradients of the first."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, found = [], {}
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == 0:
            xr.sync()  # before values are read: each would compile a program of its own
            named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found = {name: xs.full_tensor(grad).cpu().numpy() for name, grad in named.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        xr.sync()
    return {"losses": np.array([mean_over_processes(loss) for loss in losses]), **found}


def mean_over_processes(value: torch.Tensor) -> float:
    total = value.cpu().double()
    if xr.process_count() > 1:
        dist.all_reduce(total)
    return float(total) / xr.process_count()


def sharded_batch(mesh: xs.Mesh) -> torch.Tensor:
    """This process's rows of the batch, split over its devices."""
    ids = tokens().chunk(xr.process_count())[xr.process_index()].to(xr.device())
    axes = tuple(name for name in mesh.shape() if name != "model")
    return xs.mark_sharding(ids, mesh, (axes, None)) if xr.addressable_device_count() > 1 else ids


def main(folder: Path, names: list[str]) -> None:
    xr.use_spmd()
    n = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(n), (n,), ("fsdp",))
    for name in names:
        model = made(name)
        initial = {key: torch.from_numpy(value) for key, value in np.load(folder / f"{name}-initial.npz").items()}
        model.load_state_dict(initial)
        FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy)
        found = train(model, sharded_batch(mesh))
        if xr.process_index() == 0:
            np.savez(folder / f"{name}-torch.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
