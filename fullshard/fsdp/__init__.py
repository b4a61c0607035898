"""Fully sharded models. Start with `FSDPv2`; `docs/fsdp.md` is the guide."""

from typing import TYPE_CHECKING, Any

from fullshard import engines
from fullshard.fsdp.activation_checkpointing import checkpoint_module
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan
from fullshard.fsdp.policy import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.fsdp.strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy

if TYPE_CHECKING or not engines.is_xla():
    from fullshard.fsdp.module import FSDPv2, SpmdFullyShardedDataParallel


def __getattr__(name: str) -> Any:
    if (found := engines.xla_name(name, _ON_XLA)) is not None:
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ON_XLA = {"fsdp": ("FSDPv2", "SpmdFullyShardedDataParallel")}
"""The names that are different on XLA, by the module of `fullshard.xla` that defines them."""

__all__ = [
    "BackwardPrefetch",
    "FSDPv2",
    "MixedPrecision",
    "ParameterPlan",
    "ShardingPlan",
    "ShardingStrategy",
    "SpmdFullyShardedDataParallel",
    "UnitPlan",
    "always_wrap_policy",
    "checkpoint_module",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]
