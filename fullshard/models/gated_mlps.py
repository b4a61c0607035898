"""Which modules of a model are gated MLPs, `down(activation(gate(x)) * up(x))`, tried out on a small model of the same
class: inputs and outputs of the linear layers tell, names do not.

Each module is called in training mode, where dropout shows, and with large inputs too, where limits on its values show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.lora.gated_mlp import GatedParts
from fullshard.lora.gated_mlp_math import ACTIVATIONS
from fullshard.models.shared_inputs import recorded_pass

MAGNITUDES = (1.0, 30.0)
"""Of the inputs."""
Calls = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By name of a linear layer, its input and its output."""


def gated_mlps(model: Any) -> dict[type, GatedParts]:
    """The parts of gated MLPs by class of module. Empty if no small model of the class can be built or run."""
    return recorded_pass(model, record_gated_mlps) or {}


@torch.no_grad()
def record_gated_mlps(model: nn.Module, input_ids: torch.Tensor) -> dict[type, GatedParts]:
    """The gated MLPs among the modules that run in a forward pass."""
    inputs: dict[nn.Module, torch.Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            inputs[module] = args[0]

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if len(_linear_layers(module)) == 3
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[type, set[GatedParts | None]] = defaultdict(set)
    for module, x in inputs.items():
        found[type(module)].add(_parts(module, x))
    single = {kind: next(iter(parts)) for kind, parts in found.items() if len(parts) == 1}
    return {kind: parts for kind, parts in single.items() if parts is not None}


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _parts(module: nn.Module, x: torch.Tensor) -> GatedParts | None:
    """The roles of a module's three linear layers, if it computes a gated MLP."""
    module.train()
    try:
        tried = [set(_formulas(*_called(module, torch.randn_like(x) * magnitude))) for magnitude in MAGNITUDES]
    except Exception:
        return None
    finally:
        module.eval()
    fitting = set.intersection(*tried)
    return fitting.pop() if len(fitting) == 1 else None


def _called(module: nn.Module, x: torch.Tensor) -> tuple[Calls, Any]:
    """What the linear layers of a module do in one call, and the module's output."""
    calls: Calls = {}

    def recorder(name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            calls[name] = args[0].clone(), out.clone()

        return note

    hooks = [child.register_forward_hook(recorder(name)) for name, child in _linear_layers(module).items()]
    try:
        return calls, module(x)
    finally:
        for hook in hooks:
            hook.remove()


def _formulas(calls: Calls, output: Any) -> Iterator[GatedParts]:
    """The formulas of a gated MLP that give what the layers got and what came out."""
    if len(calls) != 3 or not isinstance(output, torch.Tensor):
        return
    for down, (entered, left) in calls.items():
        one, other = (name for name in calls if name != down)
        for gate, up in ((one, other), (other, one)):
            fits = torch.equal(calls[gate][0], calls[up][0]) and torch.equal(left, output)
            for name, function in ACTIVATIONS.items() if fits else ():
                expected = function(calls[gate][1])[0] * calls[up][1]
                close = 1e-5 * float(entered.abs().mean())
                if expected.shape == entered.shape and torch.allclose(expected, entered, rtol=1e-5, atol=close):
                    yield GatedParts(gate, up, down, name)
