"""Which linear layers of a model get the same input, recorded on a small model of the same class.

Names do not tell: queries, keys and values share an input in most models, not in those with latent attention or
cross-attention. One forward pass of a small model shows which layers of a module got the identical tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.models.inner_model import causal
from fullshard.models.small_copy import SPECIAL, VOCABULARY, bare_model, forked_random, quiet_transformers, small_models
from fullshard.torch_private import version_of

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
            for small in small_models(bare_model(causal(model)), device):
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
    found: dict[type, list[Names]] = {}
    for parent, inputs in calls.items():
        groups = _same_tensor(inputs)
        known = found.setdefault(type(parent), groups)
        found[type(parent)] = [group for group in known if group in groups]
    return found


def _same_tensor(inputs: list[tuple[str, torch.Tensor, int]]) -> list[Names]:
    by_tensor: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, tensor, version in inputs:
        by_tensor[id(tensor), version].append(name)
    return [tuple(dict.fromkeys(names)) for names in by_tensor.values() if len(set(names)) > 1]
