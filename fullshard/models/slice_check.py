"""Finds the parts of a model's layers that can run in slices of the sequence, on a small model of the same class.

A part can if the model's logits, its routers' loss and all gradients are the same when it runs in slices: then what it
returns for a token depends on that token alone. The largest such parts are taken; where one is not the same, the parts
inside it are tried.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.activations.levels import run_in_slices
from fullshard.activations.slices import SliceCount, run_whole, slice_module
from fullshard.config.errors import first_line
from fullshard.fsdp.compile import norms_between
from fullshard.models.attention import without_flex
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.tiny_model import (
    SPECIAL,
    VOCABULARY,
    bare_model,
    forked_random,
    quiet_transformers,
    small_models,
)

ROWS, LENGTH, SLICES = 2, 12, 3
"""The tokens of the trial; slices cross the border between the rows."""


@dataclass(frozen=True)
class SliceVerdict:
    """The result of the trial."""

    parts: frozenset[tuple[str, str]] = frozenset()
    """The parts that can run in slices: the class of the layer, and the name in it."""
    norms: bool = False
    """Whether the norms around the layers can."""
    reason: str = ""
    """Why there are none."""


_known: dict[tuple[type, str], SliceVerdict] = {}
"""Verdicts by class and configuration: a plan asks for many lengths."""


def try_slices(model: Any) -> SliceVerdict:
    """Try the parts of the layers of a small model like `model`, on the CPU. The random state is not changed."""
    inner = get_causal_lm(model)
    key = type(inner), inner.config.to_json_string()
    if key not in _known:
        _known[key] = _try(inner)
    return _known[key]


def _try(inner: Any) -> SliceVerdict:
    device, failure = torch.device("cpu"), ""
    with forked_random(device), quiet_transformers(), without_flex(), torch.enable_grad():
        try:
            for small in small_models(bare_model(inner), device):
                try:
                    trial = _Trial(small)
                    parts, norms = frozenset(trial.parts()), trial.norms()
                except Exception as error:
                    failure = failure or first_line(error)
                    continue
                return SliceVerdict(parts, norms, "" if parts else "no part of its layers computes each token alone")
        except Exception as error:
            failure = failure or first_line(error)
    return SliceVerdict(reason=failure or "there is no smaller model of its class")


class _Trial:
    """A small model, and what it computes without slices."""

    def __init__(self, small: Any) -> None:
        self.small = small
        self.ids = torch.randint(SPECIAL, VOCABULARY, (ROWS, LENGTH), device="cpu")
        self.expected = self._results()
        self.close = torch.finfo(small.dtype).eps ** 0.5

    def parts(self) -> set[tuple[str, str]]:
        """The class of the layer and the name in it, for each part that can run in slices in all layers of the class
        that have it."""
        verdicts: dict[tuple[str, str], bool] = {}
        for layer in layers_of(self.small):
            for path, fits in self._inside(layer, ""):
                key = type(layer).__name__, path
                verdicts[key] = verdicts.get(key, True) and fits
        return {key for key, fits in verdicts.items() if fits}

    def norms(self) -> bool:
        """Whether all norms around the layers can run in slices."""
        return all(map(self._fits, norms_between(self.small, layers_of(self.small))))

    def _inside(self, parent: nn.Module, prefix: str) -> Iterator[tuple[str, bool]]:
        for name, child in parent.named_children():
            if not any(True for _ in child.parameters()):
                continue
            fits = self._fits(child)
            yield prefix + name, fits
            if not fits:
                yield from self._inside(child, f"{prefix}{name}.")

    def _fits(self, module: nn.Module) -> bool:
        calls = 0
        own = module.forward

        @functools.wraps(own)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return own(*args, **kwargs)

        module.forward = counted
        slice_module(module, SliceCount(SLICES))
        try:
            results = self._results()
        except Exception:
            return False
        finally:
            run_whole(module)
            del module.forward
        # In each slice, forward and backward.
        return calls >= 2 * SLICES and all(map(self._same, results, self.expected))

    def _results(self) -> list[torch.Tensor | None]:
        """The logits and all gradients."""
        output = self.small(input_ids=self.ids, use_cache=False)
        logits = output.logits.float()
        loss = logits.square().mean()
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + output.aux_loss
        grads = torch.autograd.grad(loss, [p for p in self.small.parameters() if p.requires_grad], allow_unused=True)
        return [logits.detach(), *grads]

    def _same(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        return bool((one - other).abs().max() <= self.close * max(float(other.abs().max()), 1e-6))


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model of transformers."""
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    return (module for module in model.modules() if type(module).__name__ in names)


def apply_slices(
    model: nn.Module, verdict: SliceVerdict, count: SliceCount, units: Collection[nn.Module] = ()
) -> list[str]:
    """Let the parts of all layers run in slices that have something to gain, and the norms around the layers; returns
    the parts' names in a layer. A part with one of the `units` in it runs whole: its parameters would be gathered for
    each slice."""
    chosen: dict[str, None] = {}
    for layer in layers_of(model):
        paths = [path for kind, path in sorted(verdict.parts) if kind == type(layer).__name__]
        modules = dict(layer.named_modules())
        parts = {path: modules[path] for path in paths if path in modules and _gains(modules[path])}
        parts = {path: part for path, part in parts.items() if not any(inner in units for inner in part.modules())}
        if parts:
            run_in_slices(layer, list(parts.values()), count)
            chosen |= dict.fromkeys(parts)
    if chosen and verdict.norms:
        for norm in norms_between(model, layers_of(model)):
            slice_module(norm, count)
    return list(chosen)


def _gains(module: nn.Module) -> bool:
    """Whether a module keeps more than its input, or needs more while it runs: one product alone does not, nor does a
    norm of torch's own, nor a LoRA layer that shares an operator with others."""
    if "_fullshard_lora" in vars(module):
        return False
    if any(True for _ in module.children()):
        return True
    return all(p.dim() < 2 for p in module.parameters()) and not type(module).__module__.startswith("torch.")
