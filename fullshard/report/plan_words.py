"""Parts of a sharding plan in words, the same in pictures, pages and the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fullshard.config.byte_size import memory_size
from fullshard.fsdp.plan import ParameterPlan
from fullshard.report.plan_view import Cell, ParameterRow, PlanView, UnitRow
from fullshard.report.rank_grid import RankGrid, axes_of, numbers_text

# --- the whole plan -------------------------------------------------------------------------------------------------


def summary(view: PlanView) -> list[str]:
    """The plan in two lines."""
    plan, grid = view.plan, view.grid
    axes = " × ".join(f"{name} {size}" for name, size in plan.axes)
    nodes = f" on {grid.nodes} nodes of {grid.ranks_per_node}" if grid.nodes > 1 else ""
    tensors = [p for unit in plan.units for p in unit.parameters]
    trained = [p for p in tensors if p.trainable]
    experts = " × ".join(f"{name} {size}" for name, size in plan.expert_axes)
    on_host = f", {memory_size(plan.host_bytes)} of it in host memory" if plan.host_bytes else ""
    shown = sum(unit.count for unit in view.units)
    of_all = "" if shown == len(plan.units) else f" ({shown} of them shown)"
    return [
        f"{plan.strategy} over {axes}: {grid.world:,} {'rank' if grid.world == 1 else 'ranks'}{nodes}"
        + (f"; experts over {experts}" if experts else ""),
        f"{len(plan.units):,} units{of_all}, {len(tensors):,} parameters, {len(trained):,} of them train "
        f"({sum(math.prod(p.shape) for p in trained):,} elements); {memory_size(plan.shard_bytes)} per rank{on_host}",
    ]


def mesh_words(grid: RankGrid) -> list[str]:
    """Who holds the same as whom, in words."""
    words = []
    sizes = " × ".join(grid.split_axes)
    if grid.positions > 1:
        words.append(f"Ranks side by side hold different shards ({sizes}: {grid.positions}).")
    if grid.replicas > 1:
        along = " × ".join(grid.copy_axes) or "no axis"
        words.append(f"Ranks {'one below the other' if grid.positions > 1 else 'side by side'} hold the same "
                     f"({along}: {grid.replicas} copies).")  # fmt: skip
    return words or ["One rank holds everything."]


WORDS = {
    "direct": "direct: gathered straight into its own memory",
    "bucket": "bucket: small or padded, sent together with the unit's other small parameters",
    "not split": "not split: whole on every rank",
    "on the host": "on the host: whole in the host memory of every rank (thick dashes)",
    "4-bit": "4-bit: packed values with their scales, sent as they are",
    "fp8": "fp8: values with one scale per row, sent as they are",
}


def legend_words(view: PlanView) -> list[str]:
    """What the notes beside parameters mean, in lines of two."""
    rows = [row for unit in view.units for row in unit.parameters]
    there = " ".join(
        note for row in rows for note in row.notes if not row.plan.form or not note.startswith(row.plan.form)
    )
    words = [meaning for note, meaning in WORDS.items() if note in there]
    words += [
        f"{form}: as the model's files store it, sent as it is" for form in sorted({r.plan.form for r in rows} - {""})
    ]
    return [" · ".join(words[i : i + 2]) for i in range(0, len(words), 2)]


def with_numbers(what: str, numbers: Sequence[int]) -> str:
    """Ranks or nodes with their numbers, such as `rank 0` or `nodes 0–31`."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {numbers_text(numbers)}"


# --- units and parameters -------------------------------------------------------------------------------------------


def unit_words(unit: UnitRow, share: float) -> str:
    """A unit in one sentence."""
    gathered = memory_size(unit.plan.gathered_bytes)
    each = "each " if unit.count > 1 else ""
    return f"{unit.plan.module} · {share:.1%} of a rank's parameters · {each}{gathered} when gathered"


def times(count: int, size: int) -> str:
    """Bytes of several equal things, such as `32 × 104.0 MiB`."""
    return f"{count} × {memory_size(size)}" if count > 1 else memory_size(size)


def unit_title(unit: UnitRow) -> str:
    """A unit in full, for its tooltip."""
    plan, lines = unit.plan, [unit.label, f"class {unit.plan.module}"]
    each = " each" if unit.count > 1 else ""
    lines.append(f"{memory_size(plan.shard_bytes)} per rank{each} ({plan.shard_bytes:,} B)")
    lines.append(f"{memory_size(plan.gathered_bytes)} when gathered{each} ({plan.gathered_bytes:,} B)")
    if plan.gather_bucket:
        count = len(plan.gather_bucket.slots)
        lines.append(f"gather bucket: {count} parameters, {memory_size(plan.gather_bucket.length)} per rank")
    for bucket in plan.scatter_buckets:
        lines.append(f"reduce-scatter bucket: {len(bucket.slots)} gradients in {bucket.dtype}")
    for bucket in plan.copy_buckets:
        lines.append(f"all-reduce bucket: {len(bucket.slots)} gradients in {bucket.dtype}")
    return "\n".join(lines)


def parameter_title(row: ParameterRow) -> str:
    """A parameter in full, for its tooltip."""
    lines = [with_count(row.label, row.count)]
    for p in row.parts:
        own = f"{p.name.rpartition('.')[2]}: " if len(row.parts) > 1 else ""
        lines.append(f"{own}shape {shape_text(p.shape)}, dtype {dtype_text(p)}, spec {spec_text(p)}")
    if row.plan.trainable:
        lines.append(f"gradient reduced in {row.plan.reduce_dtype}")
    lines.append(f"{memory_size(row.shard_bytes)} per rank ({row.shard_bytes:,} B)")
    if row.plan.gathers:
        lines.append(f"{memory_size(row.gathered_bytes)} when gathered ({row.gathered_bytes:,} B)")
    return "\n".join([*lines, ", ".join(row.notes)])


def with_count(label: str, count: int) -> str:
    """A name with how many it stands for."""
    return f"{label} × {count}" if count > 1 else label


def dtype_text(p: ParameterPlan) -> str:
    """The dtype of the shards, and of the gathered value where it differs."""
    return p.dtype if p.dtype == p.compute_dtype else f"{p.dtype} → {p.compute_dtype}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def spec_text(p: ParameterPlan) -> str:
    """The layout as it is written for `mark_sharding`."""
    return str(p.spec)


def split_text(p: ParameterPlan, grid: RankGrid) -> str:
    """How a parameter is split over the ranks: `dim 0: 2 × 23 + 1 × 21`, the number of pieces and their lengths."""
    starts, stops = grid.bounds(p)
    lengths = stops - starts
    words = []
    for dim, entry in enumerate(p.spec):
        if not axes_of(entry):
            continue
        pieces = [n for _, n in sorted({*zip(starts[:, dim].tolist(), lengths[:, dim].tolist(), strict=True)})]
        empty = math.prod(grid.sizes_of(p)[axis] for axis in axes_of(entry)) - len(pieces)
        runs = [(len(list(group)), length) for length, group in itertools.groupby(pieces + [0] * empty)]
        words.append(f"dim {dim}: " + " + ".join(f"{count:,} × {length:,}" for count, length in runs))
    return "; ".join(words) or "whole on each rank"


def slice_text(cell: Cell, p: ParameterPlan) -> str:
    """The part of the parameter that a column holds, as an index: `0:512`, or `:, 0:512` where dim 1 is split."""
    if not cell.bytes and all(p.shape):
        return "nothing"
    split = [dim for dim, entry in enumerate(p.spec) if axes_of(entry)]
    if not split:
        return "whole"
    return ", ".join(f"{a}:{b}" if dim in split else ":" for dim, (a, b) in enumerate(cell.slices[: split[-1] + 1]))
