"""Runs of `SFTTrainer` whose memory is measured, beside the memory that is planned for them.

A `Setting` is a model's shape with the settings of a run. `measure` trains a few steps with it on this rank, from files
with random weights: on CPUs every byte is counted (`tests/memory_tracker.py`), on a GPU torch's allocator counts.
`plan` makes the estimate for the same settings from the model's config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fullshard.activations.levels import Level
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.batch import BatchShape, evaluation_shape
from fullshard.planner.memory import MemoryEstimate, estimate_memory
from fullshard.planner.memory_settings import (
    memory_options,
    needed_levels,
    planned_choice,
    planned_levels,
)
from fullshard.planner.planned_model import planned_model
from fullshard.planner.tracer import trace_evaluation, trace_step
from fullshard.sft.checked_run import sharding_settings
from fullshard.sft.sft_config import SFTConfig
from tests.memory_tracker import MemoryTracker

SIZES = {
    "vocab_size": 1000, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
STEPS = 3
"""Steps of a measured run: the first one makes the optimizer's state and records the order of units."""
MOMENTS = ("forward", "loss", "backward", "optimizer step")
LITTLE = 2**20
"""Bytes that a run may leave on a GPU: tables of constants."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    name: str
    ranks: int = 1
    architecture: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    length: int = 128
    steps: int = STEPS
    device: str = "cpu"

    @property
    def packed(self) -> bool:
        return bool(self.train.get("packing"))

    def config(self, folder: Path) -> SFTConfig:
        precision = {"bf16": False, "torch_dtype": "float32", "use_cpu": True} if self.device == "cpu" else {}
        return SFTConfig(
            output_dir=str(folder / "out"), overwrite=True, max_steps=self.steps, max_length=self.length,
            per_device_train_batch_size=self.rows, learning_rate=1e-4, logging_strategy="no", save_strategy="no",
            report_to="none", progress="quiet", train_sampling_strategy="sequential",
            **{**precision, **({"skip_prepare_dataset": True} if self.packed else {}), **self.train},
        )  # fmt: skip

    def sharding(self, config: SFTConfig) -> EngineSettings:
        return sharding_settings(config, EngineSettings(**self.engine), [])

    def data(self) -> list[dict[str, Any]]:
        return self._rows(self.rows * self.train.get("gradient_accumulation_steps", 1) * self.steps)

    def evaluation(self) -> list[dict[str, Any]] | None:
        return self._rows(self.train["per_device_eval_batch_size"]) if "eval_strategy" in self.train else None

    def _rows(self, per_rank: int) -> list[dict[str, Any]]:
        """Rows of full length; packed ones hold two documents."""
        generator, count = torch.Generator().manual_seed(1), per_rank * self.ranks
        ids = torch.randint(3, 200, (count, self.length), generator=generator).tolist()
        cut = -(-self.length // 2)
        lengths = {"seq_lengths": [cut, self.length - cut]} if self.packed else {}
        return [{"input_ids": row, **lengths} for row in ids]


def model_config(setting: Setting) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(setting.architecture, **{**SIZES, **setting.sizes})


def write_model(setting: Setting, folder: Path) -> Path:
    """A model's folder with random weights."""
    from transformers import AutoModelForCausalLM

    from tests.data.tiny import make_tokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(setting)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


# --- the run ----------------------------------------------------------------------------------------------------------


class DeviceTracker:
    """The peaks of moments as torch's allocator of the GPU counts them.

    The allocator has one peak, which the run also reads and begins anew: a memory budget does. Inside, the run and the
    tracker have one each.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.before = 0
        """Bytes that were allocated before the run."""
        self.others = 0
        """Bytes that were in use beside torch's at the start or the end: contexts, libraries, other processes."""
        self._moment, self._of_moment, self._of_run = "", 0, 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> DeviceTracker:
        self.before, self.others = _settled_memory(), _memory_of_others()
        self._read, self._reset = torch.accelerator.max_memory_allocated, torch.accelerator.reset_peak_memory_stats
        self._reset()
        for name, own in (
            ("max_memory_allocated", self._peak_of_run), ("reset_peak_memory_stats", self._new_peak_of_run)
        ):  # fmt: skip
            self._patches.enter_context(mock.patch.object(torch.accelerator, name, own))
        return self

    def __exit__(self, *error: Any) -> None:
        self.mark("")
        self._patches.close()
        self.others = max(self.others, _memory_of_others())

    def mark(self, moment: str) -> None:
        """From here on, memory belongs to this moment. The host allocates in order, so nothing has to be waited for."""
        self._take()
        self.peaks[self._moment] = max(self._of_moment - self.before, self.peaks.get(self._moment, 0))
        self._moment, self._of_moment = moment, 0

    def _take(self) -> None:
        found = self._read()
        self._reset()
        self._of_moment, self._of_run = max(self._of_moment, found), max(self._of_run, found)

    def _peak_of_run(self, device: Any = None) -> int:
        self._take()
        return self._of_run

    def _new_peak_of_run(self, device: Any = None) -> None:
        self._take()
        self._of_run = 0


def _memory_of_others() -> int:
    """Bytes of the GPU that torch has not reserved here. If they are many, the engine does not keep copies."""
    free, total = torch.accelerator.get_memory_info()
    return total - free - torch.accelerator.memory_reserved()


def _settled_memory() -> int:
    """Bytes that are allocated once what earlier runs of this process have left is released. Threads of torch and of
    the watchdog hold collectives, and these their tensors, for a moment after the run."""
    until = time.monotonic() + 5
    while True:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if (left := torch.accelerator.memory_allocated()) < LITTLE or time.monotonic() > until:
            return left
        time.sleep(0.2)


class NoTracker(contextlib.nullcontext[Any]):
    """For ranks other than the first, which hold no more than it."""

    def __enter__(self) -> Any:
        return self

    def mark(self, moment: str) -> None: ...


def measure(setting: Setting, model: Path, folder: Path, callbacks: Sequence[Any] = ()) -> Any:
    """Train, with the memory of every moment measured on the first rank. All ranks must call it."""
    from transformers import AutoTokenizer

    from fullshard.sft.trainer import SFTTrainer

    tokenizer, config = AutoTokenizer.from_pretrained(model), setting.config(folder)
    first = int(os.environ.get("RANK", "0")) == 0
    kind = NoTracker if not first else MemoryTracker if setting.device == "cpu" else DeviceTracker
    with kind() as tracker:
        tracker.mark("load")
        trainer = SFTTrainer(
            model=str(model), args=config, train_dataset=setting.data(), eval_dataset=setting.evaluation(),
            processing_class=tokenizer, callbacks=list(callbacks),
        )  # fmt: skip
        if setting.engine:
            engine = dataclasses.replace(trainer.parts.engine, **setting.engine)
            trainer.parts = dataclasses.replace(trainer.parts, engine=engine)
        _mark_moments(trainer, tracker)
        trainer.train()
        tracker.mark("after")
    return tracker


def _mark_moments(trainer: Any, tracker: Any) -> None:
    """Mark the moments of all steps but the first, in which compilers and autotuning need memory of their own."""
    from transformers import TrainerCallback

    during: list[str] = []

    def mark(moment: str) -> None:
        tracker.mark(during[0] if during else moment if trainer.state.global_step else "first step")

    class Marks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            mark("between steps")
            model = trainer.parts.model
            layers = [unit.name for unit in model.plan.units if unit.name]
            if layers:
                dict(model.named_modules())[layers[-1]].register_forward_hook(lambda *_: mark("loss"))

        def on_step_begin(self, *_: Any, **more: Any) -> None:
            mark("forward")

        on_substep_end = on_step_begin

        def on_pre_optimizer_step(self, *_: Any, **more: Any) -> None:
            mark("optimizer step")

        def on_step_end(self, *_: Any, **more: Any) -> None:
            mark("between steps")

    plain = trainer.accelerator.backward

    def backward(loss: Any, **options: Any) -> None:
        mark("backward")
        plain(loss, **options)
        mark("between steps")

    evaluate = trainer.evaluate

    def evaluation(*args: Any, **options: Any) -> Any:
        during.append("evaluation")
        mark("evaluation")
        found = evaluate(*args, **options)
        during.clear()
        mark("between steps")
        return found

    trainer.accelerator.backward, trainer.evaluate = backward, evaluation
    trainer.add_callback(Marks())


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Afterwards, what a run has left behind is released: runs in one process count alike."""
    from fullshard.quant import workspace

    yield
    gc.collect()
    on_gpu = torch.cuda.is_available()
    workspace.release(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(
    setting: Setting, model: Path, folder: Path, nodes: int = 1, device_memory: int | None = None
) -> tuple[list[Level], MemoryEstimate]:
    """The estimate for a setting, from the model's config.json alone."""
    config = setting.config(folder)
    engine = setting.sharding(config)
    planned = planned_model(config, engine, model / "config.json", setting.ranks, nodes, device=setting.device)
    batch = BatchShape(setting.rows, setting.length, config.gradient_accumulation_steps, setting.packed)
    traces = {level: trace_step(planned, batch, level) for level in needed_levels(config, planned.engine)}
    options = memory_options(config, planned, batch.accumulation, setting.ranks // nodes, device_memory)
    choice, shape = planned_choice(config, planned, traces, options), evaluation_shape(config, batch)
    levels = planned_levels(config, planned, choice)
    evaluation = None if shape is None else trace_evaluation(planned, shape)
    return levels, estimate_memory(planned.plan, planned.traced(traces), levels, options, evaluation)


def compare(estimate: MemoryEstimate, measured: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of every moment of a step; "loss" is part of "forward" where there is one unit."""
    return {name: (sum(estimate.moments[name].values()), measured[name]) for name in MOMENTS if name in measured}
