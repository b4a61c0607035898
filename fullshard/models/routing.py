"""How a mixture's routers spread tokens over experts: counted in each layer while the model trains.

Counts stay on the device and are read when a run logs. Layers that are recomputed count their tokens twice, which
changes neither ratios nor which experts are idle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.distributed import runtime
from fullshard.distributed.watchdog import collectives
from fullshard.models.experts import COUNTS, experts_modules
from fullshard.quant.expert_adapters import runs_own_experts

COLLAPSED = 0.9
"""The share of a layer's tokens at which a few experts have taken over."""
FEW = 4
"""A few experts: as many as a token chooses, in a layer with at least this many times as many."""


class ExpertUsage(NamedTuple):
    """How one layer used its experts."""

    load: float
    """The tokens of the busiest expert ÷ the mean."""
    idle: int
    """The number of experts without tokens."""
    experts: int
    choices: int
    """The number of experts of a token."""
    top_share: float
    """The share of the tokens that went to the busiest experts, as many as a token chooses."""


class TokensPerExpert:
    """Counts the tokens of each expert of a model; of none, if the model's experts are not fullshard's."""

    def __init__(self, model: Any) -> None:
        self.layers: dict[str, Any] = {
            name: module for name, module in experts_modules(model) if runs_own_experts(module)
        }
        for module in self.layers.values():
            setattr(module, COUNTS, torch.zeros(module.num_experts + 1, dtype=torch.int64, device=runtime.device()))

    def take(self) -> dict[str, ExpertUsage]:
        """The usage of each layer since the last call, over all ranks, which must all call it."""
        counts = [getattr(module, COUNTS) for module in self.layers.values()]
        if not counts:
            return {}
        sums = torch.cat(counts)
        torch._foreach_zero_(counts)
        if runtime.world_size() > 1:
            collectives.finish("sum of tokens per expert", lambda: dist.all_reduce(sums, async_op=True))
        by_layer = sums.cpu().split([len(one) for one in counts])
        return {name: _usage(one) for name, one in zip(self.layers, by_layer, strict=True) if one[-1] > 0}


def _usage(counts: torch.Tensor) -> ExpertUsage:
    """The usage by the tokens of each expert and, last, the number of tokens."""
    tokens, total = counts[:-1].double(), float(counts[:-1].sum())
    choices = max(1, round(total / float(counts[-1])))
    top = float(tokens.topk(min(choices, len(tokens))).values.sum())
    load = float(tokens.max() / tokens.mean())
    return ExpertUsage(load, int((tokens == 0).sum()), len(tokens), choices, top / total)


def usage_metrics(usage: dict[str, ExpertUsage]) -> dict[str, Any]:
    """What a run logs: the mean over layers and the number of idle experts in all, and both by layer."""
    if not usage:
        return {}
    loads, idle = [round(one.load, 4) for one in usage.values()], [one.idle for one in usage.values()]
    return {
        "expert_load": sum(loads) / len(loads), "idle_experts": sum(idle),
        "expert_load_by_layer": loads, "idle_experts_by_layer": idle,
    }  # fmt: skip


def warn_of_collapse(usage: dict[str, ExpertUsage]) -> None:
    """Warn once if the router of a layer has collapsed; of several the worst is named."""
    collapsed = {
        name: one for name, one in usage.items() if one.top_share >= COLLAPSED and one.experts >= FEW * one.choices
    }
    if not collapsed:
        return
    name, worst = max(collapsed.items(), key=lambda item: item[1].top_share)
    runtime.warn_once(
        "collapsed routing",
        f"the router of {name} sends {worst.top_share:.0%} of its choices to the same {worst.choices} of "
        f"{worst.experts} experts ({len(collapsed)} of {len(usage)} layers do): the others hardly train. Set "
        f"a larger router_aux_loss_coef, or lower learning_rate",
    )
