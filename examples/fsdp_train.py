"""The examples of the FSDPv2 guide: wrap a model, wrap each layer, shard the output, checkpoint activations.

    python examples/fsdp_train.py                              # one process
    torchrun --nproc_per_node 4 examples/fsdp_train.py         # four ranks

Each rank runs the same program on the same global tensors, as on one device.
"""

import functools

import numpy as np
import torch
from torch import nn

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard import FSDPv2, checkpoint_module
from fullshard.fsdp.wrap import transformer_auto_wrap_policy

VOCABULARY, WIDTH, ROWS, LENGTH = 128, 64, 8, 16


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x)).cumsum(dim=1) / LENGTH  # each position depends on those before it
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Takes token ids and, optionally, targets; returns logits or the loss."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(name: str, model: nn.Module, mesh: xs.Mesh, steps: int = 5) -> None:
    """Train a few steps on one batch; the loss must decrease."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    x = xs.mark_sharding(x, mesh, ("fsdp", None))  # only the input; y is a global value
    losses = []
    for _ in range(steps):
        output = model(x, y)
        loss = output if output.ndim == 0 else output.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    xr.print0(f"{name}: loss {losses[0]:.4f} → {losses[-1]:.4f}")
    assert losses[-1] < losses[0], losses


def main() -> None:
    xr.use_spmd()
    num_devices = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(num_devices), (num_devices, 1), ("fsdp", "model"))

    torch.manual_seed(0)
    train("plain", FSDPv2(Decoder(), mesh), mesh)

    auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})
    torch.manual_seed(0)
    model = FSDPv2(Decoder(), mesh=mesh, auto_wrap_policy=auto_wrap_policy)
    train("one unit per layer", model, mesh)
    xr.print0(model.plan)

    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class WithOutput(Decoder):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Output:  # type: ignore[override]
            return Output(super().forward(x))

    def shard_output(output: Output, mesh: xs.Mesh) -> None:
        xs.mark_sharding(output.logits, mesh, ("fsdp", None, None))  # in place; the result is not needed

    torch.manual_seed(0)
    model = FSDPv2(WithOutput(), mesh, shard_output)
    x = xs.mark_sharding(torch.randint(0, VOCABULARY, (ROWS, LENGTH)), mesh, ("fsdp", None))
    output = model(x)
    output.logits.sum().backward()
    xr.print0(f"output: {tuple(output.logits.shape)} laid out as {output.logits.sharding_spec}")

    torch.manual_seed(0)
    train("checkpointed", FSDPv2(checkpoint_module(Decoder()), mesh), mesh)
    torch.manual_seed(0)
    model = FSDPv2(
        Decoder(), mesh, auto_wrap_policy=auto_wrap_policy,
        auto_wrapper_callable=lambda m, *args, **kwargs: FSDPv2(checkpoint_module(m), *args, **kwargs),
    )  # fmt: skip
    train("checkpointed per layer", model, mesh)


if __name__ == "__main__":
    main()
