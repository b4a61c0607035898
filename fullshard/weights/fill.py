"""From files to shards: fills a wrapped model whose parameters are planned but have no values yet.

Names and shapes are compared first (`match.py`), on every rank and before any data is read. Then each rank reads its
own slices, in several threads, straight into its shards; nothing is sent between ranks. What files do not hold is
computed (`init.py`), what a module wants to read itself it reads (`transforms.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard import runtime
from fullshard.errors import WeightsError
from fullshard.fsdp.engine import Engine
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.progress import Bar
from fullshard.weights import adapter_init, init
from fullshard.weights.adapter_files import adapter_readers, open_adapter
from fullshard.weights.load_report import LoadReport, together
from fullshard.weights.locate import open_source
from fullshard.weights.match import LoadPlan, match
from fullshard.weights.resize_vocab import PickedRows, grown_reader
from fullshard.weights.safetensors_index import SafetensorsFiles
from fullshard.weights.slice_reader import Job, TensorReader
from fullshard.weights.source_files import ATTRIBUTE, SourceFiles, fingerprint_of
from fullshard.weights.transforms import Transform, piece_of


def fill(
    model: nn.Module,
    source: SafetensorsFiles | str | Path,
    *,
    transform: Transform | None = None,
    strict: bool = True,
    resize_vocab: bool = False,
    new: Iterable[str] = (),
    adapter: str | Path | None = None,
    first: str | Path | None = None,
    key_mapping: dict[str, str] | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: bool = True,
) -> LoadReport:
    """Give every parameter and buffer of a wrapped model its value. All ranks must call it.

    - `source`: a directory with safetensors files, one such file, or an open `SafetensorsFiles`.
    - `transform(name, value, piece)`: see `hooks.Transform`.
    - `strict`: whether names that only one side has are an error. If not, what is missing is initialised.
    - `resize_vocab`: embeddings may have more rows than the files; new ones start at the mean of the old.
    - `new`: names of parameters that the files need not have. Those of adapter layers never need to be there.
    - `adapter`: a folder with PEFT's files, whose values the adapter layers get; otherwise they are new.
    - `first`: a folder with the values that an adapter of PiSSA or OLoRA began with; otherwise they are computed.
    - `seed`: new parameters are a function of it and their name.
    - `threads`: how many read at once; None chooses by the cores there are for each rank.
    """
    engine = getattr(model, "_fullshard_engine", None)
    if not isinstance(engine, Engine) or engine.units[0].module is not model:
        raise WeightsError(
            f"fill() needs a wrapped model, FSDPv2(module, mesh), the outermost one; got {type(model).__name__}. "
            f"Build the module under torch.device('meta'), wrap it, then fill it; load_pretrained does all three"
        )
    started = time.perf_counter()
    opened: list[SafetensorsFiles] = []
    laid_out: list[LoadPlan] = []

    def prepare() -> str | None:
        files = source if isinstance(source, SafetensorsFiles) else open_source(source)
        opened.append(files)
        brought, began = (_adapter_values(model, folder, opened) for folder in (adapter, first))
        work = match(model, engine, files, key_mapping, set(new), resize_vocab, brought, began)
        message = work.problems.text(files.path, type(model).__name__)
        if message and (strict or work.problems.misshaped or work.problems.unconvertible):
            raise WeightsError(message)
        laid_out.append(work)
        return fingerprint_of(files.path) if runtime.is_main() else None

    try:
        fingerprints = together(prepare, "load")
        work = laid_out[0]
        report = _carry_out(model, engine, work, transform, seed, threads, progress)
    finally:
        for files in opened:
            if files is not source:
                files.close()
    base = SourceFiles(os.path.abspath(work.source.path), next(filter(None, fingerprints)))
    names: dict[int, list[str]] = {}  # a module may stand in two places, such as the embedding beside a prompt
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    for p in work.provided:
        base.record({*p.plan.names, *names.get(id(p.shard), ())}, p.shard)
    setattr(model, ATTRIBUTE, base)
    report.seconds = time.perf_counter() - started
    runtime.get_logger().info("%s", report)
    return report


def _adapter_values(
    model: nn.Module, folder: str | Path | None, opened: list[SafetensorsFiles]
) -> dict[str, TensorReader]:
    if folder is None:
        return {}
    opened.append(open_adapter(folder))
    return adapter_readers(model, opened[-1])


def _carry_out(
    model: nn.Module,
    engine: Engine,
    work: LoadPlan,
    transform: Transform | None,
    seed: int,
    threads: int | None,
    progress: bool,
) -> LoadReport:
    report = LoadReport(str(work.source.path), left_out=work.problems.unexpected)
    before = work.source.bytes_read
    grown = [(p, grown_reader(reader, p.plan.shape[0])) for p, reader in work.grows]
    tables = {id(p): (reader, dtype_of(p.plan.dtype)) for p, reader in [*work.reads, *grown, *work.adapts]}
    rows = [(p, _picked(tables, table, indices)) for p, table, indices in work.rows]
    for name, module, key, table, indices in work.originals:
        work.buffers.append((name, module, key, _picked(tables, table, indices)))

    def read() -> None:
        for p in work.parameters:
            p.give_memory()
        unset = set(init.compute_buffers(model, work.parameters)) - {name for name, *_ in work.buffers}
        if unset:
            raise WeightsError(
                f"the files do not hold {len(unset)} buffer(s) and their modules do not compute them: "
                f"{', '.join(sorted(unset)[:5])}"
            )
        jobs: list[Job] = []
        for p, reader in [*work.reads, *grown, *work.adapts, *rows]:
            jobs += reader.jobs(p.local.detach(), p.layout.slices(p.plan.shape, runtime.rank()))
        for _, module, key, reader in work.buffers:
            buffer = module._buffers[key]
            assert buffer is not None
            jobs += reader.jobs(buffer, tuple(slice(0, n) for n in buffer.shape))
        total = sum(p.local.numel() * reader.dtype.itemsize for p, reader in work.reads)
        _run(jobs, work.source, threads, Bar("loading", total, progress))
        init.initialise(model, work.parameters, work.initialise, seed)
        _place_buffers(model, engine.units[0].precision.buffer_dtype)

    together(read, "load")
    for module, readers, parameters in work.own:
        pieces = {name: piece_of(p) for name, p in parameters.items()}
        held: list[Any] = []
        together(lambda: held.append(module.read_files(readers, pieces)), "load")  # noqa: B023
        module.finish_reading(held[0], pieces)
    adapter_init.derive(model, work.parameters, work.derived, seed, progress)
    if transform is not None:
        together(lambda: _transform(work, transform), "transform")
    if work.plain is not None and work.conversions is not None:
        work.plain._weight_conversions = work.conversions
    report.read = [p.plan.name for p, _ in [*work.reads, *work.adapts, *rows]]
    report.read += [name for name, *_ in work.buffers]
    report.read += [p.plan.name for _, _, parameters in work.own for p in parameters.values()]
    report.initialised = [p.plan.name for p in work.initialise]
    report.initialised += [p.plan.name for one in work.derived for p in one.parameters.values()]
    report.grown = [p.plan.name for p, _ in work.grows]
    report.bytes = work.source.bytes_read - before
    return report


def _picked(tables: dict[int, tuple[TensorReader, Any]], table: ShardedParameter, indices: list[int]) -> TensorReader:
    reader, dtype = tables[id(table)]
    return PickedRows(reader, indices, dtype)


def _run(jobs: Sequence[Callable[[], None]], source: SafetensorsFiles, threads: int | None, bar: Bar) -> None:
    """Run the reads in several threads; the first that fails ends them all."""
    count = threads or max(2, min(8, (os.cpu_count() or 2) // runtime.local_world_size()))
    before = source.bytes_read
    with bar, ThreadPoolExecutor(count, thread_name_prefix="fullshard-load") as pool:
        waiting = {pool.submit(job) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                bar.at(source.bytes_read - before)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _transform(work: LoadPlan, transform: Transform) -> None:
    with torch.no_grad():
        for p, _ in [*work.reads, *work.grows]:
            piece = piece_of(p)
            value = transform(p.plan.name, piece.local, piece)
            if value is not None:
                piece.local.copy_(value)
                work.changed.append(p)


def _place_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and dtype is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
