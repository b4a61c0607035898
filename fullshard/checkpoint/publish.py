"""Checkpoint directories on disk: probing before training, atomic publishing, safe removal.

A checkpoint is written to a hidden directory next to its final path. Once every file is on disk and rank 0 sees all of
them, one rename publishes it. Published checkpoints are never modified.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from fullshard.checkpoint import manifest as manifests
from fullshard.config.durable import sync
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree

stage: Callable[[str], None] = lambda name: None  # noqa: E731
"""Called with the name of each stage of a save. Does nothing; tests replace it to kill the process at a stage."""


def new_token() -> str:
    """A random identifier for one save or one probe."""
    return secrets.token_hex(4)


def probe(path: Path) -> None:
    """Check that every rank can write to the directory and that all ranks see the same one."""
    what = f"start of checkpoints in {path}"
    token = agree(new_token, what, error=CheckpointError, watched=True)[0]

    def write() -> None:
        make_directory(path)
        mark = path / f".probe-{token}-{runtime.rank()}"
        try:
            with open(mark, "xb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)
            raise

    def see() -> None:
        unseen = [r for r in range(runtime.world_size()) if not (path / f".probe-{token}-{r}").exists()]
        if unseen:
            raise CheckpointError(
                f"the checkpoint directory {path} is not the same directory on every rank: rank {runtime.rank()} "
                f"does not see what rank(s) {', '.join(map(str, unseen))} wrote there. Choose one that all nodes share"
            )

    try:
        agree(write, what, error=CheckpointError)
        agree(see, what, error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoints cannot be kept in {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            (path / f".probe-{token}-{runtime.rank()}").unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and fsync their entries."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def write_manifest(directory: Path, manifest: manifests.Manifest) -> None:
    """Write the manifest of a checkpoint and flush it to the disk."""
    with open(directory / manifests.MANIFEST, "x", encoding="utf-8") as file:
        file.write(manifest.dumps())
        file.flush()
        os.fsync(file.fileno())
    sync(directory)


def publish(hidden: Path, place: Path) -> None:
    """Rename a finished checkpoint to its final path. Atomic; refused if anything is there already."""
    try:
        os.rename(hidden, place)  # replaces an empty directory, and nothing else
    except OSError as error:
        if place.exists():
            raise CheckpointError(f"{place} exists already; checkpoints are never overwritten") from error
        raise
    sync(place.parent)


def require_free(place: Path) -> None:
    """Raise if the path already holds anything."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(
            f"{place} exists already, and checkpoints are never overwritten; save to another path, or remove it first"
        )


def discard(directory: Path) -> None:
    """Remove an unpublished directory."""
    shutil.rmtree(directory, ignore_errors=True)


def retire(directory: Path) -> None:
    """Remove a published checkpoint: rename it to a hidden name first, then delete its files."""
    hidden = directory.with_name(manifests.unpublished_name(directory.name, new_token()))
    try:
        os.rename(directory, hidden)
        sync(directory.parent)
    except OSError as error:
        runtime.get_logger().warning("the old checkpoint %s could not be removed: %s", directory, error.strerror)
        return
    stage("removing")
    discard(hidden)
