"""`checkpoint_module` on XLA: activations are really computed twice, and nothing else changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla")

import torch
from torch import nn

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.errors import RuntimeSetupError
from fullshard.fsdp import FSDPv2, checkpoint_module

STEP = """
    import sys
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
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if sys.argv[1] == "without barrier":
        recomputation._Call._put_barrier = lambda self: None
    if sys.argv[1] != "kept":
        for block in model:
            checkpoint_module(block)
    FSDPv2(model, mesh, auto_wrap_policy={Block})
    x = xs.mark_sharding(torch.randn(8, 16).to(xr.device()), mesh, ("fsdp", None))
    xr.sync(wait=True)
    model(x).square().mean().backward()
    xr.sync(wait=True)
"""


def compiled_tanhs(how: str, folder: Path) -> int:
    """How many tanh the optimized program of a step has, in the compiler's own dump."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(STEP), how], env=environment, check=True, capture_output=True)
    dumps = [path.read_text() for path in folder.glob("*after_optimizations.txt")]
    return max(len(re.findall(r" tanh\(", text)) for text in dumps)


def test_the_compiler_really_computes_twice(tmp_path):
    """Two blocks have a tanh each; a step that recomputes them has four, unless the compiler merges them again."""
    counts = {how: compiled_tanhs(how, tmp_path / how.replace(" ", "-")) for how in ("kept", "recomputed")}
    assert counts == {"kept": 2, "recomputed": 4}


@pytest.mark.slow
def test_without_the_barrier_the_compiler_merges_both(tmp_path):
    assert compiled_tanhs("without barrier", tmp_path) == 2


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
