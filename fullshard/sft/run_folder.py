"""The output folder in the course of a run: locked, what an earlier run left is replaced or resumed, and what the run
records of itself is written: settings, plan, hardware, statistics of the data.

Whether the folder may be used is checked in `output_dir.py`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.config.paths import Inputs, replace_text, save_tokenizer
from fullshard.data.token_table import LEFT_OUT, TokenTable, statistics
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import agree, on_rank_0
from fullshard.models.causal_lm import get_causal_lm
from fullshard.parallel.settings import resolved_launch
from fullshard.planner.estimate import Estimate
from fullshard.quant.experts import NF4Experts
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantize import quantized_format
from fullshard.report.loggers import attempt
from fullshard.report.records import DATA_FILE
from fullshard.sft import output_dir
from fullshard.sft.base_model import local_folder
from fullshard.sft.batches import EVALUATION
from fullshard.sft.loop import Loop
from fullshard.sft.output_dir import FolderLock
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer_context import Parts
from fullshard.version import library_versions
from fullshard.weights.adapter_base import lasting_name

BINS = 24
"""The most bars of a histogram."""


class EarlierRun(NamedTuple):
    """The run that is in `output_dir` already."""

    settings: dict[str, Any] | None
    resumes: bool
    """Whether this run resumes it."""


class RunFolder:
    """The output folder of one trainer. All ranks call its methods; only the first one changes the folder."""

    def __init__(self, inputs: Inputs, say: Callable[[str], None], *, checked: bool) -> None:
        self._inputs, self._say, self._checked = inputs, say, checked
        self.is_own = False
        """Whether a training of this trainer has written the folder: its contents then need no check."""
        self._earlier: EarlierRun | None = None

    @contextlib.contextmanager
    def locked(self, config: SFTConfig) -> Iterator[EarlierRun]:
        """Check the folder's contents and lock it for this run. Inside, it may be entered again."""
        if self._earlier is not None:
            yield self._earlier
            return
        locks: list[FolderLock] = []

        def lock() -> EarlierRun:
            if not self._checked and not self.is_own:
                output_dir.check_contents(config, self._inputs)
            locks.append(output_dir.lock_output_dir(config))
            return EarlierRun(output_dir.read_settings(output_dir.output_path(config)), output_dir.resumes(config))

        try:
            self._earlier = on_rank_0(lock, "output directory")
            self._checked = False  # what other runs write later is checked again
            yield self._earlier
        finally:
            self._earlier = None
            for each in locks:
                each.release()

    def replace_earlier(self, config: SFTConfig, write: Callable[[], None]) -> None:
        """Remove what an earlier run wrote, where `overwrite` asks for it, and `write` the new run's settings."""

        def replace() -> None:
            if not runtime.is_main():
                return
            if note := output_dir.remove_earlier_run(config):
                self._say(note)
            write()

        agree(replace, "start of the run")

    def resume(self, config: SFTConfig, loop: Loop, checkpoints: CheckpointManager, earlier: EarlierRun) -> None:
        """Resume from the checkpoint that the settings name, or from the newest one in the folder."""
        named = output_dir.named_checkpoint(config)
        if named is not None and not (output_dir.is_restart() and checkpoints.latest() is not None):
            loop.load(named)
        elif checkpoints.latest() is None:
            self._say("restarted before the first checkpoint: starting from the beginning")
            return
        else:
            loop.restore(checkpoints)
        self._say(f"resumed at step {loop.progress.step} of {loop.total}")
        self._forget_lost_best(config, loop, checkpoints)
        if not runtime.is_main() or earlier.settings is None or not earlier.resumes:
            return
        if (changes := output_dir.describe_changes(earlier.settings, config)).startswith("Changed"):
            runtime.get_logger().warning("resumed with other settings. %s", changes)

    def _forget_lost_best(self, config: SFTConfig, loop: Loop, checkpoints: CheckpointManager) -> None:
        """Forget a best checkpoint that is in the folder of the resumed run only: it cannot be loaded at the end."""
        progress, steps = loop.progress, agree(checkpoints.all_steps, "list of checkpoints")[0]
        if not config.load_best_model_at_end or progress.best_step is None or progress.best_step in steps:
            return
        if runtime.is_main():
            runtime.get_logger().warning(
                "the best checkpoint so far, of step %d, is not in %s: the best one is chosen among later evaluations",
                progress.best_step,
                checkpoints.path,
            )
        progress.best_step = progress.best_value = None
        loop.notify.state.best_metric = loop.notify.state.best_global_step = None


# --- what the run records of itself ---------------------------------------------------------------------------------


def write_run(config: SFTConfig, parts: Parts, notes: Sequence[str], steps: int, estimate: Estimate | None) -> None:
    """Write settings, plan, statistics of the data and the tokenizer into the run's folder, on the first rank."""
    if not runtime.is_main():
        return
    plan = estimate.to_json() if estimate is not None else None
    output_dir.write_settings(config, about_run(config, parts, notes, steps), plan)
    write_data(config, parts)
    # Beside the checkpoints from the start, so that they can be used before the run has ended.
    save_tokenizer(parts.tokenizer, output_dir.output_path(config))


def about_run(config: SFTConfig, parts: Parts, notes: Sequence[str], steps: int) -> dict[str, Any]:
    """What `settings.json` holds besides the settings; the model is sharded."""
    base = parts.base or local_folder(get_causal_lm(parts.model))
    return {
        "changed": config.changed(),
        "name": config.run_name,
        "base": lasting_name(base) if base else None,
        "data": config.dataset_name or "user-provided data",
        "method": method_of(parts.model),
        "hardware": hardware(),
        "ranks": runtime.global_device_count(),
        "steps": steps,
        "notes": list(notes),
        "engine": parts.engine.describe(),
        "launch": resolved_launch(),
        "versions": library_versions(),
    }


def method_of(model: Any) -> str:
    """Full fine-tuning, LoRA, QLoRA or another adapter, with the number of trained parameters."""
    plans = [p for unit in model.plan.units for p in unit.parameters]
    trained = sum(math.prod(plan.shape) for plan in plans if plan.trainable)
    kinds = [one.peft_type for one in getattr(model, "peft_config", {}).values()]
    name = str(getattr(kinds[0], "value", kinds[0])).replace("LORA", "LoRA") if kinds else "full fine-tuning"
    if any(isinstance(module, NF4Linear | NF4Experts) for module in model.modules()):
        name = "QLoRA" if name == "LoRA" else f"{name} of a 4-bit model"
    elif (kind := quantized_format(model)) is not None:
        name = f"{name} on {kind} weights"
    return f"{name}, {trained:,} trained parameters"


def hardware() -> str:
    """The devices of the run, as the first rank sees them."""
    device, ranks, nodes = runtime.device(), runtime.global_device_count(), runtime.node_count()
    rank = f"{runtime.device_type()} {'device of XLA' if engines.current().drives_machine else 'rank'}"
    kind = accelerator.names()[device.index or 0] if accelerator.is_accelerator(device) else rank
    return f"{ranks:,} × {kind}" + (f" on {nodes:,} nodes" if nodes > 1 else "")


# --- data -----------------------------------------------------------------------------------------------------------


def write_data(config: SFTConfig, parts: Parts, streamed: Mapping[str, Any] | None = None) -> None:
    """Write statistics of the run's data, on the first rank; `streamed` are the counts of a stream so far."""
    if not runtime.is_main():
        return
    sets = []
    if isinstance(parts.train, TokenTable):
        sets.append(describe_table("training", parts.train))
    elif streamed is not None:
        sets.append({"name": "training, as far as it was streamed", **streamed})
    evaluation = parts.evaluation if isinstance(parts.evaluation, dict) else {"": parts.evaluation}
    for name, table in evaluation.items():
        if table is not None:
            sets.append(describe_table(f"{EVALUATION} ({name})" if name else EVALUATION, table))
    attempt(
        DATA_FILE, lambda: replace_text(output_dir.output_path(config) / DATA_FILE, json.dumps({"data_sets": sets}))
    )


def describe_table(name: str, table: TokenTable) -> dict[str, Any]:
    """The counts of a data set, how full its packed rows are, and a histogram of the lengths of its rows."""
    facts, stats = table.facts, statistics(table)
    counts = {
        key: facts.get(key) for key in ("source", "documents", "rows", "tokens", "targets", "bad_rows", *LEFT_OUT)
    }
    packed = {"fill": stats["efficiency"]} if facts.get("packing") else {}
    return {
        "name": name,
        **counts,
        "row_length": stats["row_length"],
        **packed,
        "row_lengths": histogram(table.row_sizes[:]),
    }


def histogram(sizes: npt.NDArray[np.int64]) -> dict[str, list[int]]:
    """How many rows there are of each length: `edges`, and the number of `rows` between two of them."""
    if not len(sizes):
        return {"edges": [], "rows": []}
    low, high = int(sizes.min()), int(sizes.max()) + 1
    width = max(1, -(-(high - low) // BINS))
    edges = np.arange(low, high + width, width)
    return {"edges": edges.tolist(), "rows": np.histogram(sizes, edges)[0].tolist()}
