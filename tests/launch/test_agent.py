"""Processes: they start, meet, are ended, are started again or not, and none is left behind."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import Std

from fullshard.config.options import options_of
from fullshard.distributed import temporary_folders
from fullshard.launch import agent as run
from fullshard.launch.command import launch
from fullshard.launch.config import ProcessSettings, RunSettings
from fullshard.launch.resolve import resolve, settle
from tests.pool import ROOT
from tests.test_job_store import listening_on

PROGRAM = str(Path(__file__).with_name("program.py"))


class Launched:
    """`fullshard launch` in a process of its own."""

    def __init__(self, folder: Path, how: str, *flags: str, processes: int = 2, path: str = str(ROOT)):
        self.folder = folder
        words = ["launch", "--cpu", "--num_processes", str(processes), *flags, PROGRAM, how, str(folder)]
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(folder), "HF_HOME": str(folder)}
        environment.pop("OMP_NUM_THREADS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fullshard", *words], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def when(self, *names: str) -> None:
        """Wait until the processes have left these files."""
        end = time.monotonic() + 120
        while not all((self.folder / name).exists() for name in names):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"no {names}: {self.process.communicate()}")
            time.sleep(0.02)

    def end(self, seconds: float = 120) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; no process of the job may be left by then."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the launcher does not end: {self.process.communicate()}")
        nothing_left(self.folder)
        return self.process.returncode, out, err


def launched_here(folder: Path, capfd, how: str, *flags: str) -> tuple[int, str, str]:
    """`fullshard launch` in this process, which has imported torch already: exit code, stdout and stderr of the job."""
    words = ["--cpu", "--num_processes", "2", *flags, PROGRAM, how, str(folder)]
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT), XDG_CONFIG_HOME=str(folder), HF_HOME=str(folder)):
        os.environ.pop("OMP_NUM_THREADS", None)
        try:
            code = launch(words)
        finally:  # torch's agent leaves its own
            for number, handler in handlers.items():
                signal.signal(number, handler)
    nothing_left(folder)
    return code, *capfd.readouterr()


def nothing_left(folder: Path, within: float = 5.0) -> None:
    """No process of a job is alive, nor one that it started."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    end = time.monotonic() + within
    while left := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"left behind: {left}")
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def settled(*flags: str):
    return settle(resolve(["--cpu", "-n", "2", *flags, PROGRAM, "nothing", "x"], {}), 0)


def test_flags_of_the_run_reach_the_agent(tmp_path):
    def agent(*flags):
        settings = settled(*flags)
        spec = run.worker_spec(settings, run.open_rendezvous(settings, print))
        return run.Agent(spec, settings, print, str(tmp_path))

    def spec(*flags):
        return agent(*flags).get_worker_group().spec

    several = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(_free_port()))
    assert (spec("--max_restarts", "3").max_restarts, spec().max_restarts) == (3, 0)
    assert (spec("--monitor_interval", "2").monitor_interval, spec().monitor_interval) == (2.0, 0.1)
    assert (spec("--role", "x").role, spec().role) == ("x", "default")
    assert (spec("--rdzv_id", "x").rdzv_handler.get_run_id(), spec().rdzv_handler.get_run_id()) == ("x", "fullshard")
    assert spec(*several, "--rdzv_timeout", "7").rdzv_handler.timeout.total_seconds() == 7
    assert spec(*several, "--rdzv_conf", "timeout=9").rdzv_handler.timeout.total_seconds() == 9
    assert spec(*several, "--rdzv_backend", "static").rdzv_handler.get_backend() == "static"
    assert spec("--main_process_port", str(port := _free_port())).master_port == port
    assert agent("--tee", "1")._logs_specs._tee is Std.OUT and agent()._logs_specs._tee is Std.NONE
    assert agent("--log_dir", "logs")._logs_specs._tee is Std.ALL
    for flag, kind in (("--module", "module"), ("--no_python", "program"), ("--quiet", "file")):
        settings = dataclasses.replace(settled(), run=RunSettings(**{flag[2:]: True}))
        assert run.command(settings)[3:] == (kind, PROGRAM, "nothing", "x")


def test_every_option_of_the_launcher_is_tried_somewhere():
    """An option that is new here must be given a test, and then a place in this list."""
    run_flags = {
        "test_resolve": "config_file use_fsdp multi_gpu use_deepspeed use_megatron_lm tpu fsdp fsdp_config dry_run "
        "module",
        "test_agent": "module no_python num_cpu_threads_per_process max_restarts grace rdzv_timeout rdzv_conf rdzv_id "
        "monitor_interval log_dir tee role quiet",
        "hf/test_patches, test_accelerate": "no_integrations",
    }
    keys = {
        "test_files": "compute_environment distributed_type deepspeed_config megatron_lm_config mpirun_config "
        "fp8_config",
        "test_resolve": "num_processes num_machines machine_rank gpu_ids main_process_ip",
        "test_agent": "main_process_port rdzv_backend enable_cpu_affinity job_secret_file",
        "test_questionnaire": "fp16",
    }
    for config, places in ((RunSettings, run_flags), (ProcessSettings, keys)):
        tried = {name for names in places.values() for name in names.split()}
        assert {one.name for one in options_of(config)} == tried


@pytest.mark.parametrize("how", ["crash of all", pytest.param("crash while one waits", marks=pytest.mark.slow)])
def test_a_crash_is_started_again_and_every_rank_has_a_log(tmp_path, capfd, how):
    code, out, err = launched_here(tmp_path, capfd, how, "--max_restarts", "2", "--log_dir", str(tmp_path / "logs"))
    assert code == 0, err
    pid, host = (tmp_path / "pid-0-1").read_text(), socket.gethostname()
    assert f"rank 1 (process {pid} on {host}) was ended by SIGKILL; restarting (1 of 2)" in err
    assert "(2 of 2)" not in err
    logs = sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    assert logs == [f"rank {rank} of 2, attempt {attempt}\n" for rank in (0, 1) for attempt in (0, 1)]
    assert "[rank 0] rank 0 of 2, attempt 1" in out
    assert "strategy" in err and "FULL_SHARD" in err and "flags and defaults; no file" in err


@pytest.mark.parametrize("restarts", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_losing_a_rank_is_no_mistake_of_the_user(tmp_path, capfd, restarts):
    code, out, err = launched_here(tmp_path, capfd, "lost", "--quiet", "--max_restarts", restarts)
    assert code == (3 if restarts == "0" else 0), err
    assert ("ended with exit code 3; rank 0 waited for it in step 7; restarting (1 of 1)" in err) == (restarts == "1")
    assert re.search(r"rank 1 \(process \d+ on .*\) ended with exit code 3; rank 0 waited for it in step 7", err)
    assert out.count("attempt 1") == 2 * int(restarts)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
def test_a_rank_killed_during_a_collective_of_the_script_is_named_without_a_traceback(tmp_path, turn):
    code, _, err = Launched(tmp_path, "killed outside the engine", "--quiet").end()
    assert code == 128 + signal.SIGKILL, err
    assert re.search(
        r"^fullshard: rank 1 \(process \d+ on .*\) was ended by SIGKILL; rank 0 waited for it in step 1, all_reduce at "
        r"program.py:\d+$",
        err,
        re.MULTILINE,
    ), err
    assert "Traceback" not in err and "Connection" not in err, err


@pytest.mark.parametrize(
    ("codes", "reports", "code", "said"),
    [
        ({0: 2, 1: 2}, {0: "no such file", 1: "no such file"}, 2, "no such file"),
        ({1: 2, 0: 69}, {1: "no such file"}, 2, "rank 1: no such file"),
        ({0: 2, 1: -9}, {0: "could not join"}, 137, "rank 1 (process 7 on HOST) was ended by SIGKILL"),
        ({1: -11, 0: 2}, {0: "could not join"}, 139, "rank 1 (process 7 on HOST) was ended by SIGSEGV"),
        ({0: 2, 1: -6}, {0: "no such file"}, 2, "rank 0: no such file"),  # the abort follows from the mistake
        ({0: 69, 1: -9}, {}, 137, "rank 1 (process 7 on HOST) was ended by SIGKILL; rank 0 waited for it in step 4"),
        ({0: 69, 1: 3}, {}, 3, "rank 1 (process 7 on HOST) ended with exit code 3; rank 0 waited for it in step 4"),
        ({0: 69}, {}, 69, "rank 0 cannot continue in step 4, gather: rank 1 is stopped"),
        ({1: 75, 0: 75}, {}, 75, "the processes saved a checkpoint and ended"),
    ],
)  # fmt: skip
def test_exit_codes_and_what_is_said(tmp_path, codes, reports, code, said):
    """As docs/launch.md has them. `codes` are in the order in which processes ended."""
    lines = []
    spec = run.worker_spec(settled(), run.open_rendezvous(settled(), print))
    agent = run.Agent(spec, settled(), lines.append, str(tmp_path))
    for rank, worker in enumerate(agent._worker_group.workers):
        worker.global_rank, worker.id = rank, 6 + rank
    agent.exit_codes, agent.user_errors = codes, reports
    agent.rank_lost = {
        rank: "rank 0 cannot continue in step 4, gather: rank 1 is stopped\nmore" for rank in codes if codes[rank] == 69
    }
    agent.positions = dict.fromkeys(agent.rank_lost, "step 4, gather")
    assert agent.report_failure() == code
    assert len(lines) == 1 and lines[0].startswith(said.replace("HOST", socket.gethostname()))


@pytest.mark.slow
def test_stopped_processes_are_named_and_waited_for(tmp_path):
    job = Launched(tmp_path, "stopped", "--quiet")
    job.when("stopped-0", "stopped-1")
    said = ""
    while said.count("is stopped (SIGSTOP, or a debugger); the job waits for it") < 2:
        said += job.process.stderr.readline()
    for rank in (0, 1):
        os.kill(int((tmp_path / f"pid-0-{rank}").read_text()), signal.SIGCONT)
    code, _, err = job.end()
    assert code == 0 and not err
    assert dict(re.findall(r"rank (\d) \(process (\d+) on ", said)) == {
        str(rank): (tmp_path / f"pid-0-{rank}").read_text() for rank in (0, 1)
    }


@pytest.mark.slow
def test_a_rank_stopped_during_a_collective_of_the_script_is_named_and_given_up(tmp_path):
    code, _, err = Launched(tmp_path, "stopped outside the engine", "--quiet").end()
    assert code == 69, err
    assert "rank 1 (process " in err and "is stopped (SIGSTOP, or a debugger)" in err
    assert re.search(
        r"^fullshard: rank 0 waits in step 1, all_reduce at program.py:\d+, but rank 1 \(", err, re.MULTILINE
    )
    assert "Traceback" not in err and "did not come back" not in err, err


def test_the_first_signal_saves_and_is_not_a_crash(tmp_path):
    job = Launched(tmp_path, "preempted", "--max_restarts", "3", "--quiet")
    job.when("ready-0", "ready-1")
    job.process.send_signal(signal.SIGTERM)
    code, out, err = job.end()
    assert code == 75, err
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert out.count("attempt") == 2 and "restarting" not in err
    assert "SIGTERM: the processes have 30 s to save and end" in err and "saved a checkpoint and ended" in err


def test_the_second_signal_ends_at_once_with_children(tmp_path):
    job = Launched(tmp_path, "deaf", "--quiet", "--grace", "50")
    job.when("ready-0", "ready-1")
    job.process.send_signal(signal.SIGINT)
    job.when("heard-0", "heard-1")
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end(seconds=45)
    assert code == 128 + signal.SIGINT, err
    assert len(list(tmp_path.glob("pid-child-*"))) == 2  # looked for by `end` too


@pytest.mark.slow
def test_a_mistake_is_said_once_and_not_tried_again(tmp_path):
    code, _, err = Launched(tmp_path, "mistaken", "--quiet", "--max_restarts", "3").end()
    assert (code, err) == (2, "fullshard: 3 devices do not fill a mesh of shape (2, 2)\n")


@pytest.mark.slow
def test_processes_that_end_by_themselves(tmp_path):
    code, out, err = Launched(tmp_path, "preempted by itself", "--quiet", "--max_restarts", "3").end()
    assert code == 75 and out.count("attempt") == 2, err
    code, out, err = Launched(tmp_path, "fail", "--quiet").end()
    assert code == 7 and "ended with exit code 7" in err
    assert Launched(tmp_path, "nothing", "--quiet").end()[0] == 0


@pytest.mark.slow
def test_grace_is_the_kill_delay(tmp_path):
    job = Launched(tmp_path, "deaf", "--quiet", "--grace", "1")
    job.when("ready-0", "ready-1")
    job.process.send_signal(signal.SIGTERM)
    assert job.end(seconds=45)[0] == 128 + signal.SIGTERM


def test_nothing_outlives_a_killed_launcher(tmp_path, monkeypatch):
    """No rank, not even a stopped one, none of their children, no folder; and while it runs, no open port."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    job = Launched(tmp_path, "with children", "--quiet")
    job.when("ready-0", "ready-1")
    assert listening_on(int((tmp_path / "port-0").read_text())) == {"0100007F"}  # loopback
    assert len((tmp_path / "secret-0").read_text()) == 64
    assert len([*(tmp_path / "tmp").glob("fullshard-*")]) == 1
    job.process.kill()
    assert job.end()[0] == -signal.SIGKILL
    _until(lambda: not [*(tmp_path / "tmp").glob("fullshard-*")])


@pytest.mark.slow
def test_a_rank_stopped_before_its_first_line_ends_with_its_launcher(tmp_path):
    """Stopped while Python starts, before the rank can ask Linux to be ended with its parent."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'pid-0-1').write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    job = Launched(tmp_path, "preempted", "--quiet", path=f"{tmp_path}:{ROOT}")
    job.when("ready-0", "pid-0-1")
    job.process.kill()
    assert job.end()[0] == -signal.SIGKILL


@pytest.mark.slow
def test_a_rank_stopped_before_it_joins_is_named_and_given_up(tmp_path):
    job = Launched(tmp_path, "stopped in the start", "--quiet")
    code, _, err = job.end()
    assert code == 69, err
    first, *_, last = err.splitlines()
    name = r"fullshard: rank 1 \(process \d+ on .*\) is stopped \(SIGSTOP, or a debugger\)"
    assert re.fullmatch(f"{name}; the job waits for it", first)
    assert re.fullmatch(f"{name} and has not joined the other ranks for 30 s", last)


def test_folders_of_killed_processes_are_removed_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    prefix = temporary_folders.owned_prefix()
    me, start = str(os.getpid()), prefix.split("-")[3]
    ended.wait()
    kept = ["fullshard-mine", f"{prefix}x", prefix.replace(prefix.split("-")[1], "0123456789ab") + "elsewhere"]
    gone = [prefix.replace(f"-{me}-", f"-{ended.pid}-") + "ended", prefix.replace(f"-{start}-", "-1-") + "of another"]
    for name in (*kept, *gone):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text("x")
    (tmp_path / f"{gone[0]}-link").symlink_to(tmp_path / kept[0])
    with temporary_folders.temporary_folder() as folder:
        assert folder.parent == tmp_path and folder.name.startswith(prefix)
        assert sorted(os.listdir(tmp_path)) == sorted([*kept, folder.name, f"{gone[0]}-link"])
    assert not folder.exists() and (tmp_path / kept[0] / "log").exists()


@pytest.mark.slow
def test_the_secret_of_several_machines(tmp_path):
    """From a file or a variable; without one there is a warning, and with different ones an error."""
    (tmp_path / "secret").write_text("known to both\n")

    def run(*secrets):
        jobs, port = [], _free_port()
        for machine, flags in enumerate(secrets):
            folder = tmp_path / f"{port}-{machine}"
            folder.mkdir()
            flags = (
                *flags, "--quiet", "--num_machines", "2", "--machine_rank", str(machine), "--main_process_ip",
                "127.0.0.1", "--main_process_port", str(port), "--rdzv_timeout", "20",
            )  # fmt: skip
            jobs.append(Launched(folder, "joined", *flags))
        return [job.end() for job in jobs]

    for code, _, err in run(*[["--job_secret_file", str(tmp_path / "secret")]] * 2):
        assert code == 0 and "SECRET" not in err, err
    first, second = run([], [])
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert (first[2] + second[2]).count("FULLSHARD_JOB_SECRET is not set: whoever can reach port") == 1
    (tmp_path / "other").write_text("another")
    ends = run(["--job_secret_file", str(tmp_path / "secret")], ["--job_secret_file", str(tmp_path / "other")])
    assert [code for code, _, _ in ends] == [2, 2], ends
    assert "not signed with this machine's FULLSHARD_JOB_SECRET" in ends[0][2], ends
    assert not any("Traceback" in err for _, _, err in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_meet(tmp_path, backend):
    port = _free_port()
    jobs = []
    for machine in (1, 0):  # the main machine comes second
        (tmp_path / str(machine)).mkdir()
        flags = ("--num_machines", "2", "--machine_rank", str(machine), "--main_process_ip", "127.0.0.1",
                 "--main_process_port", str(port), "--rdzv_backend", backend)  # fmt: skip
        jobs.append(Launched(tmp_path / str(machine), "nothing", *flags, processes=4))
    said = ""
    for job in jobs:
        code, out, err = job.end()
        assert code == 0, err
        assert f"127.0.0.1:{port} ({backend})" in err
        said += out
    assert (
        sorted(said.split("\n")) == ["", *(f"rank {rank} of 4, attempt 0" for rank in range(4))]
        or said.count("rank") == 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("refused in the start of rank 0", 2, "there is no model in /models on this machine"),
        ("refused in the start of rank 1", 2, "there is no model in /models on this machine"),
        ("stopped in the start", 69, "has not joined the other ranks for 30 s"),
    ],
)
def test_a_rank_that_fails_before_it_joins_ends_other_machines(tmp_path, backend, how, code, line):
    """Long before the time for joining (10 minutes) is over, and every launcher names the cause."""
    port, jobs = _free_port(), []
    for machine in (0, 1):
        (tmp_path / str(machine)).mkdir()
        flags = ("--quiet", "--num_machines", "2", "--machine_rank", str(machine), "--main_process_ip", "127.0.0.1",
                 "--main_process_port", str(port), "--rdzv_backend", backend)  # fmt: skip
        jobs.append(Launched(tmp_path / str(machine), how, *flags))
    ends = [job.end() for job in jobs]
    failed = int(how[-1]) if how[-1].isdigit() else 1
    assert [ends[failed][0], ends[1 - failed][0]] == [code, 69], ends
    for _, _, err in ends:
        assert line in err.splitlines()[-1] and "Traceback" not in err, ends


@pytest.mark.slow
def test_machines_that_do_not_meet(tmp_path):
    port = _free_port()
    flags = ("--quiet", "--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
             "--rdzv_timeout", "1")  # fmt: skip
    code, _, err = Launched(tmp_path, "nothing", *flags, "--machine_rank", "1").end()
    assert code == 2 and f"could not reach machine 0 at 127.0.0.1:{port}" in err and err.count("\n") == 1
    code, _, err = Launched(tmp_path, "nothing", *flags, "--machine_rank", "0").end()
    assert code == 2 and f"did not meet at 127.0.0.1:{port}" in err and err.count("\n") == 1
    flags = (*flags[:4], "no-such-host.invalid", *flags[5:])
    code, _, err = Launched(tmp_path, "nothing", *flags, "--machine_rank", "1").end()
    assert code == 2 and "no-such-host.invalid" in err and "cannot be resolved" in err


@pytest.mark.slow
def test_a_busy_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = Launched(tmp_path, "nothing", "--quiet", "--main_process_port", str(port)).end()
        assert code == 0 and f"port {port} is in use; using " in err
        flags = ("--quiet", "--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port))
        code, _, err = Launched(tmp_path, "nothing", *flags).end()
        assert code == 2 and f"port {port} of this machine is in use" in err and err.count("\n") == 1


@pytest.mark.slow
def test_cores_and_threads(tmp_path):
    code, _, err = Launched(tmp_path, "cores", "--enable_cpu_affinity", "--num_cpu_threads_per_process", "3").end()
    assert code == 0, err
    cores = [eval((tmp_path / f"cores-{rank}").read_text()) for rank in (0, 1)]
    everyone = sorted(os.sched_getaffinity(0))
    assert cores[0] + cores[1] == everyone if len(everyone) > 1 else cores == [everyone] * 2
    assert (tmp_path / "threads-0").read_text() == "3"


@pytest.mark.slow
def test_one_task_per_process_under_slurm(tmp_path):
    """Four tasks on two nodes, as srun would start them; no agent, the tasks are the ranks."""
    port_of_job = _free_port() - 20_000
    tasks = []
    for task in range(4):
        step = {
            "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(port_of_job % 20_000), "SLURM_NNODES": "2", "SLURM_NTASKS": "4",
            "SLURM_NODEID": str(task // 2), "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % 2),
            "SLURM_JOB_NODELIST": "localhost,localhost2", "SLURM_TASKS_PER_NODE": "2(x2)",
        }  # fmt: skip
        environment = {**os.environ, **step, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "HF_HOME": "x"}
        code = (
            "import fullshard.runtime as r; r.use_spmd(); print(r.rank(), r.local_rank(), r.node_count(), r.device())"
        )
        (tmp_path / "s.py").write_text(code)
        words = [sys.executable, "-m", "fullshard", "launch", "--quiet", "--cpu", str(tmp_path / "s.py")]
        tasks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    said = [task.communicate(timeout=240)[0].strip() for task in tasks]
    assert said == ["0 0 2 cpu", "1 1 2 cpu", "2 0 2 cpu", "3 1 2 cpu"]


def _until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
