"""A fully sharded Hugging Face Llama with per-rank batches, as in any data-parallel program.

    python examples/llama_fsdp.py                                          # one process
    torchrun --nproc_per_node 2 examples/llama_fsdp.py                     # two ranks
    torchrun --nproc_per_node 4 examples/llama_fsdp.py --strategy HYBRID_SHARD --mixed-precision bf16
    fullshard launch --config_file fsdp.yaml examples/llama_fsdp.py        # settings from a file

The model is small with random weights; `--model NAME_OR_PATH` uses another one. The global batch is the same on any
number of ranks, so the losses agree. Without flags, the launched configuration decides how the model is sharded.
"""

import argparse
import dataclasses

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fullshard.runtime as xr
from fullshard import checkpoint_module
from fullshard.parallel.model import shard_model
from fullshard.parallel.settings import EngineSettings


def build(name: str | None) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings_for(options: argparse.Namespace) -> EngineSettings:
    """The launched configuration, with the flags taking precedence."""
    settings = EngineSettings.from_environment()
    if options.strategy is not None:
        settings = dataclasses.replace(settings, sharding_strategy=options.strategy, reshard_after_forward=None)
    if options.mixed_precision is not None:
        settings = dataclasses.replace(settings, mixed_precision=options.mixed_precision)
    if options.cpu_offload:
        settings = dataclasses.replace(settings, offload_params=True)
    if settings.hybrid and settings.dp_replicate_size is None and xr.node_count() == 1 and xr.world_size() > 1:
        settings = dataclasses.replace(settings, dp_replicate_size=2)
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--strategy")
    parser.add_argument("--mixed-precision")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="rows of the global batch")
    options = parser.parse_args()

    xr.use_spmd()
    xr.seed(0)
    model = build(options.model)
    for layer in model.model.layers:
        checkpoint_module(layer)
    model = shard_model(model, settings_for(options))
    xr.print0(str(model.plan).splitlines()[0])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 256, (options.rows, 32))  # the same on every rank
    mine = ids.chunk(xr.world_size())[xr.rank()].to(xr.device())
    for step in range(options.steps):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if xr.world_size() > 1:
            torch.distributed.all_reduce(mean)
        xr.print0(f"step {step}: loss {mean.item() / xr.world_size():.4f}, gradient norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
