"""How the machines of a job find each other: an address and a port on machine 0, and a signed store there.

The rendezvous is torch's, static or `c10d`; what its agents and ranks leave in the store is signed with the job's
secret (`job_store.py`), and the store listens on one interface.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fullshard.config.errors import ConfigError, RuntimeSetupError
from fullshard.distributed.job_store import SECRET_VARIABLE, JobStore, listen
from fullshard.launch.resolve import LaunchSettings

LIMITS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
"""The time limits of the `c10d` rendezvous, as torchrun's `--rdzv_conf` names them."""


@dataclass(frozen=True)
class MachineRendezvous:
    """torch's rendezvous handler, and what the processes need to know of it."""

    handler: RendezvousHandler
    master_address: str | None
    """None if the backend chooses the master itself."""
    master_port: int | None
    store: AgentStore | None = None
    """The store of all machines, if there are several."""


def open_rendezvous(settings: LaunchSettings, say: Callable[[str], None]) -> MachineRendezvous:
    """The rendezvous of this job; machine 0 must be reachable."""
    processes, run = settings.processes, settings.run
    options: dict[str, Any] = dict(part.split("=", 1) for part in run.rdzv_conf.split(",") if "=" in part)
    backend = processes.rdzv_backend if processes.num_machines > 1 else "static"
    options = _backend_options(settings, backend) | options
    address, store = _open_store(settings, timedelta(seconds=int(options["timeout"])), say, backend)
    parameters = RendezvousParameters(
        backend=backend, endpoint=f"{address}:{store.port if store else processes.main_process_port}",
        run_id=run.rdzv_id, min_nodes=processes.num_machines, max_nodes=processes.num_machines, local_addr=None,
        **options,
    )  # fmt: skip
    if store is None:
        return MachineRendezvous(rendezvous_registry.get_rendezvous_handler(parameters), None, None)
    signed = AgentStore(store, run.rdzv_id, f"{run.rdzv_id}/", say)
    shared = signed if processes.num_machines > 1 else None
    if backend == "c10d":
        return MachineRendezvous(_c10d(settings, signed, options), address, store.port, shared)
    handler = _SignedStatic(
        address, store.port, processes.machine_rank, processes.num_machines, run.rdzv_id, int(options["timeout"])
    )
    handler.signed = signed
    return MachineRendezvous(handler, address, store.port, shared)


class AgentStore(JobStore):
    """Signed values under the names of a store of torch's, as torch's elastic agents call them."""

    def set(self, key: str, value: str | bytes) -> None:
        """Sign and store a value."""
        self.put(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sign and store several values."""
        for key, value in zip(keys, values, strict=True):
            self.put(key, value)

    def get(self, key: str) -> bytes:
        """A value; waits until it has arrived."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values; waits until all have arrived."""
        self.wait(keys)
        values = [self.open(key, value) for key, value in zip(keys, self._values(list(keys)), strict=True)]
        return [_accepted(key, value) for key, value in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is as expected, or is missing and nothing is expected; returns what it is now."""
        old, new = (one.encode() if isinstance(one, str) else one for one in (expected, desired))
        return self.change(key, lambda now: new if (now or b"") == old else now or old)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until these values have arrived."""
        end, pause = time.monotonic() + (timeout or self.timeout).total_seconds(), 0.01
        # Polled: a wait that times out makes torch print a warning about its sockets.
        while not self.has(keys):
            if time.monotonic() > end:
                missing = [key for key in keys if not self.has([key])]
                raise dist.DistStoreError(f"nothing arrived for {', '.join(missing)}")
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)

    @property
    def port(self) -> int:
        """The port of the store."""
        return int(self._store.port)

    def within(self, round_: str) -> AgentStore:
        """The values of one round of the rendezvous."""
        return AgentStore(self._store, f"{self._generation.decode()}/{round_}", f"{self._prefix}{round_}/", self._warn)

    @property
    def timeout(self) -> timedelta:
        """The time limit of waits."""
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of waits."""
        self._store.set_timeout(timeout)


def _accepted(key: str, value: bytes | None) -> bytes:
    if value is None:
        raise dist.DistStoreError(f"the value of {key} is not signed with this machine's {SECRET_VARIABLE}")
    return value


class _SignedStatic(StaticTCPRendezvous):
    """torch's static rendezvous, in a store that is open already."""

    signed: AgentStore

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self.signed, self.rank, self.world_size, where)


class _SignedC10d(DynamicRendezvousHandler):
    """torch's `c10d` rendezvous, whose ranks use the store of machine 0: no other is opened."""

    use_agent_store = True

    def _get_store(self) -> Any:
        store: Any = self._store
        return store.within(f"round {self._state_holder.state.round}")

    def _create_tcp_store_server(self, *_: Any) -> Any:
        return self._store


def _c10d(settings: LaunchSettings, store: Any, options: Mapping[str, Any]) -> RendezvousHandler:
    limits = {name.rpartition("_")[0]: options[name] for name in LIMITS if name in options}
    name, machines = settings.run.rdzv_id, settings.processes.num_machines
    return _SignedC10d.from_backend(
        name, store, C10dRendezvousBackend(store, name), machines, machines,
        timeout=RendezvousTimeout(**{key: timedelta(seconds=int(one)) for key, one in limits.items()}),
        **{key: int(options[key]) for key in ("keep_alive_interval", "keep_alive_max_attempt") if key in options},
    )  # fmt: skip


def give_secret(settings: LaunchSettings, environment: MutableMapping[str, str]) -> None:
    """Set the job's secret for all processes of this machine: that of the file, else of the variable. Where there is
    only one machine and neither is set, a new one; several machines cannot agree on one without an insecure channel."""
    path = settings.processes.job_secret_file
    if path is not None:
        try:
            environment[SECRET_VARIABLE] = Path(path).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"job_secret_file {path}: {getattr(error, 'strerror', None) or error}") from None
        if not environment[SECRET_VARIABLE]:
            raise ConfigError(
                f"job_secret_file {path} is empty; expected a secret, such as that of openssl rand -hex 32"
            )
    elif settings.processes.num_machines == 1 and not settings.one_task_per_process:
        environment.setdefault(SECRET_VARIABLE, secrets.token_hex(32))


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
    own = {"rank": machine} if backend == "static" else {"is_host": machine == 0} if backend == "c10d" else {}
    return {"timeout": seconds, "join_timeout": seconds, "read_timeout": seconds} | own


def _open_store(
    settings: LaunchSettings, timeout: timedelta, say: Callable[[str], None], backend: str
) -> tuple[str, dist.TCPStore | None]:
    """The address of machine 0 and the store there; no store for a backend that has its own."""
    processes = settings.processes
    port = processes.main_process_port or 0
    if processes.num_machines == 1:
        host = "127.0.0.1"
        try:
            return host, listen(host, port, timeout)
        except PermissionError:
            raise _forbidden(port) from None
        except OSError:
            store = listen(host, 0, timeout)
            say(f"port {port} is in use; using {store.port} instead")
            return host, store
    assert processes.main_process_ip is not None
    host = processes.main_process_ip
    if backend not in ("static", "c10d"):
        return host, None
    if processes.machine_rank > 0:
        _wait_for_machine_0(host, port, settings.run.rdzv_timeout, processes.machine_rank)
        return host, dist.TCPStore(host, port, is_master=False, timeout=timeout)
    try:
        return host, listen(host, port, timeout)
    except PermissionError:
        raise _forbidden(port) from None
    except socket.gaierror as error:
        raise RuntimeSetupError(
            f"main_process_ip {host}: the name cannot be resolved on machine 0 ({error.strerror}); use an address of "
            "this machine that the others reach"
        ) from None
    except OSError:
        raise RuntimeSetupError(
            f"port {port} of this machine is in use, and the other machines expect the rendezvous there; end the "
            "program that uses it, or set another --main_process_port on all machines"
        ) from None


def _forbidden(port: int) -> RuntimeSetupError:
    return RuntimeSetupError(f"port {port} may not be used; set a --main_process_port above 1023")


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
