"""Names of PyTorch/XLA that have a meaning on XLA alone: torch_xla's own, or refused with a reason.

Collectives stay refused: with one process torch_xla's return their input unchanged.
"""

from __future__ import annotations

import importlib
from typing import Any

from fullshard.config.errors import NameMissingError
from fullshard.distributed import guide_names

OFFERED = {
    "torch_xla.core.xla_model": (
        "fork_rng", "get_stablehlo", "get_stablehlo_bytecode", "is_xla_tensor", "xla_device_kind", "xla_real_devices",
    ),
    "torch_xla.runtime": (
        "get_num_cached_compilation_graph", "global_runtime_device_attributes", "is_bf16_supported",
        "runtime_device_attributes", "set_device_type",
    ),
    "torch_xla.distributed.spmd": ("XLAPatchedLinear", "xla_patched_nn_linear_forward"),
}  # fmt: skip
INSTEAD = {
    "set_replication": "one process drives all devices; call fullshard.runtime.use_spmd()",
    "xla_replication_devices": "fullshard.runtime.global_runtime_device_count() counts the devices",
    "wrap_as_sharded_tensor": "use wrap_if_sharded(t)",
    "local_runtime_devices": "fullshard.runtime.addressable_device_count() counts the devices of this process",
    "set_cache_path": "use initialize_cache(path)",
    **dict.fromkeys(("dynamic_expand", "dynamic_view_as"), "torch_xla no longer has it"),
}


def find_upstream_name(module: str, known_as: str, name: str, instead: str) -> Any:
    """torch_xla's own object for a name; `instead` is what the torch engine's refusal recommends."""
    if known_as in guide_names.MODULES:
        return getattr(importlib.import_module(guide_names.MODULES[known_as][0]), name)
    for home, names in OFFERED.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise NameMissingError(f"PyTorch/XLA's {known_as}.{name} is not in {module}: {INSTEAD.get(name, instead)}")
