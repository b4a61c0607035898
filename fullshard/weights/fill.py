"""`fill`: loads files into the shards of a wrapped model whose parameters are on the meta device.

First every rank compares names and shapes (`match.py`), before any data is read. Then each rank reads its own slices
with several threads directly into its shards; weights are not sent between ranks. Parameters that are not in the files
are initialized (`init.py`); modules with their own storage format read the files themselves (`transforms.py`).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import nn

from fullshard.config.errors import WeightsError
from fullshard.device.torch_private import buffers_of
from fullshard.distributed import runtime
from fullshard.distributed.progress import Bar
from fullshard.distributed.ranks import agree, run_on_all_ranks
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.weights import adapter_init, init
from fullshard.weights.adapter_base import check_base
from fullshard.weights.adapter_files import adapter_readers, open_adapter
from fullshard.weights.locate import open_source
from fullshard.weights.match import BufferReads, LoadPlan, LoadReport, ParameterReads, match
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.slice_reader import Job, TensorReader
from fullshard.weights.source_files import ATTRIBUTE, SourceFiles, config_of, fingerprint_of, shared_checksums
from fullshard.weights.transforms import PickedRows, Transform, grown_reader, piece_of, pieces_of
from fullshard.weights.wrapped import wrapped

STAGED_BYTES = 2**30
"""Parameters of XLA devices are read into host memory together up to this size."""


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
    """Load all parameters and buffers of a wrapped model. All ranks must call it.

    - `source`: a directory with safetensors files, one such file, or an open `SafetensorsFiles`.
    - `transform(name, value, piece)`: see `transforms.Transform`.
    - `strict`: whether missing and unexpected tensors are an error. If not, missing parameters are initialized.
    - `resize_vocab`: embeddings may have more rows than in the files; new rows are the mean of the old ones.
    - `new`: names of parameters that may be missing in the files. Those of adapter layers always may.
    - `adapter`: a folder with PEFT's files to load into the adapter layers; by default these are initialized. It must
      have been trained on `source`.
    - `first`: a folder with the initial values of a PiSSA or OLoRA adapter; by default these are computed.
    - `seed`: new parameters depend only on it and their name.
    - `threads`: number of reader threads; by default the number of cores per rank, between 2 and 8.
    """
    whole = wrapped(model)
    if whole is None or whole.root is not model:
        raise WeightsError(
            f"fill() needs the outermost wrapped model, FSDPv2(module, mesh); got {type(model).__name__}. Build the "
            f"module under torch.device('meta'), wrap it, then call fill(); load_pretrained does all three"
        )
    started = time.perf_counter()
    opened: list[SafetensorsFiles] = []
    plans: list[LoadPlan] = []

    def prepare() -> str | None:
        files = source if isinstance(source, SafetensorsFiles) else open_source(source)
        opened.append(files)
        loaded, initial = (_adapter_values(model, folder, opened) for folder in (adapter, first))
        plan = match(model, whole.parameters, files, key_mapping, set(new), resize_vocab, loaded, initial)
        message = plan.problems.text(files.path, type(model).__name__)
        if message and (strict or plan.problems.misshaped or plan.problems.unconvertible):
            raise WeightsError(message)
        plans.append(plan)
        return fingerprint_of(files.path) if runtime.is_main() else None

    try:
        fingerprints = agree(prepare, "load", error=WeightsError)
        plan = plans[0]
        report = _load(model, plan, whole.buffer_dtype, transform, seed, threads, progress)
        checksums = shared_checksums(plan.source)
    finally:
        for files in opened:
            if files is not source:
                files.close()
    base = SourceFiles(
        os.path.abspath(plan.source.path), next(filter(None, fingerprints)), checksums, config_of(plan.source.path),
        left_out=plan.left_out,
    )  # fmt: skip
    if adapter is not None:

        def compare() -> None:  # one rank is enough: it may have to read another folder
            if runtime.is_main():
                check_base(adapter, base.path, identity=base.identity)

        agree(compare, "base of the adapter", error=WeightsError)
    names: dict[int, list[str]] = {}  # a module may have two names, such as the embedding with a prompt encoder
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    for p in plan.provided:
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


def _load(
    model: nn.Module,
    plan: LoadPlan,
    buffer_dtype: torch.dtype | None,
    transform: Transform | None,
    seed: int,
    threads: int | None,
    progress: bool,
) -> LoadReport:
    """Carry out a plan."""
    before = plan.source.bytes_read
    resized = [(p, grown_reader(reader, p.plan.shape[0])) for p, reader in plan.resizes]
    loaded = [*plan.reads, *resized, *plan.adapter_reads]
    rows, row_buffers = _token_readers(plan, loaded)
    plan.buffers += row_buffers

    def read() -> None:
        for p in plan.parameters:
            p.give_memory()
        _compute_buffers(model, plan)
        total = sum(p.local_numel * reader.dtype.itemsize for p, reader in [*plan.reads, *plan.parts])
        with Bar("loading", total, progress) as bar:

            def show() -> None:
                bar.at(plan.source.bytes_read - before)

            for together in _together([*loaded, *plan.parts, *rows]):
                _run(_jobs(together), threads, show)
                for p, _ in together:
                    p.written()
            _run(_buffer_jobs(plan.buffers), threads, show)
        init.initialize(model, plan.parameters, plan.initialize, seed)
        _cast_buffers(model, buffer_dtype)

    agree(read, "load", error=WeightsError)
    for module, readers, parameters in plan.self_loading:
        pieces = {name: piece_of(p) for name, p in parameters.items()}
        parts = run_on_all_ranks(functools.partial(module.read_files, readers, pieces), "load", error=WeightsError)
        module.finish_reading(parts, pieces)
    adapter_init.derive(model, plan.parameters, plan.derived, seed, progress)
    if transform is not None:
        agree(lambda: _transform(plan, transform), "transform", error=WeightsError)
    if plan.plain is not None and plan.conversions is not None:
        plan.plain._weight_conversions = plan.conversions
    self_loaded = [p for _, _, parameters in plan.self_loading for p in parameters.values()]
    computed = [p for one in plan.derived for p in one.parameters.values()]
    read_parameters = [p for p, _ in [*plan.reads, *plan.parts, *plan.adapter_reads, *rows]]
    return LoadReport(
        str(plan.source.path),
        read=[*_names(read_parameters), *(name for name, *_ in plan.buffers), *_names(self_loaded)],
        initialized=_names([*plan.initialize, *computed]),
        resized=_names([p for p, _ in plan.resizes]),
        skipped=plan.problems.unexpected,
        bytes=plan.source.bytes_read - before,
    )


def _names(parameters: Iterable[ShardedParameter]) -> list[str]:
    return [p.plan.name for p in parameters]


def _token_readers(plan: LoadPlan, loaded: ParameterReads) -> tuple[ParameterReads, BufferReads]:
    """Readers for trained token rows and for the buffers with their original values, from the tables they belong to."""
    tables = {id(p): (reader, dtype_of(p.plan.dtype)) for p, reader in loaded}

    def picked(table: ShardedParameter, indices: list[int]) -> TensorReader:
        reader, dtype = tables[id(table)]
        assert dtype is not None
        return PickedRows(reader, indices, dtype)

    rows: ParameterReads = [(p, picked(t, i)) for p, t, i in plan.token_rows]
    return rows, [(name, module, key, picked(t, i)) for name, module, key, t, i in plan.token_buffers]


def _compute_buffers(model: nn.Module, plan: LoadPlan) -> None:
    """Compute the buffers that are not in the files; raise `WeightsError` if a module does not."""
    unset = set(init.compute_buffers(model, plan.parameters)) - {name for name, *_ in plan.buffers}
    if unset:
        raise WeightsError(
            f"{len(unset)} buffer(s) are not in the files and their modules do not compute them: "
            f"{', '.join(sorted(unset)[:5])}"
        )


def _together(parameters: ParameterReads) -> Iterator[ParameterReads]:
    """The parameters in groups whose values may be in host memory together, where they go through it."""
    group: ParameterReads = []
    staged = 0
    for p, reader in parameters:
        staged += p.staged_bytes
        if group and staged > STAGED_BYTES:
            yield group
            group, staged = [], p.staged_bytes
        group.append((p, reader))
    yield group


def _jobs(parameters: ParameterReads) -> list[Job]:
    """The reads of the shards of this process."""
    parts = [(reader, cuts, memory) for p, reader in parameters for cuts, memory in p.parts()]
    return [job for reader, cuts, memory in parts for job in reader.jobs(memory, cuts)]


def _buffer_jobs(buffers: BufferReads) -> list[Job]:
    """The reads of all buffers."""
    jobs: list[Job] = []
    for _, module, key, reader in buffers:
        buffer = buffers_of(module)[key]
        assert buffer is not None
        jobs += reader.jobs(buffer, tuple(slice(0, n) for n in buffer.shape))
    return jobs


def _run(jobs: Sequence[Callable[[], None]], threads: int | None, show: Callable[[], None]) -> None:
    """Run the reads in several threads; the first error cancels the rest. `show` displays the progress."""
    count = threads or max(2, min(8, (os.cpu_count() or 2) // runtime.local_world_size()))
    with ThreadPoolExecutor(count, thread_name_prefix="fullshard-load") as pool:
        waiting = {pool.submit(job) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                show()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _transform(plan: LoadPlan, transform: Transform) -> None:
    with torch.no_grad():
        for p, _ in [*plan.reads, *plan.resizes]:
            pieces = pieces_of(p, keep=True)
            values = [transform(p.plan.name, piece.local, piece) for piece in pieces]
            for piece, value in zip(pieces, values, strict=True):
                if value is not None:
                    piece.local.copy_(value)
            p.written()
            if any(value is not None for value in values):
                plan.changed.append(p)


def _cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and dtype is not None and buffer.is_floating_point():
                buffers_of(module)[name] = buffer.to(dtype)
