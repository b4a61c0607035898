"""fullshard trains and fine-tunes transformer models fully sharded, from code written as if for one device.

Importing this package is cheap: torch is imported when a part that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from fullshard.config.errors import UserError
from fullshard.distributed import engines, guide_names
from fullshard.version import __version__

__all__ = [
    "CheckpointManager",
    "FSDPv2",
    "MixedPrecision",
    "SFTConfig",
    "SFTTrainer",
    "ShardingPlan",
    "ShardingStrategy",
    "SpmdFullyShardedDataParallel",
    "UserError",
    "__version__",
    "always_wrap_policy",
    "checkpoint",
    "checkpoint_module",
    "fsdp",
    "gather_for_metrics",
    "lambda_auto_wrap_policy",
    "load_pretrained",
    "load_state",
    "lora",
    "mean_over_rows",
    "merge_adapter",
    "prepare",
    "quant",
    "runtime",
    "save_pretrained",
    "save_state",
    "size_based_auto_wrap_policy",
    "spmd",
    "transformer_auto_wrap_policy",
    "use_spmd",
    "weighted",
    "weights",
    "xm",
]

_ROOMS = ("checkpoint", "fsdp", "lora", "quant", "runtime", "spmd", "weights", "xm")
_HOMES = {
    "use_spmd": "runtime",
    "load_pretrained": "weights.load",
    "SFTConfig": "sft.sft_config",
    "SFTTrainer": "sft.trainer",
    "merge_adapter": "weights.merge_adapter",
    "prepare": "parallel.prepare",
    "save_pretrained": "weights.export",
    "weighted": "fsdp.uneven_batches",
    **dict.fromkeys(("gather_for_metrics", "mean_over_rows"), "parallel.gather"),
    **dict.fromkeys(("CheckpointManager", "load_state", "save_state"), "checkpoint.manager"),
    **dict.fromkeys(
        (
            "FSDPv2",
            "MixedPrecision",
            "ShardingPlan",
            "ShardingStrategy",
            "SpmdFullyShardedDataParallel",
            "always_wrap_policy",
            "checkpoint_module",
            "lambda_auto_wrap_policy",
            "size_based_auto_wrap_policy",
            "transformer_auto_wrap_policy",
        ),
        "fsdp",
    ),
}
"""Names that `fullshard` itself offers, and the room each comes from."""

guide_names.install()


engines.register(
    torch=lambda: importlib.import_module("fullshard.fsdp.torch_engine").ENGINE,
    xla=lambda: importlib.import_module("fullshard.xla.engine").ENGINE,
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"fullshard.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"fullshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fullshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
