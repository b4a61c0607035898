"""The XLA engine, as the rest of the package sees it: `engines.Engine` on torch_xla's compiler.

Only names and plain values are here; what an engine does is imported when it is first used: torch_xla takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fullshard.config.errors import NameMissingError
from fullshard.distributed import guide_names
from fullshard.distributed.engines import Devices, Engine, HostShards
from fullshard.xla import limits

if TYPE_CHECKING:
    import torch

_UPSTREAM = {
    "torch_xla.core.xla_model": (
        "fork_rng", "get_stablehlo", "get_stablehlo_bytecode", "is_xla_tensor", "xla_device_kind", "xla_real_devices",
    ),
    "torch_xla.runtime": (
        "get_num_cached_compilation_graph", "global_runtime_device_attributes", "is_bf16_supported",
        "runtime_device_attributes", "set_device_type",
    ),
    "torch_xla.distributed.spmd": ("XLAPatchedLinear", "xla_patched_nn_linear_forward"),
}  # fmt: skip
"""Names of PyTorch/XLA that have a meaning on XLA alone, by the module of torch_xla that has them."""
_REFUSED = {
    "set_replication": "one process drives all devices; call fullshard.runtime.use_spmd()",
    "xla_replication_devices": "fullshard.runtime.global_runtime_device_count() counts the devices",
    "wrap_as_sharded_tensor": "use wrap_if_sharded(t)",
    "local_runtime_devices": "fullshard.runtime.addressable_device_count() counts the devices of this process",
    "set_cache_path": "use initialize_cache(path)",
    **dict.fromkeys(("dynamic_expand", "dynamic_view_as"), "torch_xla no longer has it"),
}
"""Its names that are refused, and why. Collectives are: with one process torch_xla's return their input unchanged."""


class XLAEngine:
    """Layouts and plans become annotations of the compiler, which partitions the program."""

    name = "XLA"
    compiles_steps = True
    drives_machine = True
    lacks = limits.LACKS

    @property
    def devices(self) -> Devices:
        """Processes and devices."""
        from fullshard.xla import devices

        return devices

    @property
    def layouts(self) -> Any:
        """The names of `fullshard.spmd` that lay out tensors."""
        from fullshard.xla import layouts

        return layouts

    @property
    def FSDPv2(self) -> Any:
        """The class that shards a model by a plan."""
        from fullshard.xla.fsdp import FSDPv2

        return FSDPv2

    @property
    def host_shards(self) -> HostShards:
        """Pieces of tensors, read and written through host memory."""
        from fullshard.xla import shards

        return shards

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """Calls a function; what its backward needs is computed again then."""
        from fullshard.xla.recomputation import checkpoint

        return checkpoint

    def as_shard(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """A whole value with the shape of a wrapped parameter, laid out as its shard is."""
        return parameter.as_shard(value)

    def compilations(self) -> int | None:
        """The number of programs compiled so far in this process."""
        import torch_xla.debug.metrics as metrics

        return int(metrics.counter_value("UncachedCompile") or 0)

    def guide_name(self, module: str, known_as: str, name: str, instead: str) -> Any:
        """torch_xla's own object, or the error that names the replacement."""
        if known_as in guide_names.MODULES:
            return getattr(importlib.import_module(guide_names.MODULES[known_as][0]), name)
        for home, names in _UPSTREAM.items():
            if name in names:
                return getattr(importlib.import_module(home), name)
        raise NameMissingError(f"PyTorch/XLA's {known_as}.{name} is not in {module}: {_REFUSED.get(name, instead)}")

    def check_sharding(self, settings: Any) -> None:
        """Refuse sharding settings that the compiler decides or does not have."""
        limits.check_sharding(settings)

    def sharding_overrides(self, settings: Any) -> dict[str, Any]:
        """The sharding settings that other keys of PyTorch/XLA set."""
        return limits.sharding_overrides(settings)

    def buffer_dtype(self, settings: Any) -> str | None:
        """The name of the dtype that floating-point buffers are cast to; None leaves them as they are."""
        return limits.buffer_dtype(settings)

    def sharding_notes(self, settings: Any) -> Iterator[str]:
        """What happens with settings of PyTorch/XLA that are not taken literally."""
        if settings.xla_fsdp_v2 is False:
            yield "xla_fsdp_v2: false: PyTorch/XLA's first FSDP wrapper is not offered; the model is sharded by FSDPv2"

    def check_run(self, config: Any) -> None:
        """Refuse settings of a training run that only the torch engine has."""
        limits.check_run(config)


ENGINE: Engine = XLAEngine()
