"""How the machines of a job find each other: an address and a port on machine 0, and torch's rendezvous there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from fullshard.errors import RuntimeSetupError
from fullshard.launch.resolve import LaunchSettings


@dataclass(frozen=True)
class MachineRendezvous:
    """torch's rendezvous handler, and what the processes need to know of it."""

    handler: RendezvousHandler
    master_address: str | None
    """None if the backend chooses the master itself."""
    master_port: int | None


def open_rendezvous(settings: LaunchSettings, say: Callable[[str], None]) -> MachineRendezvous:
    """The rendezvous of this job; machine 0 must be reachable."""
    processes, run = settings.processes, settings.run
    address, port = _endpoint(settings, say)
    options: dict[str, Any] = dict(part.split("=", 1) for part in run.rdzv_conf.split(",") if "=" in part)
    backend = processes.rdzv_backend if processes.num_machines > 1 else "static"
    parameters = RendezvousParameters(
        backend=backend, endpoint=f"{address}:{port}", run_id=run.rdzv_id, min_nodes=processes.num_machines,
        max_nodes=processes.num_machines, local_addr=None, **(_backend_options(settings, backend) | options),
    )  # fmt: skip
    handler = rendezvous_registry.get_rendezvous_handler(parameters)
    return MachineRendezvous(handler, *((address, port) if backend == "static" else (None, None)))


def rendezvous_error(settings: LaunchSettings, error: Exception) -> RuntimeSetupError:
    """The error for machines that did not all come to the rendezvous."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return RuntimeSetupError(
        f"the {settings.processes.num_machines} machine(s) did not meet at {settings.endpoint} within "
        f"{settings.run.rdzv_timeout:g} s (this is machine {settings.processes.machine_rank}): {reason[:200]}. Check "
        "that every machine was started and reaches that address; --rdzv_timeout sets the timeout"
    )


def _backend_options(settings: LaunchSettings, backend: str) -> dict[str, Any]:
    seconds, machine = max(1, int(settings.run.rdzv_timeout)), settings.processes.machine_rank
    if backend == "static":
        return {"timeout": seconds, "rank": machine}
    return {"join_timeout": seconds, "read_timeout": seconds} | ({"is_host": machine == 0} if backend == "c10d" else {})


def _endpoint(settings: LaunchSettings, say: Callable[[str], None]) -> tuple[str, int]:
    """The address and port of the rendezvous, checked from this machine."""
    processes = settings.processes
    asked = processes.main_process_port
    if processes.num_machines == 1:
        if asked and _is_busy("127.0.0.1", asked):
            port = _free_port()
            say(f"port {asked} is in use; using {port} instead")
            return "127.0.0.1", port
        return "127.0.0.1", asked or _free_port()
    assert processes.main_process_ip is not None and asked is not None
    if processes.machine_rank == 0:
        if _is_busy("", asked):
            raise RuntimeSetupError(
                f"port {asked} of this machine is in use, and the other machines expect the rendezvous there; end the "
                "program that uses it, or set another --main_process_port on all machines"
            )
    else:
        _wait_for_machine_0(processes.main_process_ip, asked, settings.run.rdzv_timeout, processes.machine_rank)
    return processes.main_process_ip, asked


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_busy(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise RuntimeSetupError(f"port {port} may not be used; set a --main_process_port above 1023") from None
        except OSError:
            return True
    return False


def _wait_for_machine_0(host: str, port: int, seconds: float, machine: int) -> None:
    """Wait until machine 0 accepts connections; torch's own error would not name it."""
    end, reason = time.monotonic() + seconds, ""
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))).close()
            return
        except socket.gaierror as error:
            reason, left = f"the name cannot be resolved ({error.strerror})", 0.0
        except OSError as error:
            reason = error.strerror or str(error)
        if left <= 0:
            raise RuntimeSetupError(
                f"machine {machine} could not reach machine 0 at {host}:{port} (main_process_ip:main_process_port) "
                f"within {seconds:g} s: {reason}. Start machine 0 first, and check the address and the firewall"
            )
        time.sleep(min(0.5, left))
