"""Which modules of a model are gated MLPs, `down(activation(gate(x)) * up(x))`, tried out on a small model of the same
class: inputs and outputs of the linear layers tell, names do not.

Each module is called in training mode, where dropout shows, and with large inputs too, where limits on its values show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.device.torch_private import version_of
from fullshard.lora.gated_mlp import GatedParts
from fullshard.lora.gated_mlp_math import ACTIVATIONS
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.tiny_model import (
    SPECIAL,
    VOCABULARY,
    bare_model,
    forked_random,
    quiet_transformers,
    small_models,
)

TOKENS = 12

Names = tuple[str, ...]
Found = TypeVar("Found")


def shared_inputs(model: Any) -> dict[type, list[Names]]:
    """By class of module, the names of its linear layers that get the same tensor, in the order of their calls.

    Empty if no small model of the class can be built or run.
    """
    return recorded_pass(model, record_shared_inputs) or {}


def recorded_pass(model: Any, recorder: Callable[[nn.Module, torch.Tensor], Found]) -> Found | None:
    """What is recorded in a forward pass of a small model of the same class; None if none can be built or run."""
    device = torch.device("cpu")
    with forked_random(device), quiet_transformers():
        try:
            for small in small_models(bare_model(get_causal_lm(model)), device):
                try:
                    with device:  # whatever the default device is
                        return recorder(small, torch.randint(SPECIAL, VOCABULARY, (1, TOKENS)))
                except Exception:
                    continue
        except Exception:
            return None
    return None


@torch.no_grad()
def record_shared_inputs(model: nn.Module, input_ids: torch.Tensor) -> dict[type, list[Names]]:
    """The groups of linear layers that get the same tensor in a forward pass, in all modules of a class."""
    calls: dict[nn.Module, list[tuple[str, torch.Tensor, int]]] = defaultdict(list)

    def recorder(parent: nn.Module, name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                calls[parent].append((name, args[0], version_of(args[0])))

        return note

    hooks = [
        child.register_forward_pre_hook(recorder(parent, name))
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    by_class: dict[type, list[Names]] = {}
    for parent, inputs in calls.items():
        groups = _same_tensor(inputs)
        previous = by_class.setdefault(type(parent), groups)
        by_class[type(parent)] = [group for group in previous if group in groups]
    return by_class


def _same_tensor(inputs: list[tuple[str, torch.Tensor, int]]) -> list[Names]:
    by_tensor: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, tensor, version in inputs:
        by_tensor[id(tensor), version].append(name)
    return [tuple(dict.fromkeys(names)) for names in by_tensor.values() if len(set(names)) > 1]


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
    parts_by_class: dict[type, set[GatedParts | None]] = defaultdict(set)
    for module, x in inputs.items():
        parts_by_class[type(module)].add(_parts(module, x))
    single = {kind: next(iter(parts)) for kind, parts in parts_by_class.items() if len(parts) == 1}
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
