"""Ranks that are killed, stopped, exit early or go different ways, on NCCL: are they named, and does everything end?

    python -m tests.gpu.watch_program                 # on a machine with one GPU; about 90 s
    python -m tests.gpu.watch_program --cpu           # the same on Gloo
    python -m tests.gpu.watch_program --cases kill,stop --at_once 1

All ranks share one GPU, as nodes of one rank each: NCCL tells hosts apart by `NCCL_HOSTID`. This program starts them,
holds their store as a launcher would, does to one of them what the case says, and prints a table. Its exit code is 0
if every case went as it should.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EVENT = 30  # the step at which something happens
STEPS = 60  # where a run ends that nothing ends before
NAME_WITHIN, END_WITHIN = 10.0, 25.0
CASES = {
    "kill": "rank 1 is killed, on the same node",
    "kill-remote": "rank 1 is killed, and only its heartbeat can tell",
    "stop": "rank 1 is stopped (given up after 12 s here), and later continued",
    "stop-first": "rank 0 is stopped, and later continued",
    "exit": "rank 1 ends early, in order",
    "differ": "the ranks enter different units",
    "slow": "rank 1 is late by 10 s: reported, left alone",
    "compute": "all ranks compute for 8 s before they communicate: nothing is reported",
}
VICTIM = {"stop-first": 0}
GOES_ON = ("slow", "compute")


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank_program(case: str) -> None:
    import torch
    from torch import nn

    import fullshard.runtime as xr
    from fullshard.config.errors import UserError
    from fullshard.distributed import processes
    from fullshard.distributed.watchdog import heartbeat, rank_state, watch
    from fullshard.distributed.watchdog.diagnosis import Failure
    from fullshard.fsdp import FSDPv2
    from tests.fsdp.programs import mesh_for

    faulthandler.enable()
    rank = int(os.environ["RANK"])
    heartbeat.LOST_AFTER = 12.0
    if case == "kill-remote":
        processes.node_id = lambda: f"node-{rank}"
    set_failure = rank_state.set_failure

    def noted(failure: Failure) -> None:
        print("FAILURE", time.time(), flush=True)
        set_failure(failure)

    rank_state.set_failure = noted

    class Layer(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.up, self.down = nn.Linear(256, width), nn.Linear(width, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(512 + 64 * i) for i in range(6))

        def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x) if i != skip else x
            return x.square().mean()

    xr.use_spmd()
    device = xr.device()
    model = FSDPv2(Model().to(device), mesh_for("FULL_SHARD"), auto_wrap_policy={Layer}, small_parameter_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    link = type(model._fullshard_engine.context.gather_link).__name__
    print("LINK", link, torch.distributed.get_backend_config(), flush=True)
    try:
        for step in range(STEPS):
            if step == EVENT and case == "exit" and rank == 1:
                sys.exit(0)
            if step == EVENT and case == "slow" and rank == 1:
                time.sleep(10)
            if step == EVENT and case == "compute":
                compute(device, 8.0)
            skip = rank if step >= EVENT and case == "differ" else -1
            loss = model(torch.randn(8, 256, device=device), skip)
            loss.backward()
            value = loss.item()  # here the host waits for the device
            watch.raise_failure()
            optimizer.step()
            optimizer.zero_grad()
            print("LOSS", step, time.time(), round(value, 5), flush=True)
            time.sleep(0.05)
    except UserError as error:
        print("RAISED", time.time(), error, flush=True)
        xr.shutdown()
        os._exit(error.exit_code)
    print("FINISHED", time.time(), flush=True)


def compute(device: object, seconds: float) -> None:
    """Keep the device busy; the host does not wait for it."""
    import torch

    if getattr(device, "type", "") != "cuda":
        time.sleep(seconds)
        return
    start = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    each = time.perf_counter() - start
    for _ in range(int(seconds / each)):
        torch.cuda._sleep(100_000_000)


# --- all of them ------------------------------------------------------------------------------------------------------


class Run:
    """One case: its processes, and what became of them."""

    def __init__(self, case: str, world: int, cpu: bool, folder: Path):
        from torch.distributed import TCPStore

        self.case, self.world, self.folder = case, world, folder
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.victim = VICTIM.get(case, 1)
        self.jobs = [self._start(rank, cpu) for rank in range(world)]
        self.named = self.ended = self.event = 0.0
        self.troubles: list[str] = []

    def _start(self, rank: int, cpu: bool) -> subprocess.Popen[bytes]:
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if cpu:
            env["FULLSHARD_DEVICE"] = "cpu"
        words = [sys.executable, "-m", "tests.gpu.watch_program", "--rank_of", self.case]
        with open(self.folder / f"{self.case}-{rank}", "w") as out:
            return subprocess.Popen(words, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def said(self, rank: int) -> str:
        return (self.folder / f"{self.case}-{rank}").read_text(errors="replace")

    def run(self) -> None:
        try:
            self._await_event()
            self._do()
            self._await_end()
        except TimeoutError as error:
            self.troubles.append(str(error))
        finally:
            for rank, job in enumerate(self.jobs):
                if job.poll() is None:
                    self.troubles.append(f"rank {rank} was left")
                    job.kill()
                job.wait()
        self._judge()

    def _until(self, what: str, condition: object, seconds: float) -> float:
        end = time.time() + seconds
        while not condition():  # type: ignore[operator]
            if time.time() > end:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            time.sleep(0.05)
        return time.time()

    def _await_event(self) -> None:
        mark = f"LOSS {EVENT - 1} "
        ready = lambda: all(mark in self.said(rank) for rank in range(self.world))  # noqa: E731
        started = lambda: ready() or any(job.poll() not in (None, 0) for job in self.jobs)  # noqa: E731
        self.event = self._until("the start", started, 240)
        if not ready():
            raise TimeoutError("a rank ended before the event")

    def _do(self) -> None:
        if self.case.startswith("kill"):
            self.jobs[self.victim].kill()
        elif self.case.startswith("stop"):
            os.kill(self.jobs[self.victim].pid, signal.SIGSTOP)
        self.event = time.time()

    def _await_end(self) -> None:
        others = [rank for rank in range(self.world) if rank != self.victim]
        sign = "different operations" if self.case == "differ" else f"rank(s) {self.victim}|rank {self.victim}[ (]"
        pattern = re.compile(sign.replace("(s)", r"\(s\)"))
        if self.case not in GOES_ON:
            named = lambda: any(pattern.search(self.said(rank)) for rank in others)  # noqa: E731
            self.named = self._until("the missing rank is named", named, END_WITHIN) - self.event
        waited = range(self.world) if self.case in GOES_ON or self.case == "differ" else others
        over = lambda: all(self.jobs[rank].poll() is not None for rank in waited)  # noqa: E731
        limit = 60 if self.case in GOES_ON else END_WITHIN
        self.ended = self._until("the end of the others", over, limit) - self.event
        if self.case.startswith("stop"):
            os.kill(self.jobs[self.victim].pid, signal.SIGCONT)
        if self.case.startswith("stop") or self.case == "exit":  # the interpreter takes a while to end
            self._until("the victim's own end", lambda: self.jobs[self.victim].poll() is not None, 20)

    def _judge(self) -> None:
        codes = [job.returncode for job in self.jobs]
        if self.case in GOES_ON:
            if codes != [0] * self.world:
                self.troubles.append("it did not go on")
            reports = sum("waiting for" in self.said(rank) for rank in range(self.world))
            if (reports > 0) != (self.case == "slow"):
                self.troubles.append(f"{reports} rank(s) reported a wait")
            return
        if self.named > NAME_WITHIN:
            self.troubles.append("named too late")
        good = 2 if self.case == "differ" else 69
        expected = {good} | ({69} if self.case == "differ" else set())  # a process that had to be given up ends with 69
        for rank in range(self.world):
            if rank != self.victim and codes[rank] not in expected:
                self.troubles.append(f"rank {rank} ended with {codes[rank]}")
            _, _, after = self.said(rank).partition("FAILURE")
            if "LOSS" in after:
                self.troubles.append(f"rank {rank} went on after the failure")

    def row(self) -> str:
        codes = ",".join(str(job.returncode) for job in self.jobs)
        link = re.search(r"LINK (\w+)", self.said(0))
        good = "ok" if not self.troubles else "FAILED: " + "; ".join(self.troubles)
        times = f"{self.named:7.1f} {self.ended:7.1f}"
        return f"{self.case:12} {link[1] if link else '?':13} {times}  {codes:10} {good}"

    def told(self) -> str:
        lines = [line for rank in range(self.world) for line in self.said(rank).splitlines() if "LOSS" not in line]
        keep = [line for line in lines if re.search("RAISED|ERROR|WARNING|not entered|Error", line)]
        return "\n".join(f"    {line[:300]}" for line in (lines[-40:] if self.troubles else keep[:4]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--at_once", type=int, default=0, help="cases at the same time; 4 on a GPU, else 1")
    parser.add_argument("--rank_of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_program(options.rank_of)
        return 0
    cases = options.cases.split(",")
    places = threading.Semaphore(options.at_once or (1 if options.cpu else 4))
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:

        def one(case: str) -> None:
            with places:
                run = Run(case, options.world, options.cpu, Path(folder))
                run.run()
                runs.append(run)

        began = time.time()
        threads = [threading.Thread(target=one, args=(case,)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{'case':12} {'link':13} {'named s':>7} {'ended s':>7}  {'codes':10}")
        for run in sorted(runs, key=lambda run: cases.index(run.case)):
            print(run.row())
        for run in runs:
            print(f"{run.case}: {CASES[run.case]}\n{run.told()}")
        print(f"{time.time() - began:.0f} s in all")
        return int(len(runs) < len(cases) or any(run.troubles for run in runs))


if __name__ == "__main__":
    sys.exit(main())
