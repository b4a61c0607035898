"""The engine of this process: what an engine does for the rest of the package, and which one this installation has.

There are two: fullshard's own on torch (`fsdp/torch_engine.py`), and the compiler of PyTorch/XLA (`xla/engine.py`). The
package's `__init__` registers how each is made; everything else asks `current()` for what differs and does not know
which one it has. torch_xla is tied to one version of torch, and the torch engine needs a newer one, so the versions of
the installed packages choose. Nothing heavy is imported to choose, nor by the engines' own modules.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from fullshard.config.errors import RuntimeSetupError
from fullshard.version import TORCH_NEEDED, version_numbers

if TYPE_CHECKING:
    import torch

    from fullshard.distributed.transport import Transport

ENGINE_VARIABLE = "FULLSHARD_ENGINE"
TORCH_XLA_NEEDED = (2, 9)
"""The first torch_xla, and with it torch, that the XLA engine runs on."""


# --- what an engine does ----------------------------------------------------------------------------------------------


class Devices(Protocol):
    """Processes, their devices, and the devices' random numbers. `runtime` and `xm` offer them to users."""

    def join(self, device: str | None, init_timeout: float | None) -> None:
        """Make this process a member of the job, as `runtime.use_spmd` describes."""

    def default_device(self) -> torch.device:
        """The device of this process before it has joined."""

    def device_type(self) -> str:
        """The type of the devices in capitals, such as `CPU`."""

    def addressable_count(self) -> int:
        """The number of devices of this process."""

    def local_count(self) -> int:
        """The number of devices of this node."""

    def global_count(self) -> int:
        """The number of devices of the job."""

    def more_devices(self, count: int) -> str:
        """How to start a job with `count` devices, for messages."""

    def master_address(self) -> str:
        """The address of process 0."""

    def initialize_cache(self, path: str, readonly: bool) -> None:
        """Keep compiled programs in a folder."""

    def transport(self) -> Transport:
        """How tensors travel between devices, and why."""

    def memory_info(self, device: torch.device) -> dict[str, int]:
        """Used and total memory in bytes."""

    def seed(self, number: int) -> None:
        """Seed the devices' default generator."""

    def initial_seed(self) -> int:
        """The seed of the devices' default generator."""

    def generator_state(self) -> tuple[str, Any]:
        """The type of device, and the state of its default generator: None where torch's own is all there is."""

    def set_generator_state(self, state: Any) -> None:
        """Restore the state of the devices' generator."""

    def sync(self, wait: bool) -> None:
        """Start what was recorded; with `wait`, wait until the devices have finished."""

    def flush(self) -> None:
        """Start what was recorded, and keep the generator's state."""

    def add_step_closure(self, closure: Callable[..., Any], args: Sequence[Any], run_async: bool) -> None:
        """Call a function when the step has been computed."""

    def optimization_barrier_(self, tensors: Any) -> None:
        """Keep the compiler from moving operators across these tensors."""

    def broadcast_(self, t: torch.Tensor) -> None:
        """Give an unsharded tensor the value of process 0."""

    def place(self, value: torch.Tensor, pin: bool) -> torch.Tensor:
        """A tensor of this process's batch on its devices; `pin` copies through pinned memory, without waiting."""

    def host_copy(self, value: torch.Tensor) -> HostCopy:
        """A value that the host reads later."""

    def update_guard(self, optimizer: Any) -> UpdateGuard | None:
        """What lets the devices decide about an optimizer's updates; None where the host has to."""


class HostCopy(Protocol):
    """A value of the devices that the host reads later."""

    def read(self) -> list[float]:
        """The values; waits for them."""


class UpdateGuard(Protocol):
    """Takes an optimizer's steps as long as all losses and gradients were finite; the devices decide."""

    def step(self, values: torch.Tensor) -> None:
        """The optimizer's step, unless this step or an earlier one failed; `values` are those of a `LaunchedStep`."""

    def reset(self) -> None:
        """Update again, after the updates issued so far."""


@dataclass(frozen=True)
class HostPiece:
    """A part of a tensor, copied to host memory."""

    cuts: tuple[slice, ...]
    value: torch.Tensor
    copies: int
    """The number of copies of which one has to be chosen; 0 if the tensor has no layout, so that nothing is known about
    the other processes."""
    copy: int
    """The index of this one among them."""


class Staging(Protocol):
    """Host memory for the values of one tensor, until `commit` moves them to the devices."""

    def parts(self) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
        """The parts that this process holds, each once, with uninitialized memory for its values."""

    def commit(self) -> None:
        """Load the values into the tensor, whose layout stays, and release the host memory."""


class HostShards(Protocol):
    """Pieces of tensors that are read and written through host memory: a process holds several shards of each."""

    def read(self, t: torch.Tensor) -> Sequence[HostPiece]:
        """The parts of a tensor that this process holds, each once."""

    def stage(self, t: torch.Tensor) -> Staging:
        """Host memory to load values into the tensor."""

    def whole(self, t: torch.Tensor) -> torch.Tensor:
        """The whole value in host memory. All processes must call it."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, layout: Any) -> torch.Tensor:
        """A tensor with a layout, to load values into."""

    def loadable(self, parameter: Any) -> Any:
        """A wrapped model's parameter with the interface of `fsdp.parameter.ShardedParameter` for loading."""


class Engine(Protocol):
    """What differs between the engines. Everything else in the package exists once."""

    name: str
    """For reports and messages only."""
    compiles_steps: bool
    """Operators are recorded, and whole steps compiled: shapes are fixed, reading a value ends a program, and the
    compiler schedules communication, updates and the logits."""
    drives_machine: bool
    """One process drives all devices of its machine, as one logical device."""
    lacks: Mapping[str, str]
    """What the engine cannot do, by the names that `require` is called with, and what to do about it."""

    @property
    def devices(self) -> Devices:
        """Processes and devices."""

    @property
    def layouts(self) -> Any:
        """The names of `fullshard.spmd` that lay out tensors: a module."""

    @property
    def FSDPv2(self) -> Any:
        """The class that shards a model by a plan."""

    @property
    def host_shards(self) -> HostShards | None:
        """Pieces of tensors; None where a process holds at most one shard of a tensor and addresses it directly."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """torch's `checkpoint(function, *args, use_reentrant=…, **kwargs)`: what backward needs is computed again."""

    def as_shard(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """A whole value with the shape of a wrapped parameter, laid out as its shard is."""

    def compilations(self) -> int | None:
        """The number of programs compiled so far; None where steps are not compiled."""

    def guide_name(self, module: str, known_as: str, name: str, instead: str) -> Any:
        """A name of PyTorch/XLA that fullshard does not have: its own object, or an error with `instead`."""

    def check_sharding(self, settings: Any) -> None:
        """Refuse sharding settings (an `EngineSettings`) that the engine does not have."""

    def sharding_overrides(self, settings: Any) -> dict[str, Any]:
        """Sharding settings that other keys, those of PyTorch/XLA, imply here."""

    def buffer_dtype(self, settings: Any) -> str | None:
        """The name of the dtype that sharding settings cast floating-point buffers to; None leaves them as they are."""

    def sharding_notes(self, settings: Any) -> Iterator[str]:
        """What happens with sharding settings that are not taken literally."""

    def check_run(self, config: Any) -> None:
        """Refuse settings of a training run (an `SFTConfig`) that the engine does not have."""


# --- which engine -----------------------------------------------------------------------------------------------------

_factories: dict[str, Callable[[], Engine]] = {}


def register(**engines: Callable[[], Engine]) -> None:
    """Set how each engine is made, by its name. The package's `__init__` calls this."""
    _factories.update(engines)


@functools.cache
def current() -> Engine:
    """The engine of this process. Raises where none can be offered."""
    return _factories[choose(os.environ, _version("torch"), _version("torch_xla"))]()


def require(feature: str, what: str) -> None:
    """Raise where `what` needs a feature that the engine of this process lacks, or where there is no engine."""
    if feature in (engine := current()).lacks:
        raise RuntimeSetupError(
            f"{what} is not available on the {engine.name} engine, which this process uses (torch {_version('torch')}, "
            f"torch_xla {_version('torch_xla')}): {engine.lacks[feature]}"
        )


def can_be_used() -> bool:
    """Whether this installation has an engine. Where it has none, modules can be imported and not used."""
    try:
        current()
    except RuntimeSetupError:
        return False
    return True


def choose(env: Mapping[str, str], torch: str | None, torch_xla: str | None) -> str:
    """The engine for the given versions of torch and torch_xla; None for one that is not installed."""
    offered = []
    if torch is not None and version_numbers(torch) >= TORCH_NEEDED:
        offered.append("torch")
    if (
        torch is not None
        and torch_xla is not None
        and version_numbers(torch) == version_numbers(torch_xla) >= TORCH_XLA_NEEDED
    ):
        offered.append("xla")
    requested = env.get(ENGINE_VARIABLE, "")
    if requested not in ("", "torch", "xla"):
        raise RuntimeSetupError(f"{ENGINE_VARIABLE}={requested}: expected torch or xla.")
    reasons = (
        f"torch {torch or 'is not installed'}, torch_xla {torch_xla or 'is not installed'}. The torch engine needs "
        f"torch {_dotted(TORCH_NEEDED)} or newer; the xla engine needs torch {_dotted(TORCH_XLA_NEEDED)} or newer and "
        f"the torch_xla of the same version."
    )
    if requested and requested not in offered:
        raise RuntimeSetupError(f"{ENGINE_VARIABLE}={requested}: this engine cannot run here: {reasons}")
    if not offered:
        raise RuntimeSetupError(f"No engine can run in this installation: {reasons}")
    return requested or offered[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
