"""How modules use their linear layers, recorded on a small model of the same class.

Names do not tell: queries, keys and values share an input in most models, not in those with latent attention or
cross-attention. One forward pass of a small model shows which layers of a module got the identical tensor. A module is
a gated MLP if it computes `down(f(gate(x)) · up(x))` for a known f: its numbers are compared.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.lora.fused import Gated, LinearUses
from fullshard.lora.fused_mlp import ACTIVATIONS
from fullshard.models.inner_model import causal
from fullshard.models.small_copy import SPECIAL, VOCABULARY, bare_model, forked_random, quiet_transformers, small_models

TOKENS = 12
MAGNITUDES = (1.0, 30.0)
"""Of the inputs that a gated MLP is tested with: large ones show limits on its values."""


class Call(NamedTuple):
    """A call of a linear layer."""

    name: str
    x: torch.Tensor
    version: int
    """Of `x`, which may be changed in place between calls."""
    y: torch.Tensor


def linear_uses(model: Any) -> LinearUses:
    """How the model's modules use their linear layers. Empty if no small model of its class can be built or run."""
    device = torch.device("cpu")
    with forked_random(device), quiet_transformers():
        try:
            for small in small_models(bare_model(causal(model)), device):
                try:
                    return record(small, torch.randint(SPECIAL, VOCABULARY, (1, TOKENS)))
                except Exception:
                    continue
        except Exception:
            pass
    return LinearUses({}, {})


@torch.no_grad()
def record(model: nn.Module, input_ids: torch.Tensor) -> LinearUses:
    """What a forward pass shows."""
    with _recorded(model) as calls:
        model(input_ids=input_ids, use_cache=False)
    shared: dict[type, list[tuple[str, ...]]] = {}
    gated: dict[type, Gated | None] = {}
    for parent, made in calls.items():
        groups, kind = _same_tensor(made), type(parent)
        shared[kind] = [group for group in shared.get(kind, groups) if group in groups]
        found = _gated(parent, made) if len(made) == 3 else None
        gated[kind] = found if gated.get(kind, found) == found else None
    return LinearUses(shared, {kind: one for kind, one in gated.items() if one is not None})


@contextlib.contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[nn.Module, list[Call]]]:
    """Inside, calls of linear layers are recorded, by the module that has the layer."""
    calls: dict[nn.Module, list[Call]] = defaultdict(list)

    def recorder(parent: nn.Module, name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(args) == 1 and isinstance(args[0], torch.Tensor):
                calls[parent].append(Call(name, args[0], args[0]._version, output))

        return note

    hooks = [
        child.register_forward_hook(recorder(parent, name))
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _same_tensor(calls: list[Call]) -> list[tuple[str, ...]]:
    by_tensor: dict[tuple[int, int], list[str]] = defaultdict(list)
    for call in calls:
        by_tensor[id(call.x), call.version].append(call.name)
    return [tuple(dict.fromkeys(names)) for names in by_tensor.values() if len(set(names)) > 1]


def _gated(module: nn.Module, calls: list[Call]) -> Gated | None:
    """The layers of a gated MLP; None for other modules. Tried while training, so that dropout shows."""
    module.train()
    try:
        found: set[Gated] = set()
        for magnitude in MAGNITUDES:
            x = torch.randn_like(calls[0].x) * magnitude
            with _recorded(module) as inside:
                out = module(x)
            tried = _formulas(x, inside[module], out)
            found = tried if magnitude == MAGNITUDES[0] else found & tried
        return next(iter(found)) if len(found) == 1 else None
    except Exception:
        return None
    finally:
        module.eval()


def _formulas(x: torch.Tensor, calls: list[Call], out: Any) -> set[Gated]:
    """The formulas of a gated MLP that give what the layers got and what came out."""
    one, other, down = calls
    if out is not down.y or one.x is not x or other.x is not x:
        return set()
    return {
        Gated(gate.name, up.name, down.name, activation)
        for (gate, up), (activation, f) in itertools.product(((one, other), (other, one)), ACTIVATIONS.items())
        if torch.allclose(f(gate.y) * up.y, down.x, rtol=1e-5, atol=1e-5 * float(down.x.abs().mean()))
    }
