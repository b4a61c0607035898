"""Values in the job's store: those of the job are read, those of a stranger who reaches the port are refused."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.config.errors import RuntimeSetupError
from fullshard.device import torch_private
from fullshard.distributed import job_store, runtime
from fullshard.distributed.job_store import SECRET_VARIABLE, JobStore, SignedPickler, listen, parse
from fullshard.distributed.terminal_text import visible
from fullshard.distributed.watchdog import rank_state
from fullshard.distributed.watchdog.diagnosis import Failure
from fullshard.distributed.watchdog.heartbeat import Liveness
from fullshard.distributed.watchdog.messages import Messages
from tests.pool import ranks

FORGED = '{"number": 7, "text": "\\u001b[2Jthe end", "rank_lost": true, "at": "x"}'


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of the job")


def stores(count: int = 2, **more: Any) -> tuple[Any, list[str], list[JobStore]]:
    """torch's store, what is reported about it, and several ranks' views of it."""
    shared, lines = dist.HashStore(), list[str]()
    return shared, lines, [JobStore(shared, "0/1", "watch/", lines.append, **more) for _ in range(count)]


def test_values_of_the_job_are_read() -> None:
    _, lines, (one, other) = stores()
    one.put("beat/0", "1 step 2, Schlüssel")
    assert other.read(["beat/0", "beat/1"]) == {"beat/0": "1 step 2, Schlüssel"}
    assert [one.add("news", 1), other.add("news", 1), one.add("news", 0)] == [1, 2, 2]
    for value in ("first", "second"):
        one.replace("failure", value)
        assert other.read(["failure"]) == {"failure": value}
    other.replace("failure", "of the other")
    assert one.read(["failure"]) == {"failure": "of the other"} and not lines


def test_values_that_the_job_did_not_write_are_refused() -> None:
    shared, lines, (one, other) = stores()
    one.put("beat/0", "1")
    first = shared.get("watch/beat/0")
    assert other.read(["beat/0"]) == {"beat/0": "1"}
    one.put("beat/0", "2")
    assert other.read(["beat/0"]) == {"beat/0": "2"} and not lines
    strangers = {
        "an old value again": first,
        "no signature": b"3",
        "none at all": b"",
        "another key's value": JobStore(shared, "0/1").sign("beat/1", 1 << 62, b"3"),
        "another generation": JobStore(shared, "1/1").sign("beat/0", 1 << 62, b"3"),
    }
    for what, value in strangers.items():
        shared.set("watch/beat/0", value)
        assert other.read(["beat/0"]) == {"beat/0": "2"}, what
        shared.set("watch/failure", value)
        assert other.read(["failure"]) == {}, what
    assert len(lines) == 1 and "'beat/0' that this job did not write, or an earlier one again" in lines[0]
    assert other.refused == {"beat/0", "failure"}
    one.put("beat/0", "4")
    assert other.read(["beat/0"]) == {"beat/0": "4"}


def test_without_the_secret_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, _, (one, _) = stores()
    monkeypatch.setenv(SECRET_VARIABLE, "a guess")
    stranger = JobStore(shared, "0/1", "watch/")
    stranger.replace("failure", FORGED)
    stranger.add("leader", 5)
    assert one.read(["failure", "leader"]) == {}
    assert one.add("leader", 1) == 1 and one.read(["leader"]) == {"leader": "1"}


def test_a_counter_that_was_overwritten_goes_on() -> None:
    shared, _, (one, other) = stores()
    assert [one.add("leader", 1), one.add("leader", 1), other.add("leader", 0)] == [1, 2, 2]
    shared.set("watch/leader", "999")
    assert other.read(["leader"]) == {"leader": "2"}
    assert [one.add("leader", 1), other.add("leader", 1)] == [3, 4]


def test_ranks_that_add_at_the_same_moment_get_different_results() -> None:
    shared, _, (one, other) = stores()
    results, compare_set = list[int](), shared.compare_set

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(shared, name)

        def compare_set(self, *words: Any) -> Any:
            if not results:
                results.append(other.add("members", 1))
            return compare_set(*words)

    one._store = Late()
    assert [one.add("members", 1), *results] == [2, 1]


def test_a_forged_failure_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, failures = dist.HashStore(), list[Failure]()
    monkeypatch.setattr(runtime, "_generation", "0/1")
    monkeypatch.setattr(rank_state, "set_failure", failures.append)
    messages, others = Messages(shared), Messages(shared)
    messages.open()
    shared.set("watch/failure", FORGED)
    others.store.add("news", 1)
    messages.read_news(1, 0.0)
    assert not failures
    others.end_run(Failure("rank 1 is gone", True, "step 3"))
    others.publish_failure()
    failures.clear()
    messages.read_news(2, 0.0)
    assert failures == [Failure("rank 1 is gone", True, "step 3")]


def test_escape_codes_are_written_out() -> None:
    hostile = "\x1b[2J\x9b31m\u202egnp.exe\r\x07ünïcode 漢字\nnext line"
    assert visible(hostile) == "\\x1b[2J\\x9b31m\\u202egnp.exe\\r\\x07ünïcode 漢字\nnext line"
    assert str(Liveness.parse(Liveness(1, "dead", "step\x1b[1m").text())).endswith("(last seen in step\\x1b[1m)")
    assert parse('{"a\\u001b": ["\\u001b", 1]}') == {"a\\x1b": ["\\x1b", 1]}


# --- objects ----------------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@ranks(2)
def test_objects_of_another_rank_are_authenticated_before_they_are_unpickled(tmp_path: Path) -> None:
    runtime.use_spmd()
    found: list[Any] = [None] * 2
    mark = tmp_path / "unpickled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, "of the job")
        for name in ("_pickler", "_unpickler"):
            patch.setattr(dist.distributed_c10d, name, getattr(dist.distributed_c10d, name))  # restored at the end
        torch_private.sign_objects(SignedPickler)
        dist.all_gather_object(found, {"rank": runtime.rank()})
        assert found == [{"rank": 0}, {"rank": 1}]
        if runtime.rank() == 1:  # what a stranger sends
            patch.setattr(dist.distributed_c10d, "_pickler", pickle.Pickler)
        with pytest.raises(RuntimeSetupError, match="not signed with this job's secret"):
            dist.all_gather_object(found, Bomb(mark) if runtime.rank() == 1 else None)
    dist.barrier()
    assert not mark.exists()


# --- the port ---------------------------------------------------------------------------------------------------------


def listening_on(port: int) -> set[str]:
    """The local addresses of the listening sockets of a port, as Linux lists them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", {"0100007F"}), ("localhost", {"0100007F"}), ("192.0.2.7", {"00000000", "0" * 32})],
)  # fmt: skip
def test_the_store_listens_where_it_is_told(host: str, address: set[str]) -> None:
    """192.0.2.7 is an address of no machine: behind a translation of addresses the interface is not known."""
    with job_store._bound(host, 0) as listener:
        assert listening_on(listener.getsockname()[1]) <= address
    store = listen("127.0.0.1", 0, timedelta(seconds=5))
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    client.set("a", "b")
    assert store.get("a") == b"b" and listening_on(store.port) == {"0100007F"}
    with pytest.raises(OSError):
        listen("127.0.0.1", store.port, timedelta(seconds=5))


ATTACKED = """
import os, sys, time
import numpy as np, torch
import fullshard
import fullshard.runtime as xr
import fullshard.spmd as xs

xr.use_spmd()
model = fullshard.FSDPv2(torch.nn.Linear(8, 8), xs.Mesh(np.arange(2), (2,), ("fsdp",)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if xr.is_main():
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}")
    os.rename(sys.argv[1] + ".part", sys.argv[1])
for _ in range(80):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
xr.print0("all steps taken")
"""


@pytest.mark.slow
def test_a_stranger_who_writes_into_the_store_of_a_running_job_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ATTACKED)
    command = [sys.executable, "-m", "fullshard", "launch", "--cpu", "-n", "2", str(tmp_path / "job.py")]
    job = subprocess.Popen(
        [*command, str(tmp_path / "place")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "place").exists() and job.poll() is None:
            assert time.monotonic() < deadline, "the job did not start"
            time.sleep(0.1)
        host, port = (tmp_path / "place").read_text().split()
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=20))
        forged = json.dumps({"number": 99, "text": "\x1b[31mrank 1 is gone", "lost": True, "place": "here"})
        written = set()
        while job.poll() is None and len(written) < 400:
            for key in {text.decode() if isinstance(text, bytes) else text for text in store.list_keys()}:
                if "watch/" in key:
                    for name in (key, f"{key.rpartition('watch/')[0]}watch/failure"):
                        store.set(name, forged)
                        written.add((name, time.monotonic()))
            time.sleep(0.2)
        output = job.communicate(timeout=120)[0]
    finally:
        job.kill()
        job.wait()
    assert len(written) > 20 and job.returncode == 0 and "all steps taken" in output, output
    assert "that this job did not write" in output and "\x1b" not in output and "rank 1 is gone" not in output
