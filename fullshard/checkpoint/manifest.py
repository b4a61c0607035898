"""The manifest of a checkpoint: its contents, its files, and their checksums.

A checkpoint is a directory of safetensors files and one `manifest.json`. This module defines the manifest's format and
the directory names, and reads and checks both. It needs neither torch nor other ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint import manifest_schema
from fullshard.config.errors import CheckpointError

FORMAT = "fullshard checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BLOCK = 16 * 2**20
"""Bytes read or written at once."""
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
"""safetensors' dtype names, and the bytes of one element."""

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")
_UNPUBLISHED = re.compile(r"\.step-(0|[1-9]\d*)\.[0-9a-f]{8}\.tmp")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PieceEntry:
    """One stored piece of a tensor: its position in a file, and in the tensor."""

    file: int
    begin: int
    """Bytes from the start of the file."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its global dtype and shape, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]

    @property
    def bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass
class Manifest:
    """The contents of `manifest.json`."""

    step: int | None
    created: str
    versions: dict[str, str]
    world_size: int
    states: dict[str, dict[str, Any]]
    """For each name in the saved state: its kind, and everything about it that is not a tensor."""
    tensors: dict[str, TensorEntry]
    per_rank: tuple[str, ...]
    """Tensors whose values differed between ranks; each is stored once per rank, as `NAME@rank-N`."""
    files: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        """The size of the checkpoint's files in bytes."""
        return sum(file.bytes for file in self.files)

    def dumps(self) -> str:
        """The manifest as JSON text that ends with its own digest."""
        body = {"format": FORMAT, "format_version": VERSION, **asdict(self)}
        body["tensors"] = {
            name: [t.dtype, t.shape, [[p.file, p.begin, p.offsets, p.sizes] for p in t.pieces]]
            for name, t in self.tensors.items()
        }
        text = json.dumps(body, allow_nan=False)
        return f'{text[:-1]}, "digest": "{_digest(text)}"}}\n'

    def rank_name(self, name: str, rank: int) -> str:
        """The stored name of a rank's tensor. Ranks beyond the saved world size use rank 0's."""
        return f"{name}@rank-{rank if rank < self.world_size else 0}" if name in self.per_rank else name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- reading --------------------------------------------------------------------------------------------------------


def read_manifest(directory: str | Path) -> Manifest:
    """Read the manifest of a published checkpoint and check everything that does not need the other files."""
    path = Path(directory) / MANIFEST
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointError(_no_checkpoint(Path(directory))) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is damaged: it is not text") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    match = re.fullmatch(r'(.*), "digest": "([0-9a-f]{64})"\}\n', text, re.DOTALL)
    if match is None:
        raise CheckpointError(f"{path} is damaged: it does not end with a digest ({len(text)} characters)")
    body, expected = match[1] + "}", match[2]
    if _digest(body) != expected:
        raise CheckpointError(f"{path} is damaged: its digest is {_digest(body)}, expected {expected}")
    try:
        data = json.loads(body)
        if data["format"] != FORMAT:
            raise CheckpointError(f"{path} is not a manifest of a {FORMAT}")
        version = data["format_version"]
        if version != VERSION:
            raise CheckpointError(
                f"{path} has format version {version}; this fullshard reads version {VERSION}. Read it with the "
                f"version that wrote it ({data.get('versions', {}).get('fullshard', 'unknown')}) or a newer one"
            )
        manifest_schema.MANIFEST(data, "it")
        del data["format"], data["format_version"]
        data["files"] = tuple(FileEntry(**file) for file in data["files"])
        data["tensors"] = {name: _tensor(entry) for name, entry in data["tensors"].items()}
        data["per_rank"] = tuple(data["per_rank"])
        manifest = Manifest(**data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest of this format: {type(error).__name__}: {error}") from error
    _check_consistency(manifest, path)
    return manifest


def _tensor(entry: list[Any]) -> TensorEntry:
    dtype, shape, pieces = entry
    return TensorEntry(dtype, tuple(shape), tuple(PieceEntry(f, b, tuple(o), tuple(s)) for f, b, o, s in pieces))


def _check_consistency(manifest: Manifest, path: Path) -> None:
    """Check that every piece is inside its file and its tensor, and that the pieces cover the whole tensor."""
    named = _STEP.fullmatch(path.parent.name)
    if named and manifest.step is not None and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{path} is of step {manifest.step}, but its directory is {path.parent.name}: files were mixed up"
        )
    for file in manifest.files:
        if not file.name or Path(file.name).name != file.name:
            raise CheckpointError(f"{path} names a file outside its directory: {file.name!r}")
    for name, state in manifest.states.items():
        if len(state.get("ranks", ())) not in (0, manifest.world_size):
            raise CheckpointError(
                f"{path}: {name} has {len(state['ranks'])} values, but was saved on {manifest.world_size} ranks"
            )
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {tensor.dtype!r}")
        for piece in tensor.pieces:
            end = piece.begin + math.prod(piece.sizes) * ITEM_BYTES[tensor.dtype]
            inside = len(piece.offsets) == len(piece.sizes) == len(tensor.shape) and all(
                0 <= o <= o + s <= n for o, s, n in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
            )
            if not inside or not 0 <= piece.file < len(manifest.files) or end > manifest.files[piece.file].bytes:
                raise CheckpointError(f"{path}: a piece of tensor {name} is outside the tensor or its file: {piece}")
    if gaps := incomplete_tensors(manifest.tensors):
        raise CheckpointError(f"{path}: these tensors are incomplete: {', '.join(gaps[:5])}")
    if twice := [name for name, tensor in manifest.tensors.items() if _overlap(tensor.pieces)]:
        raise CheckpointError(f"{path}: pieces of these tensors overlap: {', '.join(twice[:5])}")


def _overlap(pieces: Sequence[PieceEntry]) -> bool:
    """Whether two pieces of a tensor have an element in common."""
    open_pieces: list[PieceEntry] = []  # those that reach past the rows of the next one
    for piece in sorted((p for p in pieces if math.prod(p.sizes)), key=lambda p: p.offsets):
        if piece.offsets:
            open_pieces = [p for p in open_pieces if p.offsets[0] + p.sizes[0] > piece.offsets[0]]
        ends = [[range(o, o + s) for o, s in zip(p.offsets, p.sizes, strict=True)] for p in (piece, *open_pieces)]
        for other in ends[1:]:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(ends[0], other, strict=True)):
                return True
        open_pieces.append(piece)
    return False


def incomplete_tensors(tensors: dict[str, TensorEntry]) -> list[str]:
    """The tensors whose pieces do not add up to the whole tensor."""
    return [
        name for name, t in tensors.items() if sum(math.prod(p.sizes) for p in t.pieces) != math.prod(t.shape)
    ]  # fmt: skip


# --- files ----------------------------------------------------------------------------------------------------------


def find_missing_or_truncated(directory: Path, files: Iterable[FileEntry]) -> list[str]:
    """The files that are missing or of the wrong size, one message each."""
    wrong = []
    for file in files:
        try:
            size = os.stat(directory / file.name).st_size
        except FileNotFoundError:
            wrong.append(f"{directory / file.name} is missing")
            continue
        except OSError as error:
            wrong.append(f"{directory / file.name} cannot be read: {error.strerror}")
            continue
        if size != file.bytes:
            wrong.append(f"{directory / file.name} has {size} bytes instead of {file.bytes}")
    return wrong


def find_damage(directory: Path, files: Iterable[FileEntry]) -> list[str]:
    """The files that are missing, of the wrong size, or whose checksum differs, one message each."""
    files = list(files)
    wrong = find_missing_or_truncated(directory, files)
    for file in files if not wrong else ():
        path, digest, buffer = directory / file.name, hashlib.sha256(), bytearray(BLOCK)
        try:
            with open(path, "rb", buffering=0) as stream:
                while count := stream.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])
        except OSError as error:
            wrong.append(f"{path} cannot be read: {error.strerror}")
            continue
        if digest.hexdigest() != file.sha256:
            wrong.append(f"{path} is damaged: its sha256 is {digest.hexdigest()}, expected {file.sha256}")
    return wrong


def piece_name(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of a piece in its safetensors file: the tensor's name, and the slice unless it is the whole tensor."""
    if tuple(sizes) == tuple(shape):
        return name
    return f"{name}[{','.join(f'{o}:{o + s}' for o, s in zip(offsets, sizes, strict=True))}]"


def find_header_mismatches(directory: Path, manifest: Manifest, files: Iterable[int]) -> list[str]:
    """The files whose safetensors header disagrees with the manifest, one message each."""
    listed: dict[int, dict[str, Any]] = {i: {} for i in files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            if piece.file in listed:
                key = piece_name(name, tensor.shape, piece.offsets, piece.sizes)
                listed[piece.file][key] = (tensor.dtype, piece.begin, list(piece.sizes))
    wrong = []
    for i, expected in listed.items():
        path = directory / manifest.files[i].name
        try:
            with open(path, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, manifest.files[i].bytes)))
            header.pop("__metadata__", None)
            actual = {
                key: (entry["dtype"], 8 + length + entry["data_offsets"][0], entry["shape"])
                for key, entry in header.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            wrong.append(f"{path} has no readable header: {type(error).__name__}")
            continue
        odd = sorted(key for key in {*actual, *expected} if actual.get(key) != expected.get(key))
        if odd:
            wrong.append(
                f"{path} and the manifest disagree about {odd[0]}: {actual.get(odd[0])} and {expected.get(odd[0])}"
            )
    return wrong


def find_problems(directory: Path, manifest: Manifest, verify: bool, files: Sequence[int] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint (with `files`, with those only), one message each. `verify` compares
    checksums; without it only sizes and headers are checked."""
    chosen = range(len(manifest.files)) if files is None else files
    entries = [manifest.files[i] for i in chosen]
    problems = find_damage(directory, entries) if verify else find_missing_or_truncated(directory, entries)
    return problems or find_header_mismatches(directory, manifest, chosen)


def check_files(directory: Path, manifest: Manifest, verify: bool) -> None:
    """Raise if anything is wrong with the files of a checkpoint."""
    if problems := find_problems(directory, manifest, verify):
        raise CheckpointError(f"the checkpoint {directory} is damaged: " + "\n".join(problems))


# --- directories ----------------------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    """The directory name of a step's checkpoint."""
    return f"step-{step}"


def published_steps(path: str | Path) -> list[int]:
    """The published steps under `path`, in ascending order."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {error.strerror}") from error
    matches = (_STEP.fullmatch(name) for name in names)
    return sorted(int(m[1]) for m in matches if m and (Path(path) / m[0] / MANIFEST).is_file())


def unpublished_dirs(path: str | Path) -> list[str]:
    """Directories of step saves that were never published. Other hidden directories (of `save_state` and
    `merge_weights`) are not listed: they may still be in use."""
    try:
        return sorted(name for name in os.listdir(path) if _UNPUBLISHED.fullmatch(name))
    except OSError:
        return []


def unpublished_name(name: str, token: str) -> str:
    """The name of the hidden directory in which a checkpoint is written before it is published as `name`."""
    return f".{name}.{token}.tmp"


def _no_checkpoint(directory: Path) -> str:
    """The error for a directory that is not a checkpoint, with the checkpoints near it."""
    if not directory.exists():
        near = checkpoints_nearby(directory.parent)
        return f"{directory} does not exist" + (f"; checkpoints near it: {_list(near)}" if near else "")
    near = checkpoints_nearby(directory)
    if _HIDDEN.fullmatch(directory.name):
        why = "is an unfinished save, and cannot be loaded"
    elif any((directory / name).exists() for name in ("pytorch_model_fsdp_0", "optimizer_0", ".metadata")):
        why = (
            "was written by another tool (Accelerate, or torch.distributed.checkpoint with pickled metadata), "
            "which fullshard does not read; merge it with the tool that wrote it"
        )
    elif any(directory.glob("*.safetensors")):
        why = f"holds model weights, not a training checkpoint (it has no {MANIFEST})"
    else:
        why = f"is not a checkpoint (it has no {MANIFEST})"
    return f"{directory} {why}" + (f"; checkpoints near it: {_list(near)}" if near else "")


def checkpoints_nearby(directory: Path) -> list[Path]:
    """Checkpoints in a directory, in its subdirectories, and next to it; newest steps first."""
    around = [
        directory,
        directory.parent,
        *([d for d in directory.iterdir() if d.is_dir()] if directory.is_dir() else []),
    ]
    places: list[Path] = []
    for place in around:
        if (place / MANIFEST).is_file() and place != directory:
            places.append(place)
        places += [place / step_name(s) for s in reversed(published_steps(place)) if place.is_dir()]
    return list(dict.fromkeys(places))


def _list(paths: list[Path]) -> str:
    shown = ", ".join(str(p) for p in paths[:5])
    return shown + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
