"""Tests whether a model keeps packed documents separate, on a small model of the same class.

Two documents share a row. Changing the first must not change the logits of the second, and these must equal the logits
of the second document alone. Signatures and names are not enough: a model may accept positions and still let documents
attend to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fullshard.config.errors import first_line
from fullshard.data.loader import Collator
from fullshard.models.attention import is_own, without_flex
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.packed_inputs import Packed, PackingMethod, documents_of
from fullshard.models.tiny_model import (
    SPECIAL,
    VOCABULARY,
    bare_model,
    forked_random,
    quiet_transformers,
    small_models,
)

FIRST, SECOND = 10, 13
"""Lengths of the documents: longer than the attention window of a small model, and than any convolution."""
LEAKS, LOST = "documents in a row see each other", "the positions of documents in a row are lost"
ROUNDS = 3
"""The deepest nesting of modules that let documents see each other."""


@dataclass(frozen=True)
class PackingVerdict:
    """The result of the test."""

    way: PackingMethod | None
    """How to pass packed rows to the model; None if no method works."""
    reason: str = ""
    """Why none works."""
    tried: bool = True
    """Whether a small model could be built."""


def try_packing(model: Any, device: torch.device, flatten: bool) -> PackingVerdict:
    """Try the packing methods, cheapest first, on a small model like `model`. The random state is not changed."""
    failure = ""
    with forked_random(device), quiet_transformers(), without_flex():
        try:
            for small in small_models(bare_model(get_causal_lm(model)), device):
                trial = Trial(small, device, flatten)
                try:
                    trial.alone = trial.logits_alone()
                except Exception as error:
                    failure = failure or first_line(error)
                    continue
                return trial.verdict()
        except Exception as error:
            failure = failure or first_line(error)
    return PackingVerdict(None, failure or "there is no smaller model of its class", tried=False)


class _TrialRows:
    """Rows of documents in the form that the collator reads."""

    def __init__(self) -> None:
        draw = np.random.Generator(np.random.PCG64(0))
        first, other = (draw.integers(SPECIAL, VOCABULARY, FIRST) for _ in range(2))
        second = draw.integers(SPECIAL, VOCABULARY, SECOND)
        self.rows = [[first, second], [other, second], [second], [second[:7], first, second[:4]]]

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        return [(ids.astype(np.int32), np.ones(len(ids), np.uint8)) for ids in self.rows[row]]


class Trial:
    """A small model and the documents that it is tested with."""

    def __init__(self, small: Any, device: torch.device, flatten: bool) -> None:
        self.small, self.device, self.rows = small, device, _TrialRows()
        self.packs = Collator(0, isolate=True, flatten=flatten)
        self.alone = torch.empty(0)

    def verdict(self) -> PackingVerdict:
        """Which attention can keep packed documents apart, or why none can."""
        reasons = []
        # Our own attention is fastest with masks that are made once per batch.
        order = (True, False) if is_own(self.small.config) else (False, True)
        for masks in order:
            reason = self.reason_against(PackingMethod(masks))
            if not reason:
                return PackingVerdict(PackingMethod(masks))
            reasons.append(reason)
        for masks in order:
            if (way := self._one_document_at_a_time(masks)) is not None:
                return PackingVerdict(way)
        return PackingVerdict(None, next((r for r in reasons if r in (LEAKS, LOST)), reasons[0]))

    def reason_against(self, way: PackingMethod) -> str:
        """Why this method is wrong; empty if it is correct."""
        try:
            (one, other) = (self.logits_packed(way, row) for row in (0, 1))
        except Exception as error:
            return f"it does not run with {way}: {first_line(error)[:120]}"
        if not self._same(one, other):
            return LEAKS
        return "" if self._same(one, self.alone) else LOST

    @torch.no_grad()
    def logits_alone(self) -> torch.Tensor:
        """The logits of the second document in a row of its own."""
        return self._logits(Collator(0)(self.rows, [2]))[0, :SECOND]

    @torch.no_grad()
    def logits_packed(self, way: PackingMethod, row: int) -> torch.Tensor:
        """The logits of the second document of a row."""
        packed, batch = Packed(self.small, way, self.small.dtype), self.packs(self.rows, [row, 3])
        try:
            with packed.rows(batch):
                return self._logits(batch)[0, FIRST : FIRST + SECOND]
        finally:
            packed.undo()

    def _logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: value.to(self.device) for name, value in batch.items() if name != "labels"}
        logits = self.small(**inputs, use_cache=False).logits
        if not logits.isfinite().all():
            raise ValueError("the small model's logits are not finite")
        return logits.float()

    def _same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Equal up to rounding, which depends on the shape in some kernels."""
        close = math.sqrt(torch.finfo(self.small.dtype).eps) * float(self.alone.std())
        return bool((one - other).abs().max() <= close)

    # --- modules that carry a state along the row -------------------------------------------------------------------

    def _one_document_at_a_time(self, masks: bool) -> PackingMethod | None:
        """Find the modules that let documents see each other, innermost first, until none does."""
        way = PackingMethod(masks)
        for _ in range(ROUNDS):
            try:
                more = self._leaking(way) - {*way.alone}
            except Exception:
                return None
            if not more:
                return None
            way = PackingMethod(masks, tuple(sorted({*way.alone, *more})))
            if not self.reason_against(way):
                return way
        return None

    @torch.no_grad()
    def _leaking(self, way: PackingMethod) -> set[str]:
        """Classes of the innermost modules whose outputs for one document depend on the inputs of another."""
        packed, batch = Packed(self.small, way, self.small.dtype), self.packs(self.rows, [0, 3])
        end = documents_of(batch["position_ids"])[0][1]
        try:
            with packed.rows(batch):
                calls = _calls(self.small, lambda: self._logits(batch), batch["input_ids"].shape)
                leaking = {module for module, call in calls.items() if self._leaks(module, call, end)}
        finally:
            packed.undo()
        return {type(m).__name__ for m in leaking if not any(part in leaking for part in m.modules() if part is not m)}

    def _leaks(self, module: nn.Module, call: _ModuleCall, end: int) -> bool:
        other = call.states.clone()
        other[:, :end] = torch.randn_like(other[:, :end])
        try:
            one, two = (
                _first_tensor(module(*call.args_with(states), **call.kwargs)) for states in (call.states, other)
            )
        except Exception:
            return False
        if one is None or two is None or one.shape[:2] != call.states.shape[:2]:
            return False
        return not self._same(one[0, end : end + SECOND], two[0, end : end + SECOND])


@dataclass(frozen=True)
class _ModuleCall:
    """The arguments of a call of a module; the first are the hidden states."""

    states: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def args_with(self, states: torch.Tensor) -> tuple[Any, ...]:
        return (states, *self.args[1:])


def _calls(model: nn.Module, run: Callable[[], Any], shape: torch.Size) -> dict[nn.Module, _ModuleCall]:
    """The first call of each module inside the model that takes a hidden state per token."""
    calls: dict[nn.Module, _ModuleCall] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        kwargs = dict(kwargs)
        states = args[0] if args else kwargs.pop("hidden_states", None)
        if isinstance(states, torch.Tensor) and states.is_floating_point() and states.shape[:2] == shape:
            calls.setdefault(module, _ModuleCall(states, (states, *args[1:]), kwargs))

    hooks = [m.register_forward_pre_hook(record, with_kwargs=True) for m in model.modules() if m is not model]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, tuple | list):
        output = output[0] if output else None
    return output if isinstance(output, torch.Tensor) and output.dim() > 1 else None
