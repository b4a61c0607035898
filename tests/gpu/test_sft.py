"""`fullshard sft` as two nodes on NCCL, with one rank each on one GPU: the losses of one rank; killed and resumed.

Each node is a launcher of its own (`--machine_rank`); NCCL tells the nodes apart by `NCCL_HOSTID`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pool import ROOT, chosen_device, notes
from tests.sft.tiny import children_of, make_folder

STEPS, SAVED_EVERY = 24, 4
KINDS = {
    "lora": "--use_peft_lora True --lora_r 4 --lora_target_modules all-linear",
    "qlora": "--use_peft_lora True --lora_r 4 --lora_target_modules all-linear --use_4bit_quantization True "
    "--bnb_4bit_quant_type nf4 --use_nested_quant True --bnb_4bit_quant_storage_dtype float32",
}

pytestmark = pytest.mark.gpu


class Run:
    """One training as one process or as two nodes of one rank each; everything it starts ends with it."""

    def __init__(self, place: Path, kind: str, name: str, nodes: int, *more: str):
        self.folder, self.nodes = place / f"{kind}-{name}", nodes
        self.log = place / f"{kind}-{name}.log"
        settings = {
            "model_name_or_path": place / "model", "dataset_name": place / "data", "output_dir": self.folder,
            "report_to": "none", "progress": "plain", "max_steps": STEPS, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4 // nodes, "max_seq_len": 64, "save_steps": SAVED_EVERY,
            "save_total_limit": 3, "logging_steps": 1, "learning_rate": "5e-3", "lora_dropout": 0,
            "attn_implementation": "eager",  # repeats bit for bit
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        words += [*KINDS[kind].split(), *more]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.launchers = [self._start(words, rank, port, place) for rank in range(nodes)]
        self.seen: set[int] = set()

    def _start(self, words: list[str], rank: int, port: int, place: Path) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, "FULLSHARD_CACHE": str(place / "cache"), "FULLSHARD_DEVICE": chosen_device(),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NCCL_DEBUG": "VERSION",  # a line in the log when NCCL makes its first communicator
        }  # fmt: skip
        command = [sys.executable, "-m", "fullshard", "sft", *words]
        if self.nodes > 1:
            command += [
                "--num_machines",
                str(self.nodes),
                "--num_processes",
                str(self.nodes),
                "--machine_rank",
                str(rank),
            ]
            command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
            command += ["--use_cpu"] if chosen_device() == "cpu" else []
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def ranks_of(self, node: int) -> list[int]:
        """The processes that the node's launcher has started."""
        found = children_of(self.launchers[node].pid)
        self.seen |= set(found)
        return found

    def steps_done(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert all(job.poll() is None for job in self.launchers), f"ended too early:\n{self.told()}"
            assert time.monotonic() < end, f"no progress:\n{self.told()}"
            time.sleep(0.02)

    def end(self, seconds: float = 240) -> list[int]:
        """The exit codes of the launchers."""
        end = time.monotonic() + seconds
        try:
            return [job.wait(max(0.1, end - time.monotonic())) for job in self.launchers]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds:g} s:\n{self.told()}") from None

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def losses(self) -> list[float]:
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]

    def left(self) -> list[int]:
        """Processes of the run that still live."""
        known = self.seen | {job.pid for job in self.launchers}
        return [pid for pid in known if _alive(pid)]

    def stop(self) -> None:
        for job in self.launchers:
            if job.poll() is None:
                job.kill()  # its rank ends with it
                job.wait(30)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model whose linear layers are large enough for 4 bits, and data as JSON lines."""
    return make_folder(tmp_path_factory.mktemp("sft"), rows=300, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def undisturbed(place):
    """Every kind on one rank and as two nodes, all at once."""
    runs = {(kind, nodes): Run(place, kind, f"{nodes}", nodes) for kind in KINDS for nodes in (1, 2)}
    try:
        for run in runs.values():
            assert run.end() == [0] * run.nodes, run.told()
        yield runs
    finally:
        for run in runs.values():
            run.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_two_nodes_give_the_losses_of_one_rank(undisturbed, kind):
    one, two = undisturbed[kind, 1].losses(), undisturbed[kind, 2].losses()
    assert len(one) == len(two) == STEPS and one[0] - one[-1] > 0.1
    apart = max(abs(a - b) for a, b in zip(one, two, strict=True))
    notes.append(f"fullshard sft, {kind}: losses of two nodes and of one rank differ by up to {apart:.1e}")
    assert apart <= 1e-4
    log = undisturbed[kind, 2].log.read_text(errors="replace")
    assert chosen_device() == "cpu" or "NCCL version" in log, log[-4000:]


def test_killed_and_resumed_as_never_killed(undisturbed, place):
    """One rank of the second node is killed in mid-run; both nodes are started again with `--resume`."""
    killed = {kind: Run(place, kind, "killed", 2) for kind in KINDS}
    resumed = {}
    alone: dict[str, bool] = {}
    try:
        for run in killed.values():
            run.wait_for(lambda run=run: run.steps_done() >= SAVED_EVERY + 2)
            victims = run.ranks_of(1)
            assert len(victims) == 1 and run.ranks_of(0)
            os.kill(victims[0], signal.SIGKILL)
        for kind, run in killed.items():
            assert run.launchers[1].wait(60) != 0
            try:
                alone[kind] = run.launchers[0].wait(60) != 0
            except subprocess.TimeoutExpired:
                alone[kind] = False
            run.stop()
            assert run.steps_done() < STEPS, "the signal came too late to show anything"
        resumed = {kind: Run(place, kind, "killed", 2, "--resume", "True") for kind in KINDS}
        for kind, run in resumed.items():
            assert run.end() == [0, 0], run.told()
            assert "resumed at step" in run.log.read_text(errors="replace")
            assert run.losses() == undisturbed[kind, 2].losses()
            ours, theirs = (load_file(r.folder / "adapter_model.safetensors") for r in (run, undisturbed[kind, 2]))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    finally:
        for run in (*killed.values(), *resumed.values()):
            run.stop()
    time.sleep(0.5)
    assert not [pid for run in (*killed.values(), *resumed.values()) for pid in run.left()], "processes were left"
    assert all(alone.values()), f"the first node did not end by itself after a rank of the second was killed: {alone}"
