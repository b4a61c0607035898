"""The kernels between the products of a gated MLP, in Triton's interpreter; the oracle is autograd."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=1 is not set, and there is no GPU", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from fullshard.lora import fused_kernels, gated_mlp_kernels
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.gated_mlp_math import ACTIVATIONS

TOKENS, INNER, RANKS, DOWN_RANK, SCALES = 37, 200, (4, 3), 5, (1.5, 0.7)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


class SmallDevice:
    """A kernel on a device whose shared memory only has room for small tiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.tiles = kernel, list[tuple[int, int]]()

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.tiles.append((options["ROWS"], options["STAGES"]))
            if options["ROWS"] > 16:
                raise OutOfResources(200_000, 100_000, "shared memory")
            return self.kernel[grid](*args, **options)

        return run


def test_tiles_that_do_not_fit_into_shared_memory_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallDevice(gated_mlp_kernels._forward)
    for name, kernel in (("_forward", small), ("_backward", SmallDevice(gated_mlp_kernels._backward))):
        monkeypatch.setattr(gated_mlp_kernels, name, kernel)
    monkeypatch.setattr(fused_kernels, "_fitting", {})
    test_forward_and_backward("silu", True)
    test_forward_and_backward("silu", True)
    assert small.tiles == [(64, 1), (32, 1), (16, 1), (16, 1)]  # float32 is not loaded ahead; the result is remembered
    options = list(fused_kernels._ever_smaller(gated_mlp_kernels.BACKWARD, 2))
    tiles = [(one["ROWS"], one["STAGES"], one["num_warps"]) for one in options]
    assert tiles == [(128, 3, 8), (128, 2, 8), (128, 1, 8), (64, 1, 4), (32, 1, 4), (16, 1, 4)]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_backward(activation: str, drops: bool) -> None:
    torch.manual_seed(0)
    width, draw = max(RANKS), lambda *shape: torch.randn(*shape, device=DEVICE)
    gate, up, h = draw(TOKENS, INNER), draw(TOKENS, INNER), draw(TOKENS, 2 * width)
    h[:, width + RANKS[1] :] = 0
    b_gate, b_up, a_down = draw(INNER, RANKS[0]) / 3, draw(INNER, RANKS[1]) / 3, draw(DOWN_RANK, INNER)
    seed = torch.tensor([2**40 + 7], device=DEVICE)
    dropout = Dropout(seed, 0.3)
    drawn = (seed, dropout.threshold, dropout.scale) if drops else (None, 0, 1.0)
    mask = torch.ones(TOKENS, INNER, device=DEVICE)
    if drops:
        mask = fused_kernels.dropout_mask((TOKENS, INNER), 0, seed, dropout.threshold) * dropout.scale

    inputs = [t.clone().requires_grad_() for t in (gate, up, h)]
    g = inputs[0] + SCALES[0] * inputs[2][:, : RANKS[0]] @ b_gate.t()
    u = inputs[1] + SCALES[1] * inputs[2][:, width : width + RANKS[1]] @ b_up.t()
    middle = ACTIVATIONS[activation](g)[0] * u
    h_down = (middle * mask) @ a_down.t()
    found = gated_mlp_kernels.forward(gate, up, h, b_gate, b_up, SCALES, a_down, activation, *drawn)
    assert torch.allclose(found[0], middle, atol=1e-4) and torch.allclose(found[1], h_down, atol=1e-3)

    d_middle, dh_down = draw(TOKENS, INNER), draw(TOKENS, DOWN_RANK)
    ((middle * d_middle).sum() + (h_down * dh_down).sum()).backward()
    got = gated_mlp_kernels.backward(
        d_middle.clone(), gate, up, h, b_gate, b_up, SCALES, dh_down, a_down, activation, *drawn
    )
    for one, other in zip(got, (*(t.grad for t in inputs), middle), strict=True):
        assert torch.allclose(one, other, atol=1e-3)
