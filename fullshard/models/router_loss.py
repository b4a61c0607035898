"""The auxiliary loss of a mixture of experts, which keeps its experts evenly used.

transformers' models compute it from their routers' logits if `output_router_logits` is set, and add it to their loss
with the coefficient `router_aux_loss_coef`. As in TRL, it is part of the training loss of every model that has such a
coefficient. Padding does not count in it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from fullshard.config.errors import ConfigError
from fullshard.models.causal_lm import get_causal_lm

COEFFICIENT = "router_aux_loss_coef"
FUNCTION = "load_balancing_loss_func"
"""The function of the model's module that its forward calls."""


def set_router_loss(model: Any, coefficient: float | None) -> str:
    """Add the auxiliary loss with this coefficient; None takes the model's own, 0 turns it off. Returns a note."""
    inner = get_causal_lm(model)
    name, shape = type(inner).__name__, inner.config.get_text_config()
    computes = hasattr(inner, COEFFICIENT)
    if coefficient and not computes:
        raise ConfigError(
            f"router_aux_loss_coef is {coefficient:g}, but {name} computes no auxiliary loss of routers; leave it out."
        )
    own = getattr(shape, COEFFICIENT, None)
    if not computes:
        return f"{name} has a {COEFFICIENT}, but computes no auxiliary loss of routers; none is added." if own else ""
    if own is None and coefficient is None:
        return ""  # as the model's configuration says
    weight = coefficient if coefficient is not None else own or 0.0
    shape.output_router_logits = bool(weight)
    setattr(shape, COEFFICIENT, weight)
    setattr(inner, COEFFICIENT, weight)
    return f"the loss has the routers' auxiliary loss with coefficient {weight:g} ({COEFFICIENT})." if weight else ""


def has_router_loss(model: Any) -> bool:
    """Whether the model's loss has an auxiliary loss of routers."""
    inner = get_causal_lm(model)
    return hasattr(inner, COEFFICIENT) and bool(getattr(inner.config.get_text_config(), "output_router_logits", False))


@contextlib.contextmanager
def without_padding(model: Any, real_tokens: torch.Tensor | None) -> Iterator[None]:
    """Inside, the auxiliary loss is over the tokens in `real_tokens` [rows, length] unless the model has a mask."""
    scope = inspect.unwrap(type(get_causal_lm(model)).forward).__globals__
    plain = scope.get(FUNCTION)
    if real_tokens is None or plain is None:
        yield
        return

    def masked(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        own = getattr(attention_mask, "ndim", None) == real_tokens.ndim  # no mask between tokens
        return plain(gate_logits, num_experts, top_k, attention_mask if own else real_tokens)

    scope[FUNCTION] = masked
    try:
        yield
    finally:
        scope[FUNCTION] = plain
