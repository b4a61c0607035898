"""Names of PyTorch/XLA that fullshard does not have, and the replacement of each.

Accessing one of them through `xr`, `xm` or `xs` raises an `AttributeError` that names the replacement, so `hasattr`
returns False. Any other unknown name raises Python's usual error. On the XLA engine some of these names are
PyTorch/XLA's own (`xla/upstream_names.py`).
"""

from __future__ import annotations

from typing import Any

from fullshard import engines

_GLOBAL = "tensors are global here; for per-rank data use torch.distributed"
_COMPILED = "nothing is compiled by XLA here"

REFUSED: dict[str, dict[str, str]] = {
    "xm": {
        **dict.fromkeys(
            ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute", "collective_broadcast",
             "all_reduce_bucketized_gradients", "all_gather_bucketized", "reduce_scatter_bucketized", "send", "recv"),
            _GLOBAL,
        ),
        "reduce_gradients": "gradients are already global; step the optimizer",
        **dict.fromkeys(("REDUCE_SUM", "REDUCE_MUL", "REDUCE_MIN", "REDUCE_MAX", "REDUCE_AND", "REDUCE_OR"), _GLOBAL),
        "send_cpu_data_to_device": "use fullshard.spmd.ShardedLoader, or t.to(xm.xla_device())",
        "is_xla_tensor": "there are no XLA tensors; compare t.device with xm.xla_device()",
        "set_replication": "start one process per device with torchrun or fullshard launch",
        "xla_replication_devices": "fullshard.runtime.world_size() counts the devices",
        "xla_real_devices": "xm.xla_device() is this process's only device",
        **dict.fromkeys(("get_stablehlo", "get_stablehlo_bytecode", "dynamic_expand", "dynamic_view_as"), _COMPILED),
    },
    "xr": {
        "set_device_type": "use use_spmd(device=...), or set FULLSHARD_DEVICE",
        "using_pjrt": "devices are torch devices",
        **dict.fromkeys(
            ("runtime_device_attributes", "global_runtime_device_attributes", "local_runtime_devices"),
            "use torch.cuda.get_device_properties",
        ),
        "set_cache_path": _COMPILED,
    },
    "xs": {
        "xla_distribute_tensor": "use mark_sharding(t, mesh, partition_spec)",
        "xla_distribute_module": "use mark_sharding on parameters, then distribute_module(module, mesh)",
        "auto_policy": "layouts are not chosen automatically; use mark_sharding on parameters",
        "MarkShardingFunction": "use mark_sharding_with_gradients(t, mesh, partition_spec)",
        **dict.fromkeys(
            ("XLAPatchedLinear", "xla_patched_nn_linear_forward"),
            "nn.Linear already keeps the layout of batch dims",
        ),
        **dict.fromkeys(
            ("convert_to_dtensor_spec", "convert_array_mapping_to_partition_spec", "wrap_as_sharded_tensor"),
            "a sharded tensor has placements, device_mesh and sharding_spec",
        ),
    },
}  # fmt: skip


def find(module: str, known_as: str, name: str) -> Any:
    """The `__getattr__` of a module: PyTorch/XLA's own object on its engine, else an error."""
    instead = REFUSED[known_as].get(name)
    if instead is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return engines.current().guide_name(module, known_as, name, instead)
