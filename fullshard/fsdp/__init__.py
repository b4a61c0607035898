"""Fully sharded models. Start with `FSDPv2`; `docs/fsdp.md` is the guide."""

from fullshard.fsdp.activation_checkpointing import checkpoint_module
from fullshard.fsdp.module import FSDPv2, SpmdFullyShardedDataParallel
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan
from fullshard.fsdp.policy import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.fsdp.strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy

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
