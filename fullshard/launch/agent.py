"""Starts the processes and looks after them until the last has ended, under torchrun's elastic agent.

The agent (`Agent`) adds to torch's: the first Ctrl-C or SIGTERM is passed on and the processes get `--grace` seconds to
save, the second ends them at once; a preempted or mistaken run is not restarted; and no process outlives the launcher.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from fullshard.checkpoint.preemption import EXIT_PREEMPTED
from fullshard.errors import RuntimeSetupError
from fullshard.launch.resolve import LaunchSettings
from fullshard.launch.worker import EXIT_RANK_LOST, EXIT_USER_ERROR, PARENT
from fullshard.processes import is_stopped

CRASH_PATIENCE = 5.0
"""Seconds the other processes get to fail by themselves, and say why, once one has crashed."""
STOPPED_AFTER = 6.0
"""Seconds after which stopped processes are named."""
WORKER = str(Path(__file__).with_name("worker.py"))


def launch(settings: LaunchSettings, say: Callable[[str], None]) -> int:
    """Run the script on all ranks of this machine; returns the exit code. `say` prints a line for the user."""
    os.environ.update(environment := settings.environment(os.environ))
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    if settings.one_task_per_process:
        _become_rank(settings)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say, `say` says in words
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        return _run(Agent(_spec(settings, say), settings, say, settings.run.log_dir or folder), settings, say)


def _run(agent: Agent, settings: LaunchSettings, say: Callable[[str], None]) -> int:
    try:
        result = agent.run()
    except SignalException as error:
        codes = agent.exit_codes
        if EXIT_PREEMPTED in codes.values():
            say("the processes have saved and ended; the same command with --resume goes on from there")
            return EXIT_PREEMPTED
        return 128 + error.sigval
    except KeyboardInterrupt:  # before the first process was there
        return 128 + signal.SIGINT
    except (RendezvousError, DistError) as error:
        raise _no_meeting(settings, error) from error
    finally:
        agent.end()
        with contextlib.suppress(Exception):
            agent.get_worker_group().spec.rdzv_handler.shutdown()
    if result is None or not result.is_failed():
        return 0
    return agent.verdict()


def command(settings: LaunchSettings) -> tuple[str, ...]:
    """The command line of one process."""
    kind = "module" if settings.run.module else "program" if settings.run.no_python else "file"
    return (sys.executable, "-u", WORKER, kind, *settings.command)


def _become_rank(settings: LaunchSettings) -> None:
    """Turn this process, one of `srun`'s tasks, into its rank."""
    place = settings.slurm
    assert place is not None
    os.environ |= {
        "RANK": str(place.task), "WORLD_SIZE": str(place.tasks), "LOCAL_RANK": str(place.local_task),
        "LOCAL_WORLD_SIZE": str(place.tasks_here), "GROUP_RANK": str(place.node), "GROUP_WORLD_SIZE": str(place.nodes),
        "MASTER_ADDR": str(settings.processes.main_process_ip),
        "MASTER_PORT": str(settings.processes.main_process_port),
    }  # fmt: skip
    words = command(settings)
    os.execv(words[0], words)


# --- meeting --------------------------------------------------------------------------------------------------------


def _spec(settings: LaunchSettings, say: Callable[[str], None]) -> WorkerSpec:
    processes, run = settings.processes, settings.run
    several = processes.num_machines > 1
    address, port = _meeting_place(settings, say)
    options: dict[str, Any] = dict(part.split("=", 1) for part in run.rdzv_conf.split(",") if "=" in part)
    backend = processes.rdzv_backend if several else "static"
    parameters = RendezvousParameters(
        backend=backend, endpoint=f"{address}:{port}", run_id=run.rdzv_id, min_nodes=processes.num_machines,
        max_nodes=processes.num_machines, local_addr=None,
        **(_backend_options(settings, backend) | options),
    )  # fmt: skip
    executable, *arguments = command(settings)
    return WorkerSpec(
        role=run.role, local_world_size=settings.local_processes, entrypoint=executable, args=tuple(arguments),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(parameters), max_restarts=run.max_restarts,
        monitor_interval=run.monitor_interval, master_addr=address if backend == "static" else None,
        master_port=port if backend == "static" else None,
    )  # fmt: skip


def _backend_options(settings: LaunchSettings, backend: str) -> dict[str, Any]:
    seconds, machine = max(1, int(settings.run.rdzv_timeout)), settings.processes.machine_rank
    if backend == "static":
        return {"timeout": seconds, "rank": machine}
    return {"join_timeout": seconds, "read_timeout": seconds} | ({"is_host": machine == 0} if backend == "c10d" else {})


def _meeting_place(settings: LaunchSettings, say: Callable[[str], None]) -> tuple[str, int]:
    processes = settings.processes
    asked = processes.main_process_port
    if processes.num_machines == 1:
        if asked and _busy("127.0.0.1", asked):
            port = _free_port()
            say(f"port {asked} is in use, so {port} is taken instead")
            return "127.0.0.1", port
        return "127.0.0.1", asked or _free_port()
    assert processes.main_process_ip is not None and asked is not None
    if processes.machine_rank == 0:
        if _busy("", asked):
            raise RuntimeSetupError(
                f"port {asked} of this machine is in use, and the other machines expect the rendezvous there; end what "
                "uses it, or give another --main_process_port on all machines"
            )
    else:
        _reach(processes.main_process_ip, asked, settings.run.rdzv_timeout, processes.machine_rank)
    return processes.main_process_ip, asked


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _busy(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise RuntimeSetupError(f"port {port} may not be used; give a --main_process_port above 1023") from None
        except OSError:
            return True
    return False


def _reach(host: str, port: int, seconds: float, machine: int) -> None:
    """Wait until machine 0 answers, so that it can be named if it does not."""
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


def _no_meeting(settings: LaunchSettings, error: Exception) -> RuntimeSetupError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return RuntimeSetupError(
        f"the {settings.processes.num_machines} machine(s) did not meet at {settings.endpoint} within "
        f"{settings.run.rdzv_timeout:g} s (this is machine {settings.processes.machine_rank}): {reason[:200]}. Check "
        "that every machine was started and reaches that address; --rdzv_timeout sets the time allowed"
    )


# --- looking after --------------------------------------------------------------------------------------------------


class Agent(LocalElasticAgent):
    """torch's agent for the processes of one machine, with our rules for ending them."""

    def __init__(self, spec: WorkerSpec, settings: LaunchSettings, say: Callable[[str], None], log_dir: str):
        self.settings, self.say = settings, say
        self.exit_codes: dict[int, int] = {}
        """By rank, of the processes that have ended, in the order they did."""
        self.reports: dict[int, str] = {}
        """By rank, what a process said is the user's to put right."""
        self.echoes: dict[int, str] = {}
        """By rank, what a process said of another rank that is gone, perhaps one of another machine."""
        self.places: dict[int, str] = {}
        """By rank, where in the program it was then."""
        self._judged = False
        """Whether it is known how the processes ended: what is left of them is killed, and says nothing."""
        self._stopped: float | None = None
        """Since when all processes that are left are stopped."""
        run = settings.run
        tee = Std(int(run.tee if run.tee is not None else 3 if run.log_dir else 0))
        logs = DefaultLogsSpecs(log_dir=log_dir, redirects=Std.NONE, tee=tee)
        super().__init__(spec, logs, log_line_prefix_template="[rank ${rank}] ")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        os.environ[PARENT] = str(os.getpid())
        self.exit_codes, self.reports, self.echoes, self.places, self._judged = {}, {}, {}, {}, False
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """As torch's, but a process that ends badly decides here what becomes of the others and of restarts."""
        self._look()
        bad = [code for code in self.exit_codes.values() if code != 0]
        if bad:
            self._wait_for_rest(self.settings.run.grace if bad[0] == EXIT_PREEMPTED else CRASH_PATIENCE)
            self._judged = True
            self._kill()
            if self._is_mistake() or EXIT_PREEMPTED in self.exit_codes.values():
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                attempt = worker_group.spec.max_restarts - self._remaining_restarts + 1
                self.say(f"{self._crash()}; starting again ({attempt} of {worker_group.spec.max_restarts})")
        elif len(self.exit_codes) < len(worker_group.workers):
            self._look_for_stopped()
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _look(self) -> None:
        """Note which processes have ended by themselves, and what they left to say."""
        if self._pcontext is None or self._judged:
            return
        handlers = self._pcontext.subprocess_handlers
        for worker in self._worker_group.workers:
            handler = handlers.get(worker.local_rank)
            if handler is None or worker.global_rank in self.exit_codes or handler.proc.poll() is None:
                continue
            self.exit_codes[worker.global_rank] = handler.proc.returncode
            told_by = {EXIT_USER_ERROR: self.reports, EXIT_RANK_LOST: self.echoes}.get(handler.proc.returncode)
            if told_by is not None:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    told = json.loads(Path(self._pcontext.error_files[worker.local_rank]).read_text())
                    told_by[worker.global_rank] = str(told["message"])
                    self.places[worker.global_rank] = str(told.get("at", ""))

    def _look_for_stopped(self) -> None:
        """Say it where all processes that are left are stopped: no other one is there to do so."""
        left = [worker for worker in self._worker_group.workers if worker.global_rank not in self.exit_codes]
        if not all(is_stopped(worker.id) for worker in left):
            self._stopped = None
        elif self._stopped is None:
            self._stopped = time.monotonic()
        elif time.monotonic() - self._stopped > STOPPED_AFTER:
            self._stopped = math.inf  # once
            for worker in left:
                self.say(f"{self._name(worker)} is stopped (SIGSTOP, or a debugger); the job waits for it")

    def _name(self, worker: Any) -> str:
        return f"rank {worker.global_rank} (process {worker.id} on {socket.gethostname()})"

    def _wait_for_rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while len(self.exit_codes) < len(self._worker_group.workers) and time.monotonic() < end:
            time.sleep(0.05)
            self._look()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 0) -> None:
        """Pass the signal on, wait until the processes have ended, `--grace` is over or a second signal comes."""
        death_sig = signal.SIGTERM if death_sig == signal.SIGHUP else death_sig  # a closed terminal: save, too
        hurried: list[int] = []
        with _handling(lambda number, frame: hurried.append(number)):
            if self._pcontext is not None and any(self._running()):
                self.say(
                    f"{signal.Signals(death_sig).name}: the processes get {self.settings.run.grace:g} s to save and "
                    "end; once more ends them at once"
                )
                self._signal(death_sig)
                end = time.monotonic() + self.settings.run.grace
                while any(self._running()) and time.monotonic() < end and not hurried:
                    time.sleep(0.05)
            self._look()
            self.end()
            self._look()

    def end(self) -> None:
        """End whatever is left, children of the processes included."""
        self._kill()
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL)

    def _running(self) -> Iterator[Any]:
        handlers = self._pcontext.subprocess_handlers.values() if self._pcontext is not None else ()
        return (handler for handler in handlers if handler.proc.poll() is None)

    def _signal(self, number: int) -> None:
        for handler in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(handler.proc.pid, number)

    def _kill(self) -> None:
        """Each process leads a group of its own; what it started may have outlived it."""
        if self._pcontext is None:
            return
        for handler in self._pcontext.subprocess_handlers.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(handler.proc.pid, signal.SIGKILL)
            handler.proc.wait()

    def _is_mistake(self) -> bool:
        """Whether the user can put it right. Where a process was killed, what others say follows from that."""
        bad = [code for code in self.exit_codes.values() if code != 0]
        return bool(self.reports) and bad[0] > 0 and -signal.SIGKILL not in bad

    def _first(self) -> tuple[int, int]:
        """The rank that all else follows from, and its exit code."""
        ended = [(rank, code) for rank, code in self.exit_codes.items() if code != 0]
        # Those that only lost another rank say nothing of the cause.
        caused = [one for one in ended if one[1] != EXIT_RANK_LOST] or ended
        return next((one for one in caused if one[1] < 0), caused[0])

    def _crash(self) -> str:
        """What happened first, in words."""
        rank, code = self._first()
        if rank in self.echoes:
            return self.echoes[rank].splitlines()[0]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        waited = next((f"; rank {one} waited for it in {at}" for one, at in self.places.items() if at), "")
        name = self._name(next(worker for worker in self._worker_group.workers if worker.global_rank == rank))
        return f"{name} {how}{waited}"

    def verdict(self) -> int:
        """Say why the run failed; returns the launcher's exit code."""
        if EXIT_PREEMPTED in self.exit_codes.values():
            self.say("the processes have saved and ended; the same command with --resume goes on from there")
            return EXIT_PREEMPTED
        if self._is_mistake():
            for message in dict.fromkeys(self.reports.values()):
                ranks = [rank for rank, said in self.reports.items() if said == message]
                everyone = len(ranks) == len(self._worker_group.workers)
                self.say(message if everyone else f"rank {', '.join(map(str, sorted(ranks)))}: {message}")
            return EXIT_USER_ERROR
        logs = f"; logs are in {self._logs_specs.root_log_dir}" if self.settings.run.log_dir else ""
        self.say(self._crash() + logs)
        code = self._first()[1]
        return code if code > 0 else 128 - code


@contextlib.contextmanager
def _handling(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
