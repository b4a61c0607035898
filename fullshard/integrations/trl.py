"""TRL's trainers on this engine: reference models are sharded like the model that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fullshard.fsdp import FSDPv2
from fullshard.integrations.accelerate_prepare import is_served, shard


def prepare_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam of `trl.models.utils.prepare_fsdp`, which shards a reference model with torch's `fully_shard`."""

    def prepared(model: Any, accelerator: Any) -> Any:
        if not is_served(accelerator):
            return original(model, accelerator)
        if not isinstance(model, FSDPv2):
            shard(accelerator, model)
        return model.eval()

    return prepared
