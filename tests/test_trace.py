"""The arithmetic and the reading of traces behind `benchmarks/overlap_gpu.py`, on made-up events."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import overlap_gpu
from benchmarks.trace import PAGEABLE, PHASE, intersection, kind_of, length, read, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (float(min(p)), float(max(p)))))


def cells(spans: list[tuple[float, float]]) -> set[int]:
    return {cell for start, end in spans for cell in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_intervals_are_sets_of_moments(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    for found, expected in ((union(a), cells(a)), (intersection(a, b), cells(a) & cells(b))):
        assert cells(found) == expected and length(found) == len(expected)
        assert all(x[1] < y[0] or x[1] == y[0] for x, y in itertools.pairwise(found))
    assert union(union(a)) == union(a)
    assert intersection(a, b) == intersection(b, a)


def test_intervals_that_touch_and_nest() -> None:
    assert union([(3, 4), (0, 2), (2, 3), (0.5, 1), (7, 7)]) == [(0, 4)]
    assert intersection([(0, 10)], [(1, 2), (3, 4), (9, 12)]) == [(1, 2), (3, 4), (9, 10)]
    assert length([]) == 0 and intersection([(0, 1)], []) == []


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "args": args}


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HTOD = "Memcpy HtoD (Pinned -> Device)"


def launched(cat: str, name: str, start: float, end: float, by: float, number: int, stream: int, tid: int = 1) -> list:
    """GPU work from `start` to `end` that the host launched at `by`."""
    api = "cuda_driver" if "nccl" in name else "cuda_runtime"
    return [
        event(cat, name, start, end - start, stream, correlation=number, stream=stream),
        event(api, "cudaLaunchKernel", by, 1, tid, correlation=number),
    ]


STEP = [
    {"ph": "M", "name": "process_name", "args": {}},
    event("user_annotation", PHASE + "forward", 0, 100),
    event("user_annotation", PHASE + "backward", 100, 100),
    event("gpu_user_annotation", PHASE + "forward", 500, 100, 7),
    event("user_annotation", "nccl:_all_gather_base", 10, 5),
    *launched("kernel", "gemm", 1000, 1100, by=20, number=1, stream=7),
    *launched("kernel", "gemm", 1300, 1400, by=120, number=2, stream=7, tid=2),
    *launched("kernel", "cast", 1100, 1150, by=21, number=3, stream=13),  # on a side stream: no compute
    *launched("kernel", GATHER, 1050, 1150, by=22, number=4, stream=20),  # half beside compute
    *launched("kernel", GATHER, 1120, 1320, by=121, number=5, stream=20),  # a tenth
    *launched("kernel", GATHER, 1310, 1330, by=122, number=6, stream=24),  # within it, but for the last half
    *launched("gpu_memcpy", HTOD, 1080, 1120, by=30, number=7, stream=13),
    *launched("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1395, 1405, by=140, number=8, stream=13, tid=2),
    event("gpu_memset", "Memset (Device)", 1100, 1, 7, correlation=99, stream=7),
    event("cuda_runtime", "cudaDeviceSynchronize", 300, 50),  # outside the phases
]


def test_overlap_by_phase() -> None:
    trace = read(STEP)
    assert trace.steps == 1 and trace.unplaced == 1
    assert trace.compute() == [(1000, 1100), (1300, 1400)]
    assert trace.beside_compute("nccl", "forward") == {"ms": 0.1, "beside_ms": 0.05, "share": 0.5}
    assert trace.beside_compute("nccl", "backward") == {"ms": 0.21, "beside_ms": 0.03, "share": 0.143}
    assert trace.beside_compute("htod", "forward") == {"ms": 0.04, "beside_ms": 0.02, "share": 0.5}
    assert trace.beside_compute("htod", "backward") == {"ms": 0.0, "beside_ms": 0.0, "share": None}
    assert trace.beside_compute("dtoh", "backward")["share"] == 0.5


def test_overlap_is_per_step() -> None:
    later = [
        {**e, "ts": e["ts"] + 1e5, "args": {k: v + 100 if k == "correlation" else v for k, v in e["args"].items()}}
        for e in STEP
        if "ts" in e
    ]
    trace = read([*STEP, *later])
    assert trace.steps == 2
    assert trace.beside_compute("nccl", "forward") == {"ms": 0.1, "beside_ms": 0.05, "share": 0.5}


def test_waits_are_named_by_the_code_around_them() -> None:
    stack = [
        event("python_function", "program.py(1): main", 0, 200),
        event("python_function", "fullshard/fsdp/unit.py(195): __init__", 105, 30, 2),
        event("python_function", "<built-in method tensor of type object at 0x1>", 106, 20, 2),
        event("cpu_op", "aten::copy_", 107, 10, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 108, 5, 2),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 150, 20, 3),
        event("cuda_runtime", "cudaMalloc", 155, 2, 3),
        event("cpu_op", "aten::item", 50, 10),
        event("cpu_op", "aten::_local_scalar_dense", 51, 8),
        event("cuda_runtime", "cudaMemcpyAsync", 52, 1, correlation=50),
        event("cuda_runtime", "cudaStreamSynchronize", 53, 5),  # counted with the `item` it is in
        event("cpu_op", "aten::item", 70, 1),  # of a CPU tensor
    ]
    found = {(w["call"]): w for w in read([*STEP, *stack]).waits_per_step()}
    assert set(found) == {"cudaStreamSynchronize", "cudaMalloc", "aten::item", PAGEABLE}
    where = {call: (w["phase"], w["where"]) for call, w in found.items()}
    assert where["cudaStreamSynchronize"] == ("backward", "fullshard/fsdp/unit.py(195): __init__ in aten::copy_")
    assert where["cudaMalloc"] == ("backward", "autograd::engine::evaluate_function: MulBackward0")
    assert where["aten::item"] == ("forward", "program.py(1): main")
    assert where[PAGEABLE][0] == "backward"
    assert found["aten::item"]["per_step"] == 1
    assert found["cudaStreamSynchronize"]["per_step"] == 1 and found["cudaStreamSynchronize"]["ms_per_step"] == 0.005


@pytest.mark.parametrize(
    ("cat", "name", "kind"),
    [
        ("kernel", GATHER, "nccl"),
        ("kernel", "ncclKernel_SendRecv", "nccl"),
        ("kernel", "void at::native::vectorized_elementwise_kernel", "kernel"),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "dtod"),
        ("gpu_memcpy", HTOD, "htod"),
        ("cpu_op", "aten::mm", None),
        ("user_annotation", "nccl:all_reduce", None),
    ],
)
def test_kinds_of_gpu_work(cat: str, name: str, kind: str | None) -> None:
    assert kind_of(event(cat, name, 0, 1)) == kind


def test_an_empty_trace() -> None:
    trace = read([])
    assert trace.steps == 0 and trace.compute() == [] and trace.waits_per_step() == []
    assert trace.beside_compute("nccl", "forward")["share"] is None


PROFILED = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, record_function

def waits_here():
    x = torch.ones(3, requires_grad=True)
    assert x.sum().item() == 3
    return x.sum()

with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
    for _ in range(2):
        with record_function("PHASEforward"):
            loss = waits_here()
        with record_function("PHASEbackward"):
            loss.backward()
        loss.item()  # outside
profiler.export_chrome_trace(sys.argv[1])
""".replace("PHASE", PHASE)


def test_a_trace_of_the_real_profiler(tmp_path: Path) -> None:
    """Phases, threads and Python frames as `torch.profiler` writes them, here without a GPU. In a process of its own:
    it looks at all threads, and after thousands of other tests it has hung."""
    (tmp_path / "profiled.py").write_text(PROFILED)
    command = [sys.executable, str(tmp_path / "profiled.py"), str(tmp_path / "trace.json")]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    trace = read(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert trace.steps == 2 and set(trace.phases) == {"forward", "backward"}
    items = [w for w in trace.waits_per_step() if w["call"] == "aten::item"]
    assert [(w["phase"], w["per_step"]) for w in items] == [("forward", 1.0)]
    assert "profiled.py" in items[0]["where"] and "waits_here" in items[0]["where"]


def test_cases_are_compared_with_their_peer(capsys: pytest.CaptureFixture[str]) -> None:
    wait = {"phase": "forward", "call": "aten::item", "where": "model.py(1): f", "per_step": 1.0, "ms_per_step": 0.1}
    part = {kind: {"ms": 2.0, "beside_ms": 1.0, "share": 0.5} for kind in ("nccl", "htod", "dtoh")}
    ours = {"step_ms": 90.0, "compute_ms": 5.0, "forward": part, "backward": part, "warned_of": ["a.py:1 ×2"]}
    other = {**wait, "where": "fullshard/fsdp/unit.py(1): f"}
    cases = {
        "full, prefetch": {**ours, "host_waits": [dict(wait), other]},
        "full, fully_shard": {"step_ms": 100.0, "host_waits": [dict(wait)]},
        "full, offload, prefetch": {"step_ms": 90.0},
        "LoRA, prefetch": {"error": "not run: out of time"},
    }
    overlap_gpu.compared(cases)
    assert cases["full, prefetch"]["time_ratio_to_fully_shard"] == 0.9
    assert [w["also_in_fully_shard"] for w in cases["full, prefetch"]["host_waits"]] == [True, False]
    assert "time_ratio_to_fully_shard" not in cases["full, offload, prefetch"]
    about = {"gather_bytes_per_second": 2e9, "flops_per_second": 2e14, "transport": "NCCL", "gpu": "?", "torch": "?"}
    overlap_gpu.show({"hidden": 1, "layers": 1, "tokens": 1, **about, "about": "about", "cases": cases})
    table = capsys.readouterr().err
    assert "2.0 (50%)" in table and "not run: out of time" in table and "a.py:1 ×2" in table
    assert "model.py(1): f (fully_shard too)" in table and "unit.py(1): f\n" in table


def test_every_case_has_its_peer() -> None:
    for name in overlap_gpu.CASES:
        assert ", ".join([*name.split(", ")[:-1], "fully_shard"]) in overlap_gpu.CASES
