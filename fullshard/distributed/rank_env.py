"""Reads the launcher's environment variables and chooses device, backend and timeout.

Everything is a function of environment variables and counts, so every case can be tested on any machine.
`fullshard.runtime` acts on the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fullshard.config.errors import RuntimeSetupError
from fullshard.device import accelerator
from fullshard.device.device_kinds import KINDS

INIT_TIMEOUT_VARIABLE = "FULLSHARD_INIT_TIMEOUT"
DEVICE_VARIABLE = "FULLSHARD_DEVICE"
JOINED_VARIABLE = "FULLSHARD_JOINED"
"""The folder in which a rank leaves a file once it has joined the others: until then the launcher watches it."""
DEFAULT_INIT_TIMEOUT = 300.0


@dataclass(frozen=True)
class Launch:
    """This process's place among all processes, according to the launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_count: int = 1
    master: str = ""
    """`address:port` of the rendezvous; empty if none is needed."""

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size


def read_launcher(env: Mapping[str, str]) -> Launch:
    """The place that torchrun's variables assign to this process; without them the world size is 1."""
    variables = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name)}
    if not variables:
        return Launch()
    rank, world_size = _launcher_int(env, "RANK"), _launcher_int(env, "WORLD_SIZE", at_least=1)
    if rank >= world_size:
        raise RuntimeSetupError(
            f"RANK={rank} with WORLD_SIZE={world_size}: ranks count from 0, so the largest is {world_size - 1}. "
            "Start the processes with torchrun, or correct the variables."
        )
    if world_size == 1:
        return Launch()
    local_rank = _launcher_int(env, "LOCAL_RANK")
    local_world_size = _launcher_int(env, "LOCAL_WORLD_SIZE", at_least=1)
    if local_rank >= local_world_size or local_world_size > world_size:
        raise RuntimeSetupError(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size}: expected "
            "LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE. Start the processes with torchrun, or correct the variables."
        )
    if not env.get("MASTER_ADDR"):
        raise _missing("MASTER_ADDR", env)
    port = _launcher_int(env, "MASTER_PORT", at_least=1)
    nodes = -(-world_size // local_world_size)
    if env.get("GROUP_WORLD_SIZE"):  # torchrun's number of nodes, correct even if nodes have different sizes
        nodes = _launcher_int(env, "GROUP_WORLD_SIZE", at_least=1)
    return Launch(rank, world_size, local_rank, local_world_size, nodes, f"{env['MASTER_ADDR']}:{port}")


def _launcher_int(env: Mapping[str, str], name: str, at_least: int = 0) -> int:
    text = env.get(name)
    if not text:
        raise _missing(name, env)
    try:
        value = int(text)
    except ValueError:
        raise RuntimeSetupError(f"{name}={text!r} is not an integer. Unset it, or start with torchrun.") from None
    if value < at_least:
        raise RuntimeSetupError(f"{name}={value}: expected at least {at_least}. Unset it, or start with torchrun.")
    return value


def _missing(name: str, env: Mapping[str, str]) -> RuntimeSetupError:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = ", ".join(f"{n}={env[n]}" for n in names if env.get(n))
    return RuntimeSetupError(
        f"{name} is not set, but {present} is. Start the processes with torchrun, which sets all of "
        f"{', '.join(names)}; or unset them to run one process."
    )


def read_local_place(env: Mapping[str, str]) -> tuple[int, int] | None:
    """(local rank, local world size), or None if the launcher does not set them."""
    if not (env.get("LOCAL_RANK") and env.get("LOCAL_WORLD_SIZE")):
        return None
    return _launcher_int(env, "LOCAL_RANK"), _launcher_int(env, "LOCAL_WORLD_SIZE", at_least=1)


def gpu_count() -> int:
    """The number of GPUs that this process sees."""
    return accelerator.count()


def choose_device(requested: str | None, local_rank: int, gpus: int, gpu_kind: str = "") -> torch.device:
    """The device `requested`, else a GPU by local rank, else the CPU. `gpu_kind`: the type of the GPUs."""
    gpu_kind = gpu_kind or accelerator.kind()
    if requested not in (None, "", "cpu", *KINDS):
        types = " or ".join(repr(name) for name in ("cpu", *KINDS))
        raise RuntimeSetupError(f"Device {requested!r} is not supported: expected {types} ({DEVICE_VARIABLE}).")
    if requested in KINDS and (gpus == 0 or requested != gpu_kind):
        gpus_text = f" of that type, only {gpu_kind!r}" if gpus else ""
        raise RuntimeSetupError(
            f"Device {requested!r} was requested, but torch sees no GPU{gpus_text} here. Use 'cpu'."
        )
    if requested == "cpu" or gpus == 0:
        return torch.device("cpu")
    return torch.device(gpu_kind, local_rank % gpus)


def choose_backend(device_type: str, *, own: bool) -> str:
    """Gloo for CPU tensors. For those of an accelerator its own backend (NCCL for CUDA), if it can be used (`own`):
    torch has it, and ranks share no device."""
    kind = KINDS.get(device_type)
    if kind is None:
        return "gloo"
    if not own and not kind.gloo:
        raise RuntimeSetupError(
            f"Tensors on {device_type} devices are sent by {kind.backend} only, which cannot be used here: this build "
            f"of torch does not have it, or ranks share a device. Start one rank per device, install the package that "
            f"has {kind.backend}, or set {DEVICE_VARIABLE}=cpu."
        )
    return f"cpu:gloo,{device_type}:{kind.backend if own else 'gloo'}"


def choose_init_timeout(argument: float | None, env: Mapping[str, str]) -> float:
    """Seconds to wait for the other ranks: the argument, else the environment variable, else the default."""
    source, value = "init_timeout", argument
    if argument is None and env.get(INIT_TIMEOUT_VARIABLE):
        source, text = INIT_TIMEOUT_VARIABLE, env[INIT_TIMEOUT_VARIABLE]
        try:
            value = float(text)
        except ValueError:
            raise RuntimeSetupError(f"{source}={text!r}: expected a number of seconds, such as 300.") from None
    if value is not None and not 0 < value < float("inf"):
        raise RuntimeSetupError(f"{source}={value}: expected a positive number of seconds, such as 300.")
    return DEFAULT_INIT_TIMEOUT if value is None else value
