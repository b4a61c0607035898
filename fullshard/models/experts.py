"""The experts of a run: one implementation for every class that takes its own from transformers' interface.

Registered in transformers as `fullshard`. A token's experts run in two grouped products with the gate between them
(`experts_math.py`), for weights that are frozen or train, dense or in 4 bits, with PEFT's adapters or without. A class
that computes something else between its projections keeps transformers' implementation; `try_experts` finds out on a
small model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.errors import first_line
from fullshard.lora.fused_dropout import Dropout, draw_seed
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.experts_dispatch import Dispatch
from fullshard.models.experts_gate import find_gate
from fullshard.models.experts_math import Factors, Projection, Routing
from fullshard.models.experts_ops import run_experts
from fullshard.models.tiny_model import (
    SPECIAL,
    VOCABULARY,
    bare_model,
    forked_random,
    quiet_transformers,
    small_models,
)
from fullshard.quant.expert_adapters import IMPLEMENTATION, Adapters, LoraFactors, patch_peft, runs_own_experts
from fullshard.quant.grouped_product import Stack
from fullshard.quant.ops import autocasts, compute_dtype
from fullshard.spmd.tensor import is_sharded

GATE = "_fullshard_gate"
"""The attribute of a module with its gate, as a string: equal for layers of a kind, so these share compiled code."""
COUNTS = "_fullshard_tokens_per_expert"
"""The attribute of a module that counts its experts' tokens."""
DISPATCH = "_fullshard_dispatch"
"""The attribute of a module whose experts are split over ranks, with its `Dispatch`."""
TOKENS = 24
RANKS = 8
"""Ranks of adapters are padded to multiples of this: 16 bytes in bf16, as grouped products need."""


def experts_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules whose forward transformers' interface chooses, by name."""
    for name, module in model.named_modules():
        if all(
            hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")
        ):
            yield name, module


def use_own_experts(model: Any) -> bool:
    """Let the experts of a model run this implementation, if its classes can."""
    inner = get_causal_lm(model)
    modules = [module for _, module in experts_modules(inner)]
    if not modules or not _can_set(inner):
        return False
    gates = [_gate_of(module) for module in modules]
    if not all(gates):
        return False
    register()
    inner.set_experts_implementation(IMPLEMENTATION)
    return all(map(runs_own_experts, modules))


def _can_set(model: Any) -> bool:
    """Whether the implementation of a model's experts can be set: from transformers 5.17 on."""
    return hasattr(model, "set_experts_implementation")


def _gate_of(module: Any) -> str | None:
    """A module's gate as a string, found once; None if it is of no known form."""
    known: str | None = vars(module).get(GATE)
    if known is None and (gate := find_gate(module)) is not None:
        known = str(gate)
        setattr(module, GATE, known)
    return known


@functools.cache
def register() -> None:
    """Make the implementation known to transformers, and adapters on experts to PEFT."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, experts)
    patch_peft()


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    adapters: Adapters | None = None,
) -> torch.Tensor:  # fmt: skip
    """Experts in transformers' form: [tokens, hidden], with the chosen experts and their weights [tokens, choices]."""
    if is_sharded(hidden_states):  # a global program, whose operators DTensor lays out
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        out: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return out
    first = "gate_up_proj" if module.has_gate else "up_proj"
    dtype = _product_dtype(module, first, hidden_states)
    active = adapters or {}
    up, down = (_projection(module, name, dtype, active.get(name, ())) for name in (first, "down_proj"))
    x, weights, dispatch = hidden_states.to(dtype), top_k_weights, dispatch_of(module)
    if dispatch is None:
        routing = Routing.of(top_k_index, up.stack.shape[0])
        out = _run(module, x, weights, routing, up, down)
    else:
        received = dispatch.send(x, weights, top_k_index)
        routing = received.routing
        out = dispatch.back(_run(module, received.x, received.weights, routing, up, down), received.sent, len(x))
    _count_tokens(module, routing, len(x) if dispatch is None else received.sent.tokens)
    return out.to(hidden_states.dtype)


def _run(
    module: Any, x: torch.Tensor, weights: torch.Tensor, routing: Routing, up: Projection, down: Projection
) -> torch.Tensor:
    """The sum over the experts of each token, of those that this rank holds."""
    gate = _gate_of(module)
    assert gate is not None
    if not getattr(module, "has_post_expert_norm", False):
        return run_experts(x, weights, routing, up, down, gate)
    rows = module.post_expert_norm(run_experts(x, None, routing, up, down, gate))
    weights = weights.masked_fill(routing.absent(), 0)
    return (routing.by_pair(rows) * weights[..., None]).sum(1).to(x.dtype)


def _count_tokens(module: Any, routing: Routing, tokens: int) -> None:
    """Add the tokens of each expert here, and this rank's tokens, to the counts of a module that has some
    (`models/routing.py`)."""
    counts = getattr(module, COUNTS, None)
    if counts is not None and module.training:
        own, dispatch = routing.ends.diff(prepend=routing.ends.new_zeros(1)), dispatch_of(module)
        (counts[:-1] if dispatch is None else dispatch.own(counts)).add_(own)
        counts[-1] += tokens


def dispatch_of(module: Any) -> Dispatch | None:
    """What sends tokens to a module's experts on other ranks; None if every rank holds all."""
    dispatch: Dispatch | None = getattr(module, DISPATCH, None)
    return dispatch


def _product_dtype(module: Any, name: str, x: torch.Tensor) -> torch.dtype:
    """The dtype of the products: autocast's, or that of the weights."""
    if (own := getattr(module, "product_dtype_for", None)) is not None:
        chosen: torch.dtype = own(x)
        return chosen
    if autocasts(x.device):
        return compute_dtype(x)
    dtype: torch.dtype = getattr(module, name).dtype
    return dtype


def _projection(module: Any, name: str, dtype: torch.dtype, adapters: Sequence[LoraFactors]) -> Projection:
    own = getattr(module, "expert_stack", None)
    stack = Stack("dense", [getattr(module, name).to(dtype)]) if own is None else own(name)
    bias = getattr(module, f"{name}_bias").to(dtype) if module.has_bias else None
    dispatch = dispatch_of(module)
    factors = [_as_factors(_own(one, dispatch), module.is_transposed, dtype) for one in adapters]
    swapped = own is not None and module.is_swapped(name)
    return Projection(stack, module.is_transposed != swapped, bias, factors)


def _own(adapter: LoraFactors, dispatch: Dispatch | None) -> LoraFactors:
    """The factors of the experts that this rank holds."""
    if dispatch is None:
        return adapter
    return adapter._replace(left=dispatch.own(adapter.left), right=dispatch.own(adapter.right))


def _as_factors(adapter: LoraFactors, transposed: bool, dtype: torch.dtype) -> Factors:
    """An adapter as products need it: padded to an aligned rank, with its scale."""
    b, a = adapter.left, adapter.right
    if transposed:
        b, a = a.transpose(1, 2), b.transpose(1, 2)
    b = b * adapter.scale
    if missing := -a.shape[1] % RANKS:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    dropout = Dropout(draw_seed(a.device), adapter.dropout) if adapter.dropout else None
    return Factors(a.to(dtype).contiguous(), b.to(dtype).contiguous(), dropout)


# --- the trial --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertsVerdict:
    """The result of the trial."""

    usable: bool
    reason: str = ""
    """Why not; empty for a model without experts."""


def try_experts(model: Any) -> ExpertsVerdict:
    """Try this implementation on a small model like `model`, on the CPU: logits and gradients must be those of
    transformers' loop over experts. The random state is not changed."""
    inner, device = get_causal_lm(model), torch.device("cpu")
    if not has_experts(inner):
        return ExpertsVerdict(False)
    if not _can_set(inner):
        return ExpertsVerdict(False, "this version of transformers has no interface for experts")
    if not any(True for _ in experts_modules(inner)):
        return ExpertsVerdict(False, "its class does not take its experts from transformers' interface")
    failure = ""
    with forked_random(device), quiet_transformers():
        try:
            for small in small_models(bare_model(inner), device):
                try:
                    return _compare(small)
                except Exception as error:
                    failure = failure or first_line(error)
        except Exception as error:
            failure = failure or first_line(error)
    return ExpertsVerdict(False, failure or "there is no smaller model of its class")


def has_experts(model: nn.Module) -> bool:
    """Whether a model has modules called experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def _compare(small: Any) -> ExpertsVerdict:
    ids = torch.randint(SPECIAL, VOCABULARY, (1, TOKENS), device="cpu")
    small.set_experts_implementation("eager")
    expected = _outputs(small, ids)
    if not use_own_experts(small):
        return ExpertsVerdict(False, "its experts compute something else between their projections than a gate")
    for own, theirs in zip(_outputs(small, ids), expected, strict=True):
        close = torch.finfo(small.dtype).eps ** 0.5 * max(float(theirs.abs().max()), 1e-6)
        if not bool((own - theirs).abs().max() <= close):
            return ExpertsVerdict(False, "its results differ from those of transformers")
    return ExpertsVerdict(True)


def _outputs(small: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits, and the gradients of all experts."""
    parameters = [p for _, module in experts_modules(small) for p in module.parameters(recurse=False)]
    with torch.enable_grad():
        logits = small(input_ids=ids, use_cache=False).logits.float()
        grads = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
    return [logits.detach(), *(g.float() for g in grads if g is not None)]
