"""The table of our sharding rules: which function runs which operator.

Filled by `rules.py` and `rules_reductions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Rule = Callable[[Any, Any, Any], Any]
"""Takes the operator and its arguments, all on one mesh; may answer `NotImplemented` and leave the call to torch."""

RULES: dict[Any, Rule] = {}


def overload(name: str) -> Any | None:
    """An operator by name, `None` where this torch does not have it."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(aten, packet, None), variant or "default", None)


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            op = overload(name)
            if op is not None:
                RULES[op] = rule
        return rule

    return register
