"""The torch engine, as the rest of the package sees it: `engines.Engine` on `torch.distributed`.

Only names and plain values are here; what an engine does is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fullshard.config.errors import ConfigError, NameMissingError
from fullshard.distributed.engines import Devices, Engine

if TYPE_CHECKING:
    import torch


class TorchEngine:
    """fullshard's own engine: one process per device, and our own collectives."""

    name = "torch"
    compiles_steps = False
    drives_machine = False
    lacks: Mapping[str, str] = {}
    host_shards = None

    @property
    def devices(self) -> Devices:
        """Processes and devices."""
        from fullshard.distributed import torch_devices

        return torch_devices

    @property
    def layouts(self) -> Any:
        """The names of `fullshard.spmd` that lay out tensors."""
        from fullshard.spmd import torch_layouts

        return torch_layouts

    @property
    def FSDPv2(self) -> Any:
        """The class that shards a model by a plan."""
        from fullshard.fsdp.module import FSDPv2

        return FSDPv2

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """Calls a function; what its backward needs is computed again then."""
        from torch.utils.checkpoint import checkpoint

        return checkpoint

    def as_shard(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """A whole value with the shape of a wrapped parameter, laid out as its shard is."""
        from fullshard.fsdp.state_dict import as_shard

        return as_shard(value, parameter)

    def compilations(self) -> int | None:
        """None: steps are not compiled."""
        return None

    def guide_name(self, module: str, known_as: str, name: str, instead: str) -> Any:
        """Raise the error that names the replacement."""
        raise NameMissingError(f"PyTorch/XLA's {known_as}.{name} is not in {module}: {instead}")

    def check_sharding(self, settings: Any) -> None:
        """Refuse `xla: true`."""
        if settings.xla:
            raise ConfigError(
                "xla: true needs the XLA engine, and this installation offers the torch engine. The XLA engine needs "
                "torch 2.9.0 with torch_xla 2.9.0; TPUs with a newer torch belong to the torch engine "
                "(docs/devices.md). Remove the key to train with torch"
            )

    def sharding_overrides(self, settings: Any) -> dict[str, Any]:
        """Nothing: the keys of PyTorch/XLA are not used."""
        return {}

    def buffer_dtype(self, settings: Any) -> str | None:
        """None: buffers keep their dtype."""
        return None

    def sharding_notes(self, settings: Any) -> Iterator[str]:
        """The keys of PyTorch/XLA that are not used."""
        for key in ("xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"):
            if getattr(settings, key):
                yield f"{key} is not used without xla: true"

    def check_run(self, config: Any) -> None:
        """Nothing to refuse: settings are checked where they are read."""


ENGINE: Engine = TorchEngine()
