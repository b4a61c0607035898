"""What a run records of itself when it starts, for its report: model, method, hardware, and statistics of its data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.config.paths import replace_text
from fullshard.data.token_table import LEFT_OUT, TokenTable, statistics
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.models.causal_lm import get_causal_lm
from fullshard.parallel.settings import resolved_launch
from fullshard.quant.experts import NF4Experts
from fullshard.quant.fp8_linear import FP8Linear
from fullshard.quant.linear import NF4Linear
from fullshard.report.loggers import attempt
from fullshard.report.records import DATA_FILE
from fullshard.sft.batches import EVALUATION
from fullshard.sft.model import local_folder
from fullshard.sft.run_dir import place_of, write_settings
from fullshard.sft.run_parts import Parts
from fullshard.sft.sft_config import SFTConfig
from fullshard.version import library_versions
from fullshard.weights.adapter_base import lasting_name

BINS = 24
"""The most bars of a histogram."""


def write_facts(
    config: SFTConfig, parts: Parts, notes: Sequence[str], steps: int, plan: Mapping[str, Any] | None
) -> None:
    """Write settings, plan and statistics of the data into the run's folder, for the first rank alone."""
    write_settings(config, about_run(config, parts, notes, steps), plan)
    write_data(config, parts)


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
    elif any(isinstance(module, FP8Linear) for module in model.modules()):
        name = f"{name} of an fp8 model"
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
    attempt(DATA_FILE, lambda: replace_text(place_of(config) / DATA_FILE, json.dumps({"data_sets": sets})))


def describe_table(name: str, table: TokenTable) -> dict[str, Any]:
    """The counts of a data set, how full its packed rows are, and a histogram of the lengths of its rows."""
    facts, found = table.facts, statistics(table)
    counts = {
        key: facts.get(key) for key in ("source", "documents", "rows", "tokens", "targets", "bad_rows", *LEFT_OUT)
    }
    packed = {"fill": found["efficiency"]} if facts.get("packing") else {}
    return {
        "name": name,
        **counts,
        "row_length": found["row_length"],
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
