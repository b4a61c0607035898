"""`fullshard test`: trains a tiny sharded model with the user's configuration and reports each check.

It runs on every rank, started like any script. The layers of the tiny model have the class names that the configuration
wraps, so the same wrap policy applies.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.errors import TrainingError, UserError
from fullshard.device import accelerator
from fullshard.distributed import engines, groups
from fullshard.distributed import runtime as xr
from fullshard.distributed.temporary_folders import owned_prefix
from fullshard.fsdp.strategy import dtype_of
from fullshard.parallel.prepare import prepare
from fullshard.parallel.settings import EngineSettings
from fullshard.spmd import full_tensor

STEPS, ROWS, WIDTH = 3, 8, 16
OK = "ok      "
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed relative difference of losses from one device in fp32, by compute dtype."""


class Layer(nn.Module):
    """A residual layer of the model that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer on a batch of rows."""
        return x + torch.tanh(self.inner(self.norm(x)))


def tiny_model(layer_names: tuple[str, ...]) -> nn.Module:
    """Four layers whose classes have these names, and a head."""
    classes = [type(name, (Layer,), {}) for name in layer_names or ("Layer",)]
    layers = [classes[i % len(classes)]() for i in range(max(4, len(classes)))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    model._no_split_modules = sorted({c.__name__ for c in classes})
    return model


def main() -> None:
    """Run all checks on this rank."""
    settings = EngineSettings.from_environment()
    xr.use_spmd(device="cpu" if settings.use_cpu else None)
    xr.get_logger().setLevel("WARNING")  # the same is reported below
    xr.seed(0)
    device, world = xr.device(), xr.world_size()
    say(f"{world} process(es) on {xr.node_count()} machine(s) are connected; the device of each is {device.type}")
    if engines.current().drives_machine:
        say(f"one process drives {xr.global_device_count()} {xr.device_type()} device(s)")
    ranks = torch.tensor([float(xr.rank() + 1)], device=device)
    if world > 1:
        dist.all_reduce(ranks)
    expect(ranks.item() == world * (world + 1) / 2, "an all-reduce over all ranks is correct")
    way = xr.transport()
    if accelerator.is_accelerator(device):
        expect(not way.fix, f"NCCL is used where each rank has its own GPU. {way.fix}".strip())
    xr.announce_transport(say)

    model = tiny_model(settings.transformer_layer_cls_to_wrap or ())
    plain = copy.deepcopy(model).to(device)
    inputs = torch.randn(ROWS * world, WIDTH, device=device)
    targets = inputs.sum(1, keepdim=True).tanh()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), inputs, targets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if settings.ignored_modules is not None:
        say("fsdp_ignored_modules names modules of your model; not tested with this model")
        settings = dataclasses.replace(settings, ignored_modules=None)
    model, optimizer = prepare(model, optimizer, settings=settings)
    mine = slice(xr.rank() * ROWS, (xr.rank() + 1) * ROWS)
    losses = train(model, optimizer, inputs[mine], targets[mine])
    say(f"the model is sharded: {str(model.plan).splitlines()[0]}")
    if not engines.current().compiles_steps:
        check_links(model, way.backend)
    computed = dtype_of("fp32" if settings.mixed_precision == "no" else settings.mixed_precision)
    assert computed is not None
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    expect(
        worst <= TOLERANCE[computed],
        f"{STEPS} training steps give one device's losses (largest difference {worst:.1e}, computed in {computed})",
    )
    try_checkpoint(model, optimizer)
    say("everything works with this configuration")


def train(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Train a few steps; returns the losses over the rows of all ranks."""
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if xr.world_size() > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / xr.world_size())
    return losses


def check_links(model: Any, backend: str) -> None:
    """Check that the sharded model's process groups use the same backend as the default group."""
    context = model._fullshard_engine.context
    links = [
        link for link in (context.gather_link, context.reduce_link, context.replica_link) if link.group is not None
    ]
    backends = {groups.backend_of(link.group, xr.device()) for link in links}
    through_host = any(link.from_host for link in links)
    right = backends <= {backend} and not (backend != "gloo" and through_host)
    if links:
        expect(right, f"all-gathers and reductions of the sharded model use the same transport ({backend})")


def try_checkpoint(model: Any, optimizer: Any) -> None:
    """Save and restore a checkpoint, if that part of fullshard is installed."""
    if importlib.util.find_spec("fullshard.checkpoint.manager") is None:
        return
    from fullshard.checkpoint.manager import load_state, save_state

    folder = [tempfile.mkdtemp(prefix=owned_prefix()) if xr.is_main() else ""]
    if xr.world_size() > 1:
        dist.broadcast_object_list(folder, src=0)
    before = [full_tensor(p.detach()).clone() for p in model.parameters()]
    save_state(Path(folder[0]) / "checkpoint", model=model, optimizer=optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_state(Path(folder[0]) / "checkpoint", model=model, optimizer=optimizer)
    same = all(torch.equal(full_tensor(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
    xr.barrier()
    if xr.is_main():
        shutil.rmtree(folder[0])
    expect(same, "a checkpoint was saved and restored bit for bit")


def say(line: str) -> None:
    """Print a line of the report, wrapped to the width of the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(line) + len(OK)
    xr.print0(textwrap.fill(line, width, initial_indent=OK, subsequent_indent=" " * len(OK)))


def expect(right: bool, what: str) -> None:
    """Report a check that passed; raise on every rank if it failed on any."""
    wrong = torch.tensor([0.0 if right else 1.0], device=xr.device())
    if xr.world_size() > 1:
        dist.all_reduce(wrong)
    if wrong.item():
        raise TrainingError(f"failed on {int(wrong.item())} rank(s): {what}")
    say(what)


if __name__ == "__main__":
    try:
        main()
    except UserError:
        xr.print0("failed  see the message below")
        raise
