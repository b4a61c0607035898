"""`checkpoint_module` on XLA: activations are really computed twice, and nothing else changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla")

import torch
from torch import nn

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.config.errors import RuntimeSetupError
from fullshard.fsdp import FSDPv2, checkpoint_module

STEPS = """
    import numpy as np
    import torch
    from torch import nn
    import fullshard.runtime as xr
    import fullshard.spmd as xs
    from fullshard.fsdp import FSDPv2, checkpoint_module
    from fullshard.xla import recomputation

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    xr.use_spmd()
    n = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(n), (n,), ("fsdp",))
    put_barrier = recomputation._Call._put_barrier
    for rows, (how, strategy) in enumerate((
        ("kept", "NO_SHARD"), ("recomputed", "NO_SHARD"), ("without barrier", "NO_SHARD"), ("recomputed", "FULL_SHARD"),
    ), start=8):  # each its own number, so that no program is reused
        recomputation._Call._put_barrier = (lambda call: None) if how == "without barrier" else put_barrier
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        if how != "kept":
            for block in model:
                checkpoint_module(block)
        FSDPv2(model, mesh, strategy=strategy, auto_wrap_policy={Block})
        x = torch.randn(rows, 16).to(xr.device())
        xr.sync(wait=True)
        model(x).square().mean().backward()
        xr.sync(wait=True)
"""


def test_the_compiler_really_computes_twice(tmp_path):
    """Two blocks have a tanh each; a step that recomputes them has four in the compiler's own dump.

    After the partitioner, which runs for every kind of device, they are merged only without the barrier. The compiler
    for CPUs removes barriers later on; there the final program still computes twice what is gathered twice.
    """
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=cse"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEPS)],
        env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    partitioned, final = ({}, {})
    for path in sorted(tmp_path.glob("module_*.txt")):  # modules and passes are numbered
        for found, kind in ((partitioned, ".spmd-cleanup.after_cse."), (final, "after_optimizations.txt")):
            if kind in path.name:
                found[path.name.split(".")[0]] = len(re.findall(r" tanh\(", path.read_text()))
    assert [count for count in partitioned.values() if count] == [2, 4, 2, 4]
    assert [count for count in final.values() if count][-1] == 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + scale * self.down(self.drop(torch.tanh(self.up(x))))


@pytest.fixture(scope="module")
def mesh() -> xs.Mesh:
    xr.use_spmd()
    n = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(n), (n,), ("fsdp",))


def gradients(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model(x).square().mean().backward()
    xr.sync()
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def made(mesh: xs.Mesh | None, recompute: str = "", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(dropout), Block(dropout))
    if recompute == "before":
        for block in model:
            checkpoint_module(checkpoint_module(block))  # a second call has no effect
    if mesh is not None:
        FSDPv2(model, mesh, auto_wrap_policy={Block})
    if recompute == "after":
        for block in model:
            checkpoint_module(block, reentrant=True)
    return model


@pytest.mark.parametrize("recompute", ["before", "after"])
def test_gradients_are_those_of_one_device_without_inputs_that_require_them(mesh, recompute):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model = made(mesh, recompute)
    expected = gradients(made(None), x)
    found = gradients(model, xs.mark_sharding(x.to(xr.device()), mesh, ("fsdp", None)))
    assert [block.calls for block in model] == [2, 2]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert xs.sharding_of(model[0].up.weight).spec == ("fsdp", None)


def test_dropout_is_drawn_alike(mesh):
    x = xs.mark_sharding(torch.randn(8, 6).to(xr.device()), mesh, ("fsdp", None))
    found = []
    for recompute in ("", "before"):
        xr.seed(3)
        found.append(gradients(made(mesh, recompute, dropout=0.5), x))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-6, atol=1e-7)


def test_keyword_arguments_and_evaluation(mesh):
    model = made(mesh, "before")
    x = torch.randn(8, 6).to(xr.device())
    with torch.no_grad():
        expected = x + 2.0 * (model[0](x) - x)
        torch.testing.assert_close(model[0](x, scale=2.0).cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)


def test_inputs_in_host_memory_are_refused(mesh):
    with pytest.raises(RuntimeSetupError, match=r"checkpoint_module\(offload=True\)"):
        checkpoint_module(Block(), offload=True)
