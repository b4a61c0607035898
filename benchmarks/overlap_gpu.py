"""Measures how much NCCL communication overlaps with compute, and where a step waits for the host.

    python benchmarks/overlap_gpu.py           # one GPU; `--hidden --layers --tokens` for other sizes

Two ranks share one GPU as two nodes (`NCCL_HOSTID` differs) and communicate over loopback sockets. Both train the same
Llama with each setting: this engine with and without prefetch, with and without offload, and torch's `fully_shard`;
full fine-tuning, and LoRA on a frozen base. Rank 0 records a profiler trace of three steps. Reported per case: time of
NCCL kernels in forward and backward and the part that overlaps with compute kernels, the same for copies to and from
the host, the step time without a profiler, and every place where the host waits.

The number of tokens per rank is chosen so that the all-gather of a layer takes about as long as its forward, based on
the measured bandwidth and matrix product speed. A table is printed to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import trace as tracing  # noqa: E402

RANKS, LENGTH, VOCABULARY = 2, 1024, 1024
WARM_UP, STEPS = 3, 3
MOST_TOKENS, LEAST_TOKENS = 32768, 2048
CASES: dict[str, dict[str, Any]] = {
    "full, prefetch": {"engine": "ours"},
    "full, fully_shard": {"engine": "fully_shard"},
    "full, no prefetch": {"engine": "ours", "prefetch": False},
    "LoRA, prefetch": {"engine": "ours", "lora": True},
    "LoRA, fully_shard": {"engine": "fully_shard", "lora": True},
    "LoRA, no prefetch": {"engine": "ours", "lora": True, "prefetch": False},
    "full, offload, prefetch": {"engine": "ours", "offload": True},
    "full, offload, fully_shard": {"engine": "fully_shard", "offload": True},
    "full, offload, no prefetch": {"engine": "ours", "offload": True, "prefetch": False},
}
ABOUT = (
    "Two processes share one GPU and take turns on it (no kernel of one runs beside one of the other); NCCL goes over "
    "loopback sockets, and its kernels spin while they wait for the other rank, so their time includes waiting for it. "
    "What this shows: whether an engine gives communication to the GPU early enough to run beside its own compute, how "
    "its settings and fully_shard compare under the same conditions, and where the host waits. What it does not show: "
    "bandwidth, step times or overlap of GPUs of their own on NVLink or InfiniBand."
)


# --- one rank ---------------------------------------------------------------------------------------------------------


def build(case: dict[str, Any], hidden: int, layers: int, device: Any) -> Any:
    """A Llama; fp32 where it trains, the frozen base of LoRA in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(4, hidden // 128)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if not case.get("lora"):
        return model
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def wrap(case: dict[str, Any], model: Any, device: Any) -> Any:
    """The model in the case's engine: units are layers, compute in bf16, gradients summed in fp32."""
    import torch

    if case["engine"] == "ours":
        import numpy as np

        import fullshard.spmd as xs
        from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy

        off = {} if case.get("prefetch", True) else {"forward_prefetch": False, "backward_prefetch": None}
        return FSDPv2(
            model, xs.Mesh(np.arange(RANKS), (RANKS,), ("fsdp",)), auto_wrap_policy=transformer_auto_wrap_policy,
            mixed_precision="bf16", cpu_offload=bool(case.get("offload")), sync_module_states=False, **off,
        )  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    if case.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    layers = model.base_model.model.model.layers if case.get("lora") else model.model.layers
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Job:
    """One case's model, optimizer and data on this rank."""

    def __init__(self, case: dict[str, Any], size: argparse.Namespace, device: Any) -> None:
        import torch

        self.device = device
        self.model = wrap(case, build(case, size.hidden, size.layers, device), device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        rows, columns = max(1, size.tokens // LENGTH), min(LENGTH, size.tokens)
        self.ids = torch.randint(0, VOCABULARY, (rows, columns), device=device)

    def step(self) -> Any:
        from torch.profiler import record_function

        with record_function(tracing.PHASE + "forward"):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        with record_function(tracing.PHASE + "backward"):
            loss.backward()
        with record_function(tracing.PHASE + "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def timed(self) -> float:
        """Seconds of a step on this rank, from a moment when all ranks are ready."""
        import fullshard.runtime as xr

        wait_for(self.device)
        xr.barrier()
        start = time.perf_counter()
        self.step()
        wait_for(self.device)
        return time.perf_counter() - start


def wait_for(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def traced(job: Job, steps: int, stacks: bool) -> tracing.Trace | None:
    """A trace of some steps; taken, and returned, on rank 0 only. The other ranks run the steps."""
    from torch.profiler import ProfilerActivity, profile

    import fullshard.runtime as xr

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.device.type == "cuda" else [])]
    profiler = profile(activities=activities, with_stack=stacks) if xr.is_main() else contextlib.nullcontext()
    wait_for(job.device)
    xr.barrier()
    with profiler as recorded:
        for _ in range(steps):
            job.step()
        wait_for(job.device)
    if recorded is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        return tracing.read(json.loads(file.read_text())["traceEvents"])


def warned_of(job: Job) -> list[str]:
    """Where torch itself says that a step makes the host wait for the GPU, with how often."""
    import torch

    if job.device.type != "cuda":
        job.step()
        return []
    found: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "fullshard"))]
        place = (frames[-1].filename, frames[-1].lineno) if frames else (filename, line)
        found[f"{'/'.join(Path(place[0]).parts[-3:])}:{place[1]}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            job.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    wait_for(job.device)
    return [f"{place} ×{times}" for place, times in found.most_common()]


def measure(case: dict[str, Any], size: argparse.Namespace, device: Any) -> dict[str, Any]:
    """One case on this rank; figures are rank 0's."""
    import torch

    job = Job(case, size, device)
    result: dict[str, Any] = {}
    if case["engine"] == "ours":
        link = job.model._fullshard_engine.context.gather_link
        result["through_host"] = bool(link.from_host)
    for _ in range(WARM_UP):
        loss = job.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result["step_ms"] = round(statistics.median(job.timed() for _ in range(STEPS)) * 1e3, 2)
    if device.type == "cuda":
        result["peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    result["loss"] = round(loss.item(), 5)
    result["warned_of"] = warned_of(job)
    short, named = traced(job, STEPS, stacks=False), traced(job, 1, stacks=True)
    if short is None or named is None:
        return result
    for phase in ("forward", "backward"):
        result[phase] = {kind: short.beside_compute(kind, phase) for kind in ("nccl", "htod", "dtoh")}
    compute = tracing.length(short.compute()) / 1e3 / max(1, short.steps)
    result |= {"compute_ms": round(compute, 3), "unplaced": short.unplaced, "host_waits": named.waits_per_step()}
    if device.type == "cuda" and not short.spans("nccl"):
        result["error"] = "no NCCL kernel in the trace: tensors took another way, or the profiler saw no kernels"
    return result


def conditions(hidden: int, device: Any) -> dict[str, float]:
    """Bytes per second that a gather brings, and products per second, while both ranks do the same."""
    import torch
    import torch.distributed as dist

    import fullshard.runtime as xr

    def seconds(work: Any, times: int) -> float:
        work()
        wait_for(device)
        xr.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        wait_for(device)
        return (time.perf_counter() - start) / times

    count = 2**24 if device.type == "cuda" else 2**16
    piece, whole = (torch.empty(n, dtype=torch.bfloat16, device=device) for n in (count, RANKS * count))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    bandwidth = (RANKS - 1) * count * 2 / seconds(lambda: gather(whole, piece), 5)
    rows = 8192 if device.type == "cuda" else 64
    a, b = (torch.empty(n, hidden, dtype=torch.bfloat16, device=device) for n in (rows, hidden * 11 // 4))
    speed = 2 * a.numel() * b.shape[0] / seconds(lambda: a @ b.T, 20)
    return {"gather_bytes_per_second": bandwidth, "flops_per_second": speed}


def fitting_tokens(found: dict[str, float], hidden: int, layers: int, device: Any) -> int:
    """Tokens per rank with which a layer's forward takes about as long as its gather, as far as memory allows.

    A parameter costs one byte to gather (the other rank's half, in bf16) and two operations per token.
    """
    import torch

    wanted = found["flops_per_second"] / found["gather_bytes_per_second"] / 2
    room = torch.cuda.mem_get_info()[1] / RANKS * 0.5 if device.type == "cuda" else 1e8
    most = room / (64 * hidden * layers)  # bytes that backward needs of a token
    tokens = int(min(wanted, most, MOST_TOKENS)) // LENGTH * LENGTH
    return max(LEAST_TOKENS, tokens) if device.type == "cuda" else 32


def rank_main(options: argparse.Namespace) -> None:
    """All cases on one rank; rank 0 prints what was found as one JSON line."""
    started = time.monotonic()
    import peft  # noqa: F401 - here, so that no case pays for it
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM  # noqa: F401

    import fullshard.runtime as xr

    warnings.filterwarnings("ignore")
    xr.get_logger().setLevel("WARNING")
    xr.use_spmd(device="cpu" if options.rehearse else "cuda", init_timeout=60)
    device = xr.device()
    found = conditions(options.hidden, device)
    if not options.tokens:
        options.tokens = fitting_tokens(found, options.hidden, options.layers, device)
    settled: list[Any] = [options.tokens]
    dist.broadcast_object_list(settled, src=0, device=torch.device("cpu"))
    options.tokens = settled[0]
    results: dict[str, Any] = {}
    longest = 0.0
    for name, case in CASES.items():
        if options.case and options.case not in name:
            continue
        goes_on = [time.monotonic() - started + longest < options.budget]
        dist.broadcast_object_list(goes_on, src=0, device=torch.device("cpu"))
        if not goes_on[0]:
            results[name] = {"error": "not run: out of time"}
            continue
        begun = time.monotonic()
        try:
            results[name] = measure(case, options, device)
        except (RuntimeError, ValueError, AssertionError, TypeError, AttributeError, ImportError) as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - begun)
        if xr.is_main():
            print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    if xr.is_main():
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none (rehearsal)"
        about = {"torch": torch.__version__, "gpu": gpu, "transport": str(xr.transport()), "about": ABOUT}
        size = {name: getattr(options, name) for name in ("hidden", "layers", "tokens")}
        conditions_found = {name: round(value) for name, value in found.items()}
        print(json.dumps({**about, **size, **conditions_found, "cases": results}), flush=True)


# --- the program ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks(arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """The two ranks as processes, each a node of its own; none is left afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    jobs = []
    try:
        for rank in range(RANKS):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_HOSTID": f"node{rank}",
                "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // RANKS))),
                "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            command = [sys.executable, __file__, "--rank", *arguments]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            jobs.append(subprocess.Popen(command, env=environment, stdout=out, text=True))
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def answer(jobs: list[subprocess.Popen[str]], seconds: float) -> str:
    """What rank 0 prints; "" if a rank fails or the time is up first."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return jobs[0].communicate(timeout=1)[0]
        if jobs[1].poll():
            break
    return ""


def compared(cases: dict[str, Any]) -> None:
    """Add to each case how it stands beside `fully_shard` with the same model and offload: the ratio of step times,
    and which of the host's waits that engine has too (the model's and the optimizer's own)."""
    for name, result in cases.items():
        peer = cases.get(", ".join([*name.split(", ")[:-1], "fully_shard"]), {})
        if "step_ms" not in result or "step_ms" not in peer:
            continue
        result["time_ratio_to_fully_shard"] = round(result["step_ms"] / peer["step_ms"], 3)
        if peer is result:
            continue
        theirs = {(w["phase"], w["call"], w["where"]) for w in peer.get("host_waits", [])}
        for wait in result.get("host_waits", []):
            wait["also_in_fully_shard"] = (wait["phase"], wait["call"], wait["where"]) in theirs


def show(found: dict[str, Any]) -> None:
    """The table, and the host's waits below it."""

    def say(line: str = "") -> None:
        print(line, file=sys.stderr, flush=True)

    def share(result: dict[str, Any], phase: str, kind: str) -> str:
        part = result.get(phase, {}).get(kind, {})
        return f"{part['ms']:.1f} ({part['share']:.0%})" if part.get("share") is not None else "-"

    say(
        f"hidden {found['hidden']}, {found['layers']} layers, {found['tokens']} tokens per rank; gathers bring "
        f"{found['gather_bytes_per_second'] / 1e9:.2f} GB/s, products {found['flops_per_second'] / 1e12:.0f} TFLOP/s "
        f"per rank; transport {found['transport']}; {found['gpu']}, torch {found['torch']}"
    )
    say("ms per step, in brackets the share of it that runs beside compute")
    columns = ("step", "/fully_shard", "compute", "NCCL forward", "NCCL backward", "HtoD fwd", "HtoD bwd", "DtoH bwd")
    say(f"{'case':28}" + "".join(f"{column:>15}" for column in columns) + f"{'host waits':>12}")
    for name, result in found["cases"].items():
        if "step_ms" in result:
            cells = [
                f"{result['step_ms']:.1f}", str(result.get("time_ratio_to_fully_shard", "-")),
                f"{result.get('compute_ms', 0):.1f}", share(result, "forward", "nccl"),
                share(result, "backward", "nccl"), share(result, "forward", "htod"), share(result, "backward", "htod"),
                share(result, "backward", "dtoh"),
            ]  # fmt: skip
            waits = sum(w["per_step"] for w in result.get("host_waits", []))
            say(f"{name:28}" + "".join(f"{cell:>15}" for cell in cells) + f"{waits:>12g}")
        if "error" in result:
            say(f"{name:28}   {result['error']}")
    for name, result in found["cases"].items():
        for wait in result.get("host_waits", []):
            say(
                f"{name}: {wait['phase']}: {wait['call']} ×{wait['per_step']:g}, {wait['ms_per_step']:g} ms, in "
                f"{wait['where']}{' (fully_shard too)' if wait.get('also_in_fully_shard') else ''}"
            )
        for place in result.get("warned_of", []):
            say(f"{name}: torch warns of a synchronising operation at {place}")
    say(found["about"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=0, help="per rank; 0: as many as the gathers are slow")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--budget", type=float, default=95.0, help="seconds after which no further case begins")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs and a tiny model: the steps, not the figures")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rehearse:
        options.hidden, options.layers = 64, 2
    if options.rank:
        rank_main(options)
        return 0
    arguments = [f"--{name}={getattr(options, name)}" for name in ("hidden", "layers", "tokens", "case", "budget")]
    with ranks([*arguments, *(["--rehearse"] if options.rehearse else [])]) as jobs:
        out = answer(jobs, options.budget + 20)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        print("no result: a rank failed, or the time was up", file=sys.stderr)
        return 1
    found = json.loads(lines[-1])
    compared(found["cases"])
    show(found)
    print(json.dumps(found), flush=True)
    return 0 if not any("error" in result for result in found["cases"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
