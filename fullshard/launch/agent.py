"""Starts the processes of one machine and supervises them until the last has ended, on torchrun's elastic agent.

`Agent` adds to torch's agent: the first Ctrl-C or SIGTERM is forwarded, and the processes have `--grace` seconds to
save; the second ends them at once. A preempted run, or one with a user error, is not restarted. No process outlives
the launcher.

Exit codes of `fullshard launch`:

| code | meaning |
|---|---|
| 0 | every process succeeded |
| 2 | `EXIT_USER_ERROR`: an error that the user can correct; not restarted |
| 69 | `EXIT_RANK_LOST`: a rank lost another one, on another machine for example; restarted |
| 75 | `EXIT_PREEMPTED`: the run saved a checkpoint after a signal and stopped; not restarted |
| 128 + n | a process, or the launcher, was ended by signal n |
| other | the exit code of the process that failed first |
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError

from fullshard.checkpoint.preemption import EXIT_PREEMPTED
from fullshard.distributed.processes import is_stopped
from fullshard.distributed.rank_env import JOINED_VARIABLE, choose_init_timeout
from fullshard.distributed.temporary_folders import temporary_folder
from fullshard.distributed.watchdog.heartbeat import LOST_AFTER
from fullshard.launch.guard import Guard
from fullshard.launch.machine_rendezvous import (
    AgentStore,
    MachineRendezvous,
    give_secret,
    open_rendezvous,
    rendezvous_error,
)
from fullshard.launch.resolve import LaunchSettings
from fullshard.launch.worker import EXIT_RANK_LOST, EXIT_USER_ERROR, PARENT

CRASH_PATIENCE = 5.0
"""Seconds the other processes have to fail by themselves, with their own messages, once one has crashed."""
LAST_LOOK = 2.0
"""Seconds that the launcher of the store waits after a failure, in which the others read why."""
STOPPED_AFTER = 6.0
"""Seconds after which stopped processes are reported."""
SAVED = "the processes saved a checkpoint and ended; the same command with --resume continues from it"
WORKER = str(Path(__file__).with_name("worker.py"))


def launch(settings: LaunchSettings, say: Callable[[str], None]) -> int:
    """Run the script on all ranks of this machine; returns the exit code. `say` prints a line for the user."""
    give_secret(settings, os.environ)
    os.environ.update(environment := settings.environment(os.environ))
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    if settings.one_task_per_process:
        _become_rank(settings)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # `say` reports the same in plain words
    with temporary_folder() as folder:
        os.environ[JOINED_VARIABLE] = str(folder)
        rendezvous = open_rendezvous(settings, say)
        spec = worker_spec(settings, rendezvous)
        agent = Agent(spec, settings, say, settings.run.log_dir or str(folder), rendezvous.store)
        agent.guard = Guard(str(folder))
        try:
            return _run(agent, settings, say)
        finally:
            agent.guard.end()


def _run(agent: Agent, settings: LaunchSettings, say: Callable[[str], None]) -> int:
    try:
        result = agent.run()
    except SignalException as error:
        codes = agent.exit_codes
        if EXIT_PREEMPTED in codes.values():
            say(SAVED)
            return EXIT_PREEMPTED
        return 128 + error.sigval
    except KeyboardInterrupt:  # before the first process was started
        return 128 + signal.SIGINT
    except (RendezvousError, DistError) as error:
        raise rendezvous_error(settings, error) from error
    finally:
        agent.end()
        with contextlib.suppress(Exception):
            agent.get_worker_group().spec.rdzv_handler.shutdown()
    if result is None or not result.is_failed():
        return 0
    return agent.report_failure()


def command(settings: LaunchSettings) -> tuple[str, ...]:
    """The command line of one process, which other users of the machine can read: secrets in it are in the process's
    environment."""
    kind = "module" if settings.run.module else "program" if settings.run.no_python else "file"
    return (sys.executable, "-u", WORKER, kind, *settings.shown_command)


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


def worker_spec(settings: LaunchSettings, rendezvous: MachineRendezvous) -> WorkerSpec:
    """What torch's agent needs to know: the command, the number of processes, the rendezvous."""
    run = settings.run
    executable, *arguments = command(settings)
    return WorkerSpec(
        role=run.role, local_world_size=settings.local_processes, entrypoint=executable, args=tuple(arguments),
        rdzv_handler=rendezvous.handler, max_restarts=run.max_restarts, monitor_interval=run.monitor_interval,
        master_addr=rendezvous.master_address, master_port=rendezvous.master_port,
    )  # fmt: skip


# --- supervision ----------------------------------------------------------------------------------------------------


class Agent(LocalElasticAgent):
    """torch's agent for the processes of one machine, with our rules for ending them."""

    def __init__(
        self, spec: WorkerSpec, settings: LaunchSettings, say: Callable[[str], None], log_dir: str,
        store: AgentStore | None = None,
    ):  # fmt: skip
        self.settings, self.say = settings, say
        self._store = store
        """The store of all machines, if there are several."""
        self.exit_codes: dict[int, int] = {}
        """By rank, of the processes that have ended, in the order in which they ended."""
        self.user_errors: dict[int, str] = {}
        """By rank, the message of a user error."""
        self.rank_lost: dict[int, str] = {}
        """By rank, the message about another rank that is gone, perhaps on another machine."""
        self.positions: dict[int, str] = {}
        """By rank, where in the program it was then."""
        self._outcome_known = False
        """Whether the outcome is known: processes that are left are killed, and their exit codes do not count."""
        self._stopped: dict[int, float] = {}
        """By rank, since when a process is stopped."""
        self._named: set[int] = set()
        """The stopped ranks that were reported."""
        self._started = 0.0
        """When the processes of this attempt were started."""
        self.guard: Guard | None = None
        run = settings.run
        tee = Std(int(run.tee if run.tee is not None else 3 if run.log_dir else 0))
        logs = DefaultLogsSpecs(log_dir=log_dir, redirects=Std.NONE, tee=tee)
        super().__init__(spec, logs, log_line_prefix_template="[rank ${rank}] ")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        os.environ[PARENT] = str(os.getpid())
        self.exit_codes, self.user_errors, self.rank_lost, self.positions, self._outcome_known = {}, {}, {}, {}, False
        self._stopped, self._named, self._started = {}, set(), time.monotonic()
        started: dict[int, Any] = super()._start_workers(worker_group)
        if self.guard is not None:
            self.guard.watch([handler.proc.pid for handler in self._running()])
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Like torch's; if a process fails, decides about the other processes and about a restart."""
        self._collect_exits()
        bad = [code for code in self.exit_codes.values() if code != 0]
        if bad:
            self._wait_for_rest(self.settings.run.grace if bad[0] == EXIT_PREEMPTED else CRASH_PATIENCE)
            self._outcome_known = True
            self._tell_other_machines()
            self._kill()
            if self._is_user_error() or EXIT_PREEMPTED in self.exit_codes.values():
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                attempt = worker_group.spec.max_restarts - self._remaining_restarts + 1
                self.say(f"{self._describe_crash()}; restarting ({attempt} of {worker_group.spec.max_restarts})")
        elif len(self.exit_codes) < len(worker_group.workers):
            self._look_for_stopped()
            self._look_at_other_machines()
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _collect_exits(self) -> None:
        """Record the exit codes of processes that have ended by themselves, and the messages they left."""
        if self._pcontext is None or self._outcome_known:
            return
        handlers = self._pcontext.subprocess_handlers
        for worker in self._worker_group.workers:
            handler = handlers.get(worker.local_rank)
            if handler is None or worker.global_rank in self.exit_codes or handler.proc.poll() is None:
                continue
            self.exit_codes[worker.global_rank] = handler.proc.returncode
            messages = {EXIT_USER_ERROR: self.user_errors, EXIT_RANK_LOST: self.rank_lost}.get(handler.proc.returncode)
            if messages is not None:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    report = json.loads(Path(self._pcontext.error_files[worker.local_rank]).read_text())
                    messages[worker.global_rank] = str(report["message"])
                    self.positions[worker.global_rank] = str(report.get("at", ""))

    def _look_for_stopped(self) -> None:
        """Report stopped processes that no rank can report: before they have joined the others, or all that are left.

        The others wait in vain for one that has not joined. It is given up when a rank gives up a stopped one.
        """
        now = time.monotonic()
        left = [worker for worker in self._worker_group.workers if worker.global_rank not in self.exit_codes]
        for worker in left:
            if is_stopped(worker.id):
                self._stopped.setdefault(worker.global_rank, now)
            else:
                self._stopped.pop(worker.global_rank, None)
                self._named.discard(worker.global_rank)
        nobody_waits = self.settings.processes.num_machines == 1 and len(self._stopped) == len(left)
        for worker in left:
            rank, seconds = worker.global_rank, now - self._stopped.get(worker.global_rank, now)
            if seconds < STOPPED_AFTER or not (nobody_waits or self._was_starting(rank)):
                continue
            if rank not in self._named:
                self._named.add(rank)
                self.say(f"{self._name(worker)} is stopped (SIGSTOP, or a debugger); the job waits for it")
            if seconds >= LOST_AFTER and not nobody_waits:
                self.exit_codes[rank] = EXIT_RANK_LOST
                self.rank_lost[rank] = (
                    f"{self._name(worker)} is stopped (SIGSTOP, or a debugger) and has not joined the other ranks for "
                    f"{LOST_AFTER:g} s"
                )

    def _was_starting(self, rank: int) -> bool:
        """Whether a stopped rank has not joined the others, and was stopped while it still could."""
        return self._is_starting(self._stopped[rank]) and not self._has_joined(rank)

    def _is_starting(self, now: float) -> bool:
        """Whether ranks may still be waiting for others to join."""
        return now - self._started < choose_init_timeout(None, os.environ)

    def _has_joined(self, rank: int) -> bool:
        return (Path(os.environ[JOINED_VARIABLE]) / f"{self._attempt}-{rank}").exists()

    @property
    def _attempt(self) -> int:
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    # --- other machines ---------------------------------------------------------------------------------------------

    def _tell_other_machines(self) -> None:
        """Leave a line about ranks that failed before they joined: those of other machines wait for them in vain."""
        failed = [rank for rank, code in self.exit_codes.items() if code not in (0, EXIT_PREEMPTED)]
        if self._store is None or not self._is_starting(time.monotonic()) or all(map(self._has_joined, failed)):
            return
        message = self._describe_failure()
        with contextlib.suppress(DistError, OSError, RuntimeError):
            self._store.replace(self._failure_key, message)
            if self.settings.processes.machine_rank == 0:
                time.sleep(LAST_LOOK)  # the store ends with this process

    def _look_at_other_machines(self) -> None:
        """Give up ranks that wait for one that has failed on another machine."""
        waiting = [
            worker.global_rank for worker in self._worker_group.workers if worker.global_rank not in self.exit_codes
        ]
        waiting = [rank for rank in waiting if not self._has_joined(rank)]
        if self._store is None or not waiting or not self._is_starting(time.monotonic()):
            return
        with contextlib.suppress(DistError, OSError, RuntimeError):
            messages = self._store.read([self._failure_key])
            for rank in waiting if messages else ():
                self.exit_codes[rank] = EXIT_RANK_LOST
                self.rank_lost[rank] = messages[self._failure_key]

    @property
    def _failure_key(self) -> str:
        return f"failure of attempt {self._attempt}"

    def _name(self, worker: Any) -> str:
        return f"rank {worker.global_rank} (process {worker.id} on {socket.gethostname()})"

    def _wait_for_rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while len(self.exit_codes) < len(self._worker_group.workers) and time.monotonic() < end:
            time.sleep(0.05)
            self._collect_exits()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 0) -> None:
        """Forward the signal and wait until the processes have ended, `--grace` is over or a second signal arrives."""
        death_sig = signal.SIGTERM if death_sig == signal.SIGHUP else death_sig  # a closed terminal: save as well
        hurried: list[int] = []
        with _handling(lambda number, frame: hurried.append(number)):
            if self._pcontext is not None and any(self._running()):
                self.say(
                    f"{signal.Signals(death_sig).name}: the processes have {self.settings.run.grace:g} s to save and "
                    "end; a second signal ends them at once"
                )
                self._signal(death_sig)
                end = time.monotonic() + self.settings.run.grace
                while any(self._running()) and time.monotonic() < end and not hurried:
                    time.sleep(0.05)
            self._collect_exits()
            self.end()
            self._collect_exits()

    def end(self) -> None:
        """End all processes that are left, and their children."""
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
        """Each process leads its own process group; its children may have outlived it."""
        if self._pcontext is None:
            return
        for handler in self._pcontext.subprocess_handlers.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(handler.proc.pid, signal.SIGKILL)
            handler.proc.wait()

    def _is_user_error(self) -> bool:
        """Whether the user can correct the error. If a process was killed, the others' errors are only consequences."""
        bad = [code for code in self.exit_codes.values() if code != 0]
        return bool(self.user_errors) and bad[0] > 0 and -signal.SIGKILL not in bad

    def _first(self) -> tuple[int, int]:
        """The rank that caused the failure, and its exit code."""
        ended = [(rank, code) for rank, code in self.exit_codes.items() if code != 0]
        # A rank that only lost another one is not the cause.
        caused = [one for one in ended if one[1] != EXIT_RANK_LOST] or ended
        return next((one for one in caused if one[1] < 0), caused[0])

    def _describe_crash(self) -> str:
        """What happened first, as one line."""
        rank, code = self._first()
        if rank in self.rank_lost:
            return self.rank_lost[rank].splitlines()[0]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        waited = next((f"; rank {one} waited for it in {at}" for one, at in self.positions.items() if at), "")
        name = self._name(next(worker for worker in self._worker_group.workers if worker.global_rank == rank))
        return f"{name} {how}{waited}"

    def _describe_failure(self) -> str:
        """What ended the processes of this machine, as one line for the others."""
        if self._is_user_error():
            rank, message = next(iter(self.user_errors.items()))
            return f"rank {rank} on {socket.gethostname()}: {message.splitlines()[0]}"
        return self._describe_crash()

    def report_failure(self) -> int:
        """Report why the run failed; returns the launcher's exit code."""
        if EXIT_PREEMPTED in self.exit_codes.values():
            self.say(SAVED)
            return EXIT_PREEMPTED
        if self._is_user_error():
            for message in dict.fromkeys(self.user_errors.values()):
                ranks = [rank for rank, text in self.user_errors.items() if text == message]
                everyone = len(ranks) == len(self._worker_group.workers)
                self.say(message if everyone else f"rank {', '.join(map(str, sorted(ranks)))}: {message}")
            return EXIT_USER_ERROR
        logs = f"; logs are in {self._logs_specs.root_log_dir}" if self.settings.run.log_dir else ""
        self.say(self._describe_crash() + logs)
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
