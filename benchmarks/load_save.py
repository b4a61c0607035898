"""Measures time and memory of loading a model onto two Gloo ranks, compared with two common ways.

    python benchmarks/load_save.py           # a Llama of 2.3 GB in bf16; `--layers N` for another size

A Llama with random weights is written shard by shard to a temporary folder, which is removed afterwards. Each method
loads it in new processes, after the files have been read once into the page cache:

- `ours`: `fullshard.load_pretrained`.
- `from_pretrained`: every rank calls transformers' `from_pretrained` and wraps the result with torch's `fully_shard`.
- `accelerate`: Accelerate's RAM-efficient loading. Its `fsdp2_prepare_model` runs on the result of
  `from_pretrained` with its environment variables (rank 0 reads the files, other ranks hold zeros; full tensors are
  broadcast). `Accelerator` does not support FSDP on CPUs, so a mock object with the same attributes calls it.

Time is measured until the last rank is ready. Memory is sampled every few milliseconds; reported is the peak above that
after the imports, summed over the ranks: `anonymous` (without page cache and file mappings) and `resident` (with file
mappings, such as memory-mapped tensors). Methods alternate and run several times; medians are reported. One JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RANKS = 2
ROUTES = ("ours", "from_pretrained", "accelerate")


def settings(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }  # fmt: skip


def write_model(directory: Path, layers: int) -> int:
    """Random weights, one file per layer, without ever holding the model; the bytes of its tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**settings(layers), dtype=torch.bfloat16, architectures=["LlamaForCausalLM"])
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in model.state_dict().items():
        part = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(part, {})[name] = value
    generator = torch.Generator().manual_seed(0)
    places, total = {}, 0
    for i, values in enumerate(parts.values()):
        file = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        made = {n: torch.empty(v.shape, dtype=v.dtype).normal_(generator=generator) for n, v in values.items()}
        save_file(made, directory / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(made, file))
        total += sum(v.numel() * v.itemsize for v in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


# --- one rank of one route --------------------------------------------------------------------------------------------


class Memory:
    """The highest anonymous and resident memory of this process above a baseline."""

    def __init__(self) -> None:
        self.base = self.now()
        self.peak = self.base
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    @staticmethod
    def now() -> tuple[int, int]:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return tuple(int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "VmRSS"))  # type: ignore[return-value]

    def watch(self) -> None:
        while not self.stop.wait(0.003):
            self.peak = tuple(map(max, self.peak, self.now()))  # type: ignore[assignment]

    def above(self) -> tuple[int, int]:
        self.stop.set()
        self.thread.join()
        self.peak = tuple(map(max, self.peak, self.now()))  # type: ignore[assignment]
        return self.peak[0] - self.base[0], self.peak[1] - self.base[1]


def load_ours(directory: str) -> Any:
    from fullshard import load_pretrained

    return load_pretrained(directory, progress=False)


def load_from_pretrained(directory: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def load_accelerate(directory: str) -> Any:
    import torch
    import torch.distributed as dist
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import AutoModelForCausalLM

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=torch.device("cpu"),
        is_main_process=dist.get_rank() == 0, torch_device_mesh={("fsdp",): mesh()},
        parallelism_config=SimpleNamespace(fsdp_dim_names=["fsdp"]),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(directory)
    return fsdp2_prepare_model(accelerator, model)


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))


def run_rank(route: str, directory: str) -> None:
    if route == "accelerate":
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2")
    import torch.distributed as dist
    import transformers

    import fullshard.runtime as runtime

    for name in ("accelerate.utils.fsdp_utils", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
                 "fullshard.weights.load"):  # fmt: skip
        importlib.import_module(name)  # imports count for no route

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    runtime.use_spmd()
    first = mesh()
    dist.barrier()
    memory = Memory()
    started = time.perf_counter()
    model = {"ours": load_ours, "from_pretrained": load_from_pretrained, "accelerate": load_accelerate}[route](
        directory
    )
    dist.barrier()
    seconds = time.perf_counter() - started
    anonymous, resident = memory.above()
    checksum = 0.0
    for p in model.parameters():
        checksum += p.to_local().double().abs().sum().item()
    said: list[Any] = [None] * RANKS
    dist.all_gather_object(said, (seconds, anonymous, resident, checksum))
    if dist.get_rank() == 0:
        times, anon, res, sums = zip(*said, strict=True)
        print(json.dumps({"s": max(times), "anonymous": sum(anon), "resident": sum(res), "checksum": sum(sums)}))
    del first
    sys.stdout.flush()
    os._exit(0)  # how a route's communicators are torn down is not what is measured


# --- all of them ------------------------------------------------------------------------------------------------------


def run_route(route: str, directory: Path) -> dict[str, float]:
    for file in directory.iterdir():  # into the page cache
        with open(file, "rb") as stream:
            while stream.read(1 << 24):
                pass
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--master_port", "0",
               "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0",
               __file__, "--rank-of", route, "--directory", str(directory)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{route} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=23)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--where", help="the directory in which the temporary one is made")
    parser.add_argument("--rank-of", choices=ROUTES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        run_rank(given.rank_of, given.directory)
        return
    directory = Path(tempfile.mkdtemp(prefix="fullshard-load-", dir=given.where))
    try:
        size = write_model(directory, given.layers)
        runs: dict[str, list[dict[str, float]]] = {route: [] for route in ROUTES}
        for _ in range(given.repeats):
            for route in ROUTES:
                runs[route].append(run_route(route, directory))
    finally:
        shutil.rmtree(directory)
    sums = {round(run["checksum"], 3) for made in runs.values() for run in made}
    assert len(sums) == 1, f"the routes loaded different values: {sums}"
    median = {
        route: {key: statistics.median(run[key] for run in made) for key in made[0]} for route, made in runs.items()
    }
    ours = median["ours"]
    import accelerate
    import torch
    import transformers

    result: dict[str, Any] = {"benchmark": "load", "ranks": RANKS, "model_gb": round(size / 1e9, 3)}
    for route, values in median.items():
        result[route] = {
            "s": round(values["s"], 2), "gb_per_s": round(size / 1e9 / values["s"], 2),
            "anonymous_over_model": round(values["anonymous"] / size, 3),
            "resident_over_model": round(values["resident"] / size, 3),
        }  # fmt: skip
    for route in ROUTES[1:]:
        result[f"ours_over_{route}"] = {
            key: round(ours[key] / median[route][key], 3) for key in ("s", "anonymous", "resident")
        }
    result["versions"] = {m.__name__: m.__version__ for m in (torch, transformers, accelerate)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
