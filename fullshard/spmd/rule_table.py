"""ATen operators: found by name, what they write to, and the table of our own sharding rules.

`rules.py` and `rules_elementwise.py` fill the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fullshard.device.torch_private import schema_of, tree_leaves

aten = torch.ops.aten
Rule = Callable[[Any, Any, Any], Any]
"""Runs `rule(op, args, kwargs)`, with all tensors on one mesh. `NotImplemented` leaves the call to torch's rule."""

RULES: dict[Any, Rule] = {}


def overload(name: str) -> Any | None:
    """The operator of this name, such as `sum.dim_IntList`; None if this torch does not have it."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(aten, packet, None), variant or "default", None)


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operators of these names."""

    def register(rule: Rule) -> Rule:
        for name in names:
            op = overload(name)
            if op is not None:
                RULES[op] = rule
        return rule

    return register


def written_tensors(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    schema = schema_of(op).arguments
    if not any(a.alias_info is not None and a.alias_info.is_write for a in schema):
        return []
    named = {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
    values = [named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
