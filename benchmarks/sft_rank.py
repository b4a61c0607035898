"""One run of `benchmarks/sft_gpu.py`: a contestant trains one case in this process and prints what was measured.

It is run as `python -m benchmarks.sft_rank` and started while the contestant before it still trains: it imports its
libraries, prints READY and waits for a line. All contestants get the same files, rows and initial adapter values.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.sft_files import LORA
from benchmarks.step_profile import summarize

GPU = torch.cuda.is_available()
READY, RESULT = "READY", "RESULT "
LEARNING = {"learning_rate": 2e-4, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "weight_decay": 0.0}


# --- what all contestants share ---------------------------------------------------------------------------------------


def tokenizer(job: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(job["model"])


def documents(job: dict[str, Any]) -> list[list[int]]:
    """The documents of all steps in order; frequent tokens are much more frequent than others, so there is something
    to learn. Packed: two documents of 50 to `length - 50` tokens fill a row."""
    rows, length = job["rows"] * job["steps"], job["length"]
    source = torch.Generator().manual_seed(1)
    u = torch.rand(rows, length, generator=source)
    ids = (3 + (job["vocabulary"] - 3) * u**4).long().clamp_(max=job["vocabulary"] - 1)
    if not job["packed"]:
        return ids.tolist()
    shortest = min(50, length // 4)
    cuts = torch.randint(shortest, length - shortest + 1, (rows,), generator=source).tolist()
    return [part.tolist() for row, cut in zip(ids, cuts, strict=True) for part in (row[:cut], row[cut:])]


class Clock:
    """The times of the steps after the first ones, memory, and losses, by transformers' callbacks.

    The loss is logged after each of the first steps, and once for the mean of the timed ones, so that no timed step
    waits for the device.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.warm_up, self.last, self.profiled = job["warm_up"], job["steps"], job.get("profile")
        self.marks: list[Any] = []
        self.losses: dict[int, float] = {}
        self.before = {"allocated": 0, "reserved": 0}
        self.profiler: Any = None

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Ticking(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step = state.global_step
                control.should_log = step <= clock.warm_up or step == clock.last
                clock.tick(step)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if logs and "loss" in logs:
                    clock.losses[state.global_step] = float(logs["loss"])

        return Ticking()

    def tick(self, step: int) -> None:
        if step == self.warm_up and GPU:
            torch.cuda.synchronize()
            self.before = _peaks()
            torch.cuda.reset_peak_memory_stats()
        if self.profiled and step == self.last - 1:
            self.profiler = _profiler()
        elif self.profiled and step == self.last:
            _synchronize()
            self.profiler.stop()
        elif step >= self.warm_up:
            self.marks.append(_mark())

    def report(self, tokens: float) -> dict[str, Any]:
        _synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        seconds = [a.elapsed_time(b) / 1e3 if GPU else b - a for a, b in pairs]
        found: dict[str, Any] = {"losses": self.losses}
        if seconds:
            median, mean = statistics.median(seconds), statistics.mean(seconds)
            found |= {"tok_s": tokens / median, "tok_s_mean": tokens / mean, "step_ms": 1e3 * median}
        if GPU:
            steps = _peaks()
            found |= {f"peak_{name}": max(self.before[name], steps[name]) / 2**30 for name in steps}
            found["steps_allocated"] = steps["allocated"] / 2**30
        return found


def _peaks() -> dict[str, int]:
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def _synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def _mark() -> Any:
    if not GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    _synchronize()
    made = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])], record_shapes=True)
    made.start()
    return made


# --- the contestants --------------------------------------------------------------------------------------------------


def ours(job: dict[str, Any], clock: Clock) -> None:
    from fullshard import SFTConfig, SFTTrainer

    found = documents(job)
    rows: list[dict[str, Any]] = [{"input_ids": one} for one in found]
    if job["packed"]:
        rows = [
            {"input_ids": a + b, "seq_lengths": [len(a), len(b)]} for a, b in zip(found[::2], found[1::2], strict=True)
        ]
    known = set(SFTConfig.__dataclass_fields__)
    settings = {name: value for name, value in job["settings"].items() if name in known}
    if left := sorted(set(job["settings"]) - known):
        job["left_out"] = left
    adapter = {} if job["full"] else {"adapter_name_or_path": f"{job['model']}/adapter-{job['dropout']}"}
    four_bit = {"use_4bit_quantization": True, "use_nested_quant": True} if job["four_bit"] else {}
    packing = {"packing": True, "skip_prepare_dataset": True} if job["packed"] else {}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = SFTConfig(
        output_dir=f"{job['model']}-output", overwrite=True, max_steps=job["steps"],
        per_device_train_batch_size=job["rows"] // world, max_length=job["length"], bf16=GPU,
        torch_dtype="float32" if job["full"] else "auto", logging_strategy="no", save_strategy="no",
        train_sampling_strategy="sequential", progress="quiet", use_cpu=not GPU,
        **LEARNING, **adapter, **four_bit, **packing, **settings,
    )  # fmt: skip
    made = SFTTrainer(
        model=job["model"], args=args, train_dataset=rows, processing_class=tokenizer(job), callbacks=[clock.callback()]
    )
    made.train()


def trl(job: dict[str, Any], clock: Clock) -> None:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    compute = torch.bfloat16 if GPU else torch.float32
    more: dict[str, Any] = {}
    if job["four_bit"]:
        from transformers import BitsAndBytesConfig

        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
        )
    dtype = torch.float32 if job["full"] else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=dtype, device_map={"": 0 if GPU else "cpu"}, use_cache=False, **more
    )
    if not job["full"]:
        model = PeftModel.from_pretrained(model, f"{job['model']}/adapter-{job['dropout']}", is_trainable=True)
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(output_dir=folder, report_to="none", disable_tqdm=True, use_cpu=not GPU, **_common(job))
        data = Dataset.from_list([{"input_ids": one} for one in documents(job)])
        made = SFTTrainer(
            model=model, args=args, train_dataset=data, processing_class=tokenizer(job), callbacks=[clock.callback()]
        )
        made.train()


def unsloth(job: dict[str, Any], clock: Clock) -> None:
    from unsloth import FastLanguageModel  # isort: skip - first, since it patches the others
    from datasets import Dataset
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from trl import SFTConfig, SFTTrainer

    model, words = FastLanguageModel.from_pretrained(
        job["model"], max_seq_length=job["length"], dtype=torch.bfloat16, load_in_4bit=job["four_bit"],
        use_gradient_checkpointing="unsloth", local_files_only=True,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=LORA["r"], lora_alpha=LORA["lora_alpha"], lora_dropout=job["dropout"], bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth" if job["settings"].get("gradient_checkpointing", True) else False,
    )  # fmt: skip
    set_peft_model_state_dict(model, load_file(f"{job['model']}/adapter-{job['dropout']}/adapter_model.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        common = {name: value for name, value in _common(job).items() if name != "gradient_checkpointing"}
        common["per_device_train_batch_size"] = job["rows"]
        args = SFTConfig(output_dir=folder, report_to="none", disable_tqdm=True, packing=job["packed"], **common)
        data = Dataset.from_list([{"input_ids": one} for one in documents(job)])
        made = SFTTrainer(
            model=model, args=args, train_dataset=data, processing_class=words, callbacks=[clock.callback()]
        )
        made.train()


def _common(job: dict[str, Any]) -> dict[str, Any]:
    """Settings of the trainers of peers."""
    rows = job["rows"] * (2 if job["packed"] else 1)  # unpacked: the same documents in a step
    return {
        "max_steps": job["steps"], "per_device_train_batch_size": rows, "max_length": job["length"], "bf16": GPU,
        "logging_strategy": "no", "save_strategy": "no", "train_sampling_strategy": "sequential", **LEARNING,
        "gradient_checkpointing": True, **job["settings"],
    }  # fmt: skip


CONTESTANTS = {"ours": ours, "trl": trl, "unsloth": unsloth}
IMPORTS = {
    "ours": ("fullshard.sft.trainer", "transformers.models.llama.modeling_llama", "peft"),
    "trl": ("datasets", "trl.trainer.sft_trainer", "peft", "transformers.models.llama.modeling_llama"),
    "unsloth": ("unsloth",),
}


def main() -> int:
    job = json.loads(sys.argv[1])
    for name in IMPORTS[job["who"]]:
        __import__(name)
    print(READY, flush=True)
    if not sys.stdin.readline():
        return 1
    began, clock = time.perf_counter(), Clock(job)
    try:
        CONTESTANTS[job["who"]](job, clock)
        found = clock.report(job["rows"] * job["length"])
        if clock.profiler is not None:
            with tempfile.NamedTemporaryFile(suffix=".json") as trace:
                clock.profiler.export_chrome_trace(trace.name)
                found["profile"] = summarize(json.loads(Path(trace.name).read_text())["traceEvents"])
    except torch.cuda.OutOfMemoryError:
        found = {"error": "out of memory"}
    found |= {"seconds": round(time.perf_counter() - began, 1), "left_out": job.get("left_out", [])}
    print(RESULT + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for the libraries to take themselves down
