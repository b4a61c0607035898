"""Which modules of a model are gated MLPs, `down(activation(gate(x)) * up(x))`, recorded on a small model of the same
class: inputs and outputs of the linear layers tell, names do not."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from fullshard.lora.gated_mlp import ACTIVATIONS, GatedParts
from fullshard.models.shared_inputs import recorded_pass

Calls = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By name of a linear layer, its input and its output."""


def gated_mlps(model: Any) -> dict[type, GatedParts]:
    """The parts of gated MLPs by class of module. Empty if no small model of the class can be built or run."""
    return recorded_pass(model, record) or {}


@torch.no_grad()
def record(model: nn.Module, input_ids: torch.Tensor) -> dict[type, GatedParts]:
    """The gated MLPs among the modules that run in a forward pass."""
    calls: dict[nn.Module, Calls] = defaultdict(dict)
    outputs: dict[nn.Module, list[torch.Tensor]] = defaultdict(list)
    hooks = []

    def linear(parent: nn.Module, name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and isinstance(out, torch.Tensor):
                calls[parent][name] = args[0].clone(), out.clone()

        return note

    def parent_output(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        outputs[module].append(out)

    for parent in model.modules():
        linears = [(name, child) for name, child in parent.named_children() if isinstance(child, nn.Linear)]
        if len(linears) == 3 and all(not list(child.children()) for _, child in linears):
            hooks += [child.register_forward_hook(linear(parent, name)) for name, child in linears]
            hooks.append(parent.register_forward_hook(parent_output))
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[type, set[GatedParts | None]] = defaultdict(set)
    for module, seen in calls.items():
        found[type(module)].add(_parts(seen, outputs[module]))
    single = {kind: next(iter(parts)) for kind, parts in found.items() if len(parts) == 1}
    return {kind: parts for kind, parts in single.items() if parts is not None}


def _parts(calls: Calls, outputs: list[torch.Tensor]) -> GatedParts | None:
    """The roles of three linear layers, if their module computes a gated MLP."""
    if len(calls) != 3 or len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor):
        return None
    for down, (entered, left) in calls.items():
        one, other = (name for name in calls if name != down)
        for gate, up in ((one, other), (other, one)):
            shared = torch.equal(calls[gate][0], calls[up][0]) and torch.equal(left, outputs[0])
            for name, function in ACTIVATIONS.items() if shared else ():
                expected = function(calls[gate][1])[0] * calls[up][1]
                if expected.shape == entered.shape and torch.allclose(expected, entered, rtol=1e-4, atol=1e-5):
                    return GatedParts(gate, up, down, name)
    return None
