"""Storage for `torch.distributed.checkpoint` (DCP): tensors in safetensors files, everything else in the manifest.

`CheckpointWriter` and `CheckpointReader` implement DCP's storage interface. The planners decide which pieces a rank
writes or reads; this module moves the bytes. Checksums are computed while writing. Reading loads only the rows that a
rank needs, directly into the target tensor where its memory layout allows it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint import publish
from fullshard.checkpoint.manifest import (
    BLOCK,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    find_missing_or_truncated,
    incomplete_tensors,
    piece_name,
    read_manifest,
)
from fullshard.checkpoint.shard_index import as_bytes, host_blocks
from fullshard.config.durable import sync
from fullshard.config.errors import CheckpointError
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.watchdog import watch
from fullshard.weights.safetensors_files import DTYPE_NAMES, DTYPES

ALIGNMENT = 64
"""Bytes: the tensor data of a file begins at a multiple of this."""


def _threads() -> int:
    """How many files a rank writes or reads at the same time."""
    return max(1, min(4, (os.cpu_count() or 1) // runtime.local_world_size()))


@dataclass(frozen=True)
class _Written:
    """The file and position of a written piece."""

    file: FileEntry
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint to a hidden directory; `publish_checkpoint` then writes the manifest and renames it."""

    def __init__(
        self, directory: Path, publish_checkpoint: Callable[[dict[str, TensorEntry], tuple[FileEntry, ...]], None]
    ):
        self.directory = directory
        self._publish = publish_checkpoint
        self._scratch = threading.local()

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the hidden directory, on the coordinating rank."""
        publish.stage("start")
        if is_coordinator:
            publish.make_directory(self.directory)
        publish.stage("directory")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces to files of its own."""
        self.directory.mkdir(exist_ok=True)  # where the file system is not shared; `finish` detects that
        bundles = [bundle for bundle in _bundles(plan.items, _threads()) if bundle]
        name = f"rank{runtime.rank():05d}-{{}}.safetensors"
        with ThreadPoolExecutor(max(1, len(bundles)), "fullshard-write") as pool:
            jobs = [pool.submit(self._write_file, name.format(i), bundle, planner) for i, bundle in enumerate(bundles)]
            results = [result for job in jobs for result in job.result()]
        sync(self.directory)
        publish.stage("files")
        watch.raise_failure()  # values computed after a rank was lost are not valid
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path = self.directory / name
        header: dict[str, Any] = {"__metadata__": {"format": "fullshard"}}
        end = 0
        for item in items:
            sizes, dtype = _sizes(item), DTYPE_NAMES[_dtype(item)]
            begin, end = end, end + math.prod(sizes) * _dtype(item).itemsize
            header[_key(item)] = {"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        digest, written = hashlib.sha256(), 0
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            blocks = [memoryview(len(text).to_bytes(8, "little") + text)]
            for item in [None, *items]:
                if item is not None:
                    blocks = host_blocks(planner.resolve_data(item), self._pinned, BLOCK)  # type: ignore[assignment]
                for block in blocks:
                    digest.update(block)
                    _write(handle, block, path)
                    written += len(block)
                if item is items[0]:
                    publish.stage("inside a file")
            os.fsync(handle)
        finally:
            os.close(handle)
        publish.stage("file")
        assert written == 8 + len(text) + end, f"{path}: {written} bytes written, {8 + len(text) + end} announced"
        file = FileEntry(name, written, digest.hexdigest())
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=0,
                storage_data=_Written(
                    file,
                    8 + len(text) + header[_key(item)]["data_offsets"][0],
                    tuple(item.index.offset or ()),
                    _sizes(item),
                ),
            )
            for item in items
        ]

    def _pinned(self) -> torch.Tensor:
        if not hasattr(self._scratch, "buffer"):
            self._scratch.buffer = accelerator.pinned((BLOCK,), torch.uint8)
        return self._scratch.buffer

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, once every rank has written: check that all files are visible here, then publish."""
        files: dict[str, FileEntry] = {}
        for rank, written in enumerate(results):
            own = {result.storage_data.file.name: result.storage_data.file for result in written}
            if wrong := find_missing_or_truncated(self.directory, own.values()):
                raise CheckpointError(
                    f"rank {runtime.rank()} does not see the files of rank {rank}: {'; '.join(wrong)}. The checkpoint "
                    f"directory must be on a file system that all nodes share"
                )
            files |= own
        order = {name: i for i, name in enumerate(sorted(files))}
        pieces: dict[str, list[PieceEntry]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for written in results for result in written):
            at: _Written = result.storage_data
            pieces[result.index.fqn].append(PieceEntry(order[at.file.name], at.begin, at.offsets, at.sizes))
        tensors = {
            name: TensorEntry(DTYPE_NAMES[stored.properties.dtype], tuple(stored.size), tuple(pieces[name]))
            for name, stored in metadata.state_dict_metadata.items()
        }
        if gaps := incomplete_tensors(tensors):
            raise CheckpointError(f"parts of {', '.join(gaps[:5])} were written by no rank, or by more than one")
        self._publish(tensors, tuple(files[name] for name in sorted(files)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """True: any path will do."""
        return True


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _sizes(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.sizes)


def _key(item: WriteItem) -> str:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return piece_name(item.index.fqn, item.tensor_data.size, chunk.offsets, chunk.sizes)


def _bundles(items: list[WriteItem], count: int) -> list[list[WriteItem]]:
    """Distribute the pieces over `count` files of similar size; in each, wider dtypes come first."""
    loads, bundles = [0] * count, [[] for _ in range(count)]  # type: ignore[var-annotated]
    for item in sorted(items, key=lambda i: -math.prod(_sizes(i)) * _dtype(i).itemsize):
        lightest = loads.index(min(loads))
        loads[lightest] += math.prod(_sizes(item)) * _dtype(item).itemsize
        bundles[lightest].append(item)
    return [sorted(bundle, key=lambda i: (-_dtype(i).itemsize, _key(i))) for bundle in bundles]


def _write(handle: int, block: memoryview, path: Path) -> None:
    """Write a whole block."""
    try:
        while len(block):
            block = block[os.write(handle, block) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# --- reading --------------------------------------------------------------------------------------------------------


class CheckpointReader(StorageReader):
    """Reads a published checkpoint; can be passed to `torch.distributed.checkpoint.load`."""

    def __init__(self, directory: str | Path, manifest: Manifest | None = None):
        self.directory = Path(directory)
        self.manifest = manifest or read_manifest(directory)
        self._scratch = threading.local()

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as DCP metadata."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[tensor.dtype]),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the manifest was read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's pieces into the memory that the planner names."""
        by_file: dict[int, list[tuple[ReadItem, PieceEntry]]] = {}
        for item in plan.items:
            piece = self._piece(item.storage_index)
            by_file.setdefault(piece.file, []).append((item, piece))
        with ThreadPoolExecutor(_threads(), "fullshard-read") as pool:
            jobs = [pool.submit(self._read_file, file, reads, planner) for file, reads in by_file.items()]
            for job in jobs:
                job.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, index: MetadataIndex) -> PieceEntry:
        pieces = self.manifest.tensors[index.fqn].pieces
        if index.index is not None and index.index < len(pieces):
            if tuple(pieces[index.index].offsets) == tuple(index.offset or ()):
                return pieces[index.index]
        return next(p for p in pieces if tuple(p.offsets) == tuple(index.offset or ()))

    def _read_file(self, file: int, reads: list[tuple[ReadItem, PieceEntry]], planner: LoadPlanner) -> None:
        path = self.directory / self.manifest.files[file].name
        handle = os.open(path, os.O_RDONLY)
        try:
            for item, piece in sorted(reads, key=lambda pair: pair[1].begin):
                target = planner.resolve_tensor(item)
                self._fill(handle, path, item, piece, target.detach())
                planner.commit_tensor(item, target)
        finally:
            os.close(handle)

    def _fill(self, handle: int, path: Path, item: ReadItem, piece: PieceEntry, target: torch.Tensor) -> None:
        """Copy a slice of a stored piece into `target`, which has the shape of the slice. Whole rows are read, in
        blocks."""
        dtype = DTYPES[self.manifest.tensors[item.storage_index.fqn].dtype]
        sizes, starts, lengths = piece.sizes or (1,), tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,)
        target = target.reshape(1) if target.dim() == 0 else target
        if target.numel() == 0:
            return
        row = math.prod(sizes[1:]) * dtype.itemsize
        begin = piece.begin + starts[0] * row
        whole_rows = lengths[1:] == tuple(sizes[1:])
        if whole_rows and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            _read(handle, as_bytes(target), begin, path)
            torch.autograd.graph.increment_version(target)  # copies gathered from it before are stale
            return
        at_once = max(1, BLOCK // row)
        for first in range(0, lengths[0], at_once):
            count = min(at_once, lengths[0] - first)
            block = self._buffer(count * row, target.device)
            _read(handle, as_bytes(block), begin + first * row, path)
            rows = block.view(dtype).view(count, *sizes[1:])
            for dim in range(1, len(sizes)):
                rows = rows.narrow(dim, starts[dim], lengths[dim])
            target[first : first + count].copy_(rows)

    def _buffer(self, size: int, device: torch.device) -> torch.Tensor:
        kept = getattr(self._scratch, "buffer", None)
        if kept is None or kept.numel() < size:
            kept = accelerator.staging(max(size, BLOCK), device)
            self._scratch.buffer = kept
        return kept[:size]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """True: any path will do."""
        return True


def _read(handle: int, into: memoryview, begin: int, path: Path) -> None:
    """Fill `into` from byte `begin` of a file."""
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], begin + done)
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {begin + done}, before the end that the manifest gives")
        done += count
