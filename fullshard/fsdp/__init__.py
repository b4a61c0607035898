"""Fully sharded models. Start with `FSDPv2`; `docs/fsdp.md` is the guide."""

from typing import TYPE_CHECKING, Any

from fullshard.config.lazy_names import lazy_names
from fullshard.distributed import engines

if TYPE_CHECKING:
    from fullshard.activations.checkpointing import checkpoint_module
    from fullshard.fsdp.module import FSDPv2, SpmdFullyShardedDataParallel
    from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan
    from fullshard.fsdp.strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from fullshard.fsdp.wrap import (
        always_wrap_policy,
        lambda_auto_wrap_policy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

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

_find, __dir__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("ParameterPlan", "ShardingPlan", "UnitPlan"), "plan"),
        **dict.fromkeys([name for name in __all__ if name.endswith("_policy")], "wrap"),
        **dict.fromkeys(("BackwardPrefetch", "MixedPrecision", "ShardingStrategy"), "strategy"),
    },
)


def __getattr__(name: str) -> Any:
    if name in ("FSDPv2", "SpmdFullyShardedDataParallel"):
        return engines.current().FSDPv2
    if name == "checkpoint_module":
        from fullshard.activations.checkpointing import checkpoint_module

        return checkpoint_module
    return _find(name)
