"""Compares scripts for Accelerate, `Trainer` and TRL under `fullshard launch` with the same scripts on other engines.

    python benchmarks/integrations.py             # every script; `--script NAME` for one, `--quick` for a smoke run

Without a GPU: two Gloo ranks in fp32; the reference is Accelerate's own FSDP 2 (Accelerate offers it on GPUs only, so
its state is told that FSDP is on). With a GPU: one rank in bf16 mixed precision; the references are the library alone
and Accelerate's own FSDP 2. The scripts, all in this file: an Accelerate loop, `Trainer`, and TRL's `SFTTrainer` with
a LoRA adapter (if TRL is installed). They load the same Llama from files and train it on the same tokens.

The engines take turns, a new job each time, for several rounds. A round's ratio is that of its own jobs, so that other
load on the machine changes it less than the times; the median over the rounds is reported. `cpu_ratio` compares the CPU
time of rank 0 (all threads), which depends even less on other load. Memory is measured in a job of its own: the peak
above that after the imports, over loading and training, and over the timed steps alone. On CPUs it is the proportional
set size (PSS) summed over all ranks; on a GPU it is what torch has allocated there. One JSON line per script.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

warnings.filterwarnings("ignore")

GPU = torch.cuda.is_available()
OWN_FSDP = ROOT / "tests" / "integrations" / "accelerate_fsdp2.py"
ENGINES = ("ours", "alone", "fsdp") if GPU else ("ours", "fsdp")
RANKS = 1 if GPU else 2
ROWS, LENGTH = (4, 1024) if GPU else (1, 64)
"""Per rank and step."""
SIZES = {"full": (2048, 8, 32000), "quick": (1024, 4, 8000)} if GPU else {"full": (512, 6, 4096), "quick": (64, 2, 512)}
"""Hidden size, layers, vocabulary."""
HEAD = 64 if GPU else 32
IMPORTED = (
    "accelerate", "transformers.trainer", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    *(f"fullshard.hf.{name}" for name in ("accelerate_prepare", "accelerate_state", "four_bit", "trainer")),
)  # fmt: skip
"""Modules of the libraries and of either engine: they are part of the baseline of memory."""
STEPS = {"full": 20 if GPU else 8, "quick": 3}
WARM_UP = 3


# --- the scripts, on every rank ---------------------------------------------------------------------------------------


class Clock:
    """Times of the steps after the first ones. On a GPU only of all of them together: to wait after each costs time."""

    def __init__(self, steps: int):
        self.steps, self.count, self.times = steps, 0, []

    def tick(self) -> None:
        """At the end of a step."""
        self.count += 1
        first, last = self.count == WARM_UP, self.count == WARM_UP + self.steps
        if GPU and (first or last):
            torch.cuda.synchronize()
        if self.count >= WARM_UP and (first or last or not GPU):
            self.times.append(time.perf_counter())
        if first:
            self.began, self.busy = time.time(), time.process_time()
        if GPU and first:
            self.loading = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if last:
            self.busy = time.process_time() - self.busy

    def report(self) -> dict[str, Any]:
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        seconds = gaps[0] / self.steps if GPU else statistics.median(gaps)
        found = {"seconds": seconds, "cpu": self.busy / self.steps, "began": self.began}
        if GPU:
            steps = torch.cuda.max_memory_allocated()
            found["memory"] = {"peak": max(self.loading, steps), "steps": steps}
        return found


def rows(count: int, vocabulary: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(vocabulary, (count, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": one, "labels": one} for one in ids]


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)


def accelerate_loop(folder: str, steps: int, clock: Clock) -> list[float]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(mixed_precision="bf16" if GPU else "no")
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = rows(ROWS * RANKS * steps, model.config.vocab_size)
    collate = lambda found: {name: torch.tensor([one[name] for one in found]) for name in found[0]}  # noqa: E731
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, ROWS, collate_fn=collate))
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.tick()
    return accelerator.gather(torch.stack(losses)).view(RANKS, -1).mean(0).tolist()


def trainer(folder: str, steps: int, clock: Clock) -> list[float]:
    from transformers import Trainer, TrainingArguments

    return _trained(Trainer, TrainingArguments, load(folder), steps, clock)


def sft(folder: str, steps: int, clock: Clock) -> list[float]:
    import tokenizers
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    return _trained(
        SFTTrainer, SFTConfig, load(folder), steps, clock, Dataset.from_list, processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip


def _trained(
    kind: Any, arguments: Any, model: Any, steps: int, clock: Clock, dataset: Any = list, **more: Any
) -> list[float]:
    from transformers import TrainerCallback

    class Ticking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=1e-4, bf16=GPU,
            logging_steps=steps, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not GPU,
            gradient_checkpointing=False,
        )  # fmt: skip
        data = dataset(rows(ROWS * RANKS * steps, model.config.vocab_size))
        made = kind(model=model, args=args, train_dataset=data, callbacks=[Ticking()], **more)
        made.train()
    return [one["loss"] for one in made.state.log_history if "loss" in one]


SCRIPTS = {"accelerate": accelerate_loop, "trainer": trainer, "sft": sft}


class Sampler(threading.Thread):
    """The proportional set size of this process, every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found = [(time.time(), _pss())]
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(0.02)
            self.found.append((time.time(), _pss()))


def _pss() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def one_rank(options: argparse.Namespace) -> None:
    for name in (*IMPORTED, *(["trl.trainer.sft_trainer"] if options.run == "sft" else [])):
        importlib.import_module(name)
    sampler = Sampler() if options.memory and not GPU else None
    clock = Clock(options.steps)
    losses = SCRIPTS[options.run](options.model, WARM_UP + options.steps, clock)
    found = {**clock.report(), "losses": losses, "pss": sampler.found[:] if sampler else []}
    rank = os.environ.get("RANK", "0")
    Path(options.report, f"{rank}.json").write_text(json.dumps(found))


# --- the comparison ---------------------------------------------------------------------------------------------------


def job(script: str, engine: str, model: Path, steps: int, memory: bool) -> dict[str, Any]:
    """What rank 0 reports of a script on an engine; with `memory` its peak over all ranks."""
    launch = ["-m", "fullshard", "launch", "--quiet", "--num_processes", str(RANKS), *([] if GPU else ["--use_cpu"])]
    launch += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]  # Accelerate's default is one unit
    before = {
        "ours": launch,
        "fsdp": [*launch, "--no_integrations", str(OWN_FSDP)],
        "alone": [],
    }[engine]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as report:
        words = ["--run", script, "--model", str(model), "--steps", str(steps), "--report", report]
        command = [sys.executable, *before, __file__, *words, *(["--memory"] if memory else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{script} on {engine}:\n{done.stdout}\n{done.stderr}")
        ranks = [json.loads(Path(report, f"{rank}.json").read_text()) for rank in range(RANKS)]
    if memory and not GPU:
        ranks[0]["memory"] = _peaks([rank["pss"] for rank in ranks], ranks[0]["began"])
    return ranks[0]


def _peaks(samples: list[list[tuple[float, int]]], steps_from: float) -> dict[str, int]:
    """The largest sum over the ranks above the first samples: of all time, and since `steps_from`."""
    current, peaks = [one[0][1] for one in samples], {"peak": 0, "steps": 0}
    base = sum(current)
    for at, rank, value in sorted((at, rank, value) for rank, one in enumerate(samples) for at, value in one):
        current[rank] = value
        for name, start in (("peak", 0.0), ("steps", steps_from)):
            if at >= start:
                peaks[name] = max(peaks[name], sum(current) - base)
    return peaks


def compare(script: str, model: Path, steps: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(rounds):
        for engine in ENGINES:
            found[engine].append(job(script, engine, model, steps, memory=GPU))
    memory = {e: (found[e][0] if GPU else job(script, e, model, steps, memory=True))["memory"] for e in ENGINES}
    tokens = ROWS * LENGTH * RANKS
    line: dict[str, Any] = {"script": script, "rounds": rounds, "load": round(os.getloadavg()[0], 1)}
    for reference in ENGINES[1:]:
        for name, key in (("time", "seconds"), ("cpu", "cpu")):
            ratios = [a[key] / b[key] for a, b in zip(found["ours"], found[reference], strict=True)]
            line[f"{name}_ratio_to_{reference}"] = round(statistics.median(ratios), 3)
            line[f"{name}_ratios_to_{reference}"] = [round(ratio, 3) for ratio in ratios]
        for name in ("peak", "steps"):
            line[f"memory_ratio_{name}_to_{reference}"] = round(memory["ours"][name] / memory[reference][name], 3)
    line["tokens_per_second"] = {
        e: round(tokens / statistics.median(one["seconds"] for one in found[e])) for e in ENGINES
    }
    line["memory_mb"] = {e: {name: round(value / 1e6) for name, value in memory[e].items()} for e in ENGINES}
    line["last_loss"] = {e: round(found[e][0]["losses"][-1], 5) for e in ENGINES}
    return line


def write_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD, num_key_value_heads=hidden // (2 * HEAD), max_position_embeddings=LENGTH,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.device("cuda" if GPU else "cpu"):
        LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", choices=SCRIPTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--run", choices=SCRIPTS, help=argparse.SUPPRESS)  # the rest: on a rank
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return one_rank(options)
    size = "quick" if options.quick else "full"
    rounds = options.rounds or (1 if options.quick else 2 if GPU else 5)
    installed = [name for name in SCRIPTS if name != "sft" or importlib.util.find_spec("trl") is not None]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), *SIZES[size])
        for script in [options.script] if options.script else installed:
            print(json.dumps(compare(script, Path(folder), STEPS[size], rounds)), flush=True)


if __name__ == "__main__":
    main()
