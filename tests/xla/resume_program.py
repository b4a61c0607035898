"""A training program for both engines: it trains a tiny Llama, from and to a checkpoint, and prints the losses.

    resume_program.py '{"load": DIRECTORY, "save": DIRECTORY, "steps": 2}'

On the torch engine every rank computes its rows of the batch; on XLA one process has all rows, split over the devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard import FSDPv2
from fullshard.checkpoint import load_state, save_state

ROWS, LENGTH, VOCAB = 8, 12, 61


def config(**options: Any) -> LlamaConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **options})


def batch(step: int) -> torch.Tensor:
    """The rows of a step, the same in every process."""
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step % 2))


def loss_of(model: Any, mesh: xs.Mesh, step: int) -> torch.Tensor:
    rows = batch(step)
    if xr.device().type == "xla":
        axes = tuple(axis for axis in mesh.axis_names or () if axis in ("replica", "fsdp"))
        ids = xs.mark_sharding(rows.to(xr.device()), mesh, (axes, None))
    else:
        ids = rows.chunk(xr.world_size())[xr.rank()].to(xr.device())
    return model(input_ids=ids, labels=ids).loss


def train(model: Any, optimizer: torch.optim.Optimizer, mesh: xs.Mesh, steps: range) -> list[float]:
    """The loss of each step, over the whole batch."""
    losses = []
    for step in steps:
        loss = loss_of(model, mesh, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xr.sync()
        value = loss.detach().float().cpu()
        if xr.device().type != "xla" and xr.world_size() > 1:
            dist.all_reduce(value)
            value /= xr.world_size()
        losses.append(float(value))
    return losses


def main(load: str | None = None, save: str | None = None, steps: int = 2, start: int = 0, lora: bool = False) -> None:
    xr.use_spmd()
    mesh = xs.get_1d_mesh("fsdp")
    torch.manual_seed(3 if load else 0)  # other values where they are to come from the checkpoint
    model: Any = LlamaForCausalLM(config())
    if lora:
        model = with_lora(model)
    model = FSDPv2(model, mesh)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    if load:
        start = load_state(load, model=model, optimizer=optimizer, start=None)["start"]
    losses = train(model, optimizer, mesh, range(start, start + steps))
    if save:
        save_state(save, model=model, optimizer=optimizer, start=start + steps)
    if xr.is_main():
        print("LOSSES", json.dumps(losses))


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
