"""Names of PyTorch/XLA that have a meaning on XLA alone: they are torch_xla's own there, or refused with a reason."""

from __future__ import annotations

import importlib
from typing import Any

from fullshard.errors import NameMissingError

HOMES = {"xm": "torch_xla.core.xla_model", "xr": "torch_xla.runtime", "xs": "torch_xla.distributed.spmd"}
REFUSED = {
    "reduce_gradients": "gradients are already global; step the optimizer",
    "set_replication": "one process drives all devices; call fullshard.runtime.use_spmd()",
    "xla_replication_devices": "fullshard.runtime.global_runtime_device_count() counts the devices",
    "send_cpu_data_to_device": "use fullshard.spmd.ShardedLoader, or t.to(xm.xla_device())",
    "xla_distribute_tensor": "use mark_sharding(t, mesh, partition_spec)",
    "xla_distribute_module": "use mark_sharding on parameters, then distribute_module(module, mesh)",
    "auto_policy": "layouts are not chosen automatically; use mark_sharding on parameters",
    "MarkShardingFunction": "use mark_sharding_with_gradients(t, mesh, partition_spec)",
    "wrap_as_sharded_tensor": "use wrap_if_sharded(t)",
}


def find(module: str, known_as: str, name: str) -> Any:
    """torch_xla's own object for a name that only XLA gives a meaning."""
    found = getattr(importlib.import_module(HOMES[known_as]), name, None)
    if name in REFUSED or found is None:
        instead = REFUSED.get(name, "torch_xla no longer has it")
        raise NameMissingError(f"PyTorch/XLA's {known_as}.{name} is not in {module}: {instead}")
    return found
