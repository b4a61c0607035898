"""One save and one restore: from a state to a published directory, and back.

Every rank goes through the same stages. Save: agree, describe, write, publish. Restore: agree, check, plan, read,
finish. `manager.py` decides when to save and in which thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.checkpoint import objects, publish
from fullshard.checkpoint.dcp_planner import ReadPlanner, WritePlanner
from fullshard.checkpoint.dcp_storage import CheckpointReader, CheckpointWriter
from fullshard.checkpoint.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    find_problems,
    read_manifest,
    unpublished_name,
)
from fullshard.checkpoint.model_state import describe_model, prepare_model, provided_by_base
from fullshard.checkpoint.objects import RestorePlan, StateDescription
from fullshard.checkpoint.optimizer_state import describe_optimizer, prepare_optimizer
from fullshard.checkpoint.rng_state import NAME as RNG
from fullshard.checkpoint.rng_state import describe_rng, prepare_rng
from fullshard.checkpoint.shard_index import TensorShard, TensorToLoad, as_bytes, part_to_write, read_groups
from fullshard.config.errors import CheckpointError
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree, by_rank, connection_lost, describe_error, run_on_all_ranks
from fullshard.distributed.watchdog import watch
from fullshard.version import library_versions
from fullshard.weights.wrapped import wrapped

ALIGNMENT = 64


class HostBuffer:
    """Host memory that grows to the largest size needed and is reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Iterable[TensorShard]) -> list[TensorShard]:
        """Copies of the shards; returns once the originals may change."""
        to_write = [part for piece in pieces if (part := part_to_write(piece)) is not None]
        parts = [part for part in to_write if not part.own]
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-part.local.numel() * part.local.element_size() // ALIGNMENT) * ALIGNMENT
        self._reserve(end)
        copies = [_whole(part, part.local) for part in to_write if part.own]
        for part, start in zip(parts, starts, strict=True):
            size = part.local.numel() * part.local.element_size()
            copy = self._memory[start : start + size].view(part.local.dtype).view(part.local.shape)
            if not accelerator.is_accelerator(part.local.device) and part.local.is_contiguous():
                # numpy uses memcpy, which bypasses the cache for large blocks: twice as fast as torch's copy.
                np.copyto(np.asarray(as_bytes(copy)), np.asarray(as_bytes(part.local)))
            else:
                copy.copy_(part.local, non_blocking=True)
            copies.append(_whole(part, copy))
        for device in {part.local.device for part in parts}:
            accelerator.synchronize(device)
        return copies

    def _reserve(self, size: int) -> None:
        if self._memory.numel() < size:
            self.release()
            self._memory = accelerator.host_memory((size,), torch.uint8)

    def release(self) -> None:
        """Free the buffer's memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)


def _whole(part: TensorShard, copy: torch.Tensor) -> TensorShard:
    """A part whose values are in `copy`; `part_to_write` must not split it again."""
    return replace(part, local=copy, copies=min(part.copies, 1), copy=0)


@dataclass(frozen=True)
class AgreedSave:
    """A save that all ranks have agreed on."""

    place: Path
    step: int | None
    token: str

    @property
    def what(self) -> str:
        """What is saved, for messages."""
        return f"save of checkpoint step {self.step}" if self.step is not None else f"save of {self.place}"

    @property
    def hidden(self) -> Path:
        """The directory that is written before the checkpoint is published."""
        return self.place.with_name(unpublished_name(self.place.name, self.token))


def begin(
    place: Path, step: int | None, state: Mapping[str, Any], save_frozen: bool
) -> tuple[AgreedSave, StateDescription]:
    """Agree on a save on all ranks and describe what each rank will write. Nothing is copied or written yet."""
    what = f"save of checkpoint step {step}" if step is not None else f"save of {place}"

    def offer() -> tuple[Any, str, dict[str, set[str]]]:
        objects.check_state(state)
        if runtime.is_main():
            publish.require_free(place)
        omitted = {name: provided_by_base(model) for name, model in objects.models_in(state).items() if not save_frozen}
        return (str(place), step, list(state)), publish.new_token(), omitted

    requests = agree(offer, what, error=CheckpointError, watched=True)
    all_requests = [request for request, _, _ in requests]
    if odd := [rank for rank, theirs in enumerate(all_requests) if theirs != all_requests[0]]:
        raise CheckpointError(
            f"ranks save different states: rank 0 saves {_describe_request(all_requests[0])}, "
            f"rank(s) {', '.join(map(str, odd))} {_describe_request(all_requests[odd[0]])}"
        )
    # A frozen parameter that changed on one rank only is written by all ranks.
    omitted = {name: set.intersection(*(theirs[name] for _, _, theirs in requests)) for name in requests[0][2]}
    description = run_on_all_ranks(lambda: describe(state, omitted), what, error=CheckpointError, watched=True)
    return AgreedSave(place, step, requests[0][1]), description


def _describe_request(request: tuple[str, int | None, list[str]]) -> str:
    place, step, names = request
    return f"{', '.join(names)} of step {step} to {place}"


def describe(state: Mapping[str, Any], omitted: Mapping[str, set[str]]) -> StateDescription:
    """Split the state into JSON entries and tensor shards."""
    runtime.flush()  # on XLA: what was recorded so far is part of the state
    description = StateDescription()
    names = objects.parameter_names(state)
    for name, value in state.items():
        kind = objects.kind_of(value)
        if kind == "model":
            describe_model(description, name, value, omitted.get(name, set()))
        elif kind == "optimizer":
            describe_optimizer(description, name, value, names)
        else:
            objects.describe_value(description, name, value)
    describe_rng(description)
    return description


def write(save_job: AgreedSave, entries: dict[str, Any], pieces: list[TensorShard], group: Any) -> None:
    """Write and publish a described state. On failure all ranks raise the same error and nothing is left on disk."""
    planner = WritePlanner(pieces, entries)

    def publish_checkpoint(tensors: dict[str, TensorEntry], files: tuple[FileEntry, ...]) -> None:
        publish.stage("manifest")
        manifest = Manifest(
            step=save_job.step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=library_versions(),
            world_size=runtime.world_size(),
            states=objects.merge_entries(planner.all_entries),
            tensors=tensors,
            per_rank=tuple(planner.per_rank),
            files=files,
        )
        publish.write_manifest(save_job.hidden, manifest)
        publish.stage("publish")
        watch.raise_failure()
        publish.publish(save_job.hidden, save_job.place)
        publish.stage("published")

    try:
        dcp.save(
            {},
            storage_writer=CheckpointWriter(save_job.hidden, publish_checkpoint),
            planner=planner,
            process_group=group,
        )
    except CheckpointException as error:
        if runtime.is_main():
            publish.discard(save_job.hidden)
        cause = next((failure for rank, (failure, _) in error.failures.items()), None)
        raise CheckpointError(f"{save_job.what} failed, and nothing was published: {_from_torch(error)}") from cause
    except RuntimeError as error:  # the connection to another rank was lost
        raise connection_lost(save_job.what, error) from error


def _from_torch(error: CheckpointException) -> str:
    """The message of torch.distributed.checkpoint's error, with every rank that failed."""
    return by_rank({rank: describe_error(failure) for rank, (failure, _) in error.failures.items()}) or str(error)


# --- restoring ------------------------------------------------------------------------------------------------------


def check_checkpoint(directory: Path, verify: bool, what: str) -> Manifest:
    """Check a checkpoint: its manifest and, with `verify`, the checksum of every file. The ranks share the files; all
    ranks raise the same error."""
    manifest = run_on_all_ranks(lambda: read_manifest(directory), what, error=CheckpointError, watched=True)
    mine = range(runtime.rank(), len(manifest.files), runtime.world_size())

    problems = agree(lambda: find_problems(directory, manifest, verify, mine), what, error=CheckpointError)
    wrong = [line for lines in problems for line in lines]
    if wrong:
        raise CheckpointError(f"the checkpoint {directory} is damaged: " + "\n".join(wrong))
    return manifest


CheckValues = Callable[[dict[str, Any]], None]
"""Raises if plain values of a checkpoint, by name, are not what its reader can use."""


def load(
    directory: Path, manifest: Manifest, state: MutableMapping[str, Any], rng: bool, what: str, group: Any,
    check_values: CheckValues | None = None,
) -> None:  # fmt: skip
    """Read a checked checkpoint into the state. Nothing in the state changes until all ranks know that it fits."""

    def prepare() -> RestorePlan:
        plan = _prepare(manifest, state, rng)
        if plan.problems:
            problems = "\n  ".join([f"{directory} does not match the state it is loaded into:", *plan.problems])
            raise CheckpointError(problems)
        return plan

    plan = run_on_all_ranks(prepare, what, error=CheckpointError, watched=True)
    own = [name for name in manifest.per_rank if not name.startswith(f"{RNG}/")]
    if own and manifest.world_size != runtime.world_size():
        runtime.warn_once(
            f"per rank {own}",
            f"{len(own)} tensors had different values on each of the {manifest.world_size} ranks they were saved on "
            f"({', '.join(own[:3])}); on {runtime.world_size()} ranks, additional ranks get the values of rank 0",
        )
    if plan.casts:
        runtime.warn_once(
            f"cast {sorted(plan.casts)}",
            f"values are cast while they are read: {', '.join(sorted(plan.casts))}",
        )

    def read(tensors: list[TensorToLoad], failed: str) -> None:
        reader = CheckpointReader(directory, manifest)
        try:
            with torch.no_grad():
                for part in read_groups(tensors):
                    dcp.load({}, storage_reader=reader, planner=ReadPlanner(part), process_group=group)
                    for tensor in part:
                        tensor.finish()
        except CheckpointException as error:
            raise CheckpointError(f"{what} {failed}: {_from_torch(error)}") from error
        except RuntimeError as error:
            raise connection_lost(what, error) from error

    def try_objects() -> None:
        values = {name: value() for name, value in plan.values.items()}
        if check_values is not None:
            check_values(values)
        for trial in plan.trials:
            trial()

    read(plan.new, "failed; the state is unchanged")
    try:
        run_on_all_ranks(try_objects, what, error=CheckpointError, watched=True)
    except CheckpointError:
        for undo in plan.undo:
            with contextlib.suppress(Exception):  # the error that led here counts
                undo()
        raise
    read(plan.tensors, "failed midway, and the state is not usable now")

    def finish() -> None:
        for job in plan.finish:
            job()

    run_on_all_ranks(finish, what, error=CheckpointError, watched=True)


def _prepare(manifest: Manifest, state: MutableMapping[str, Any], rng: bool) -> RestorePlan:
    objects.check_state(state)
    plan = RestorePlan(manifest)
    names = objects.parameter_names(state)
    mesh = next((m.mesh for m in objects.models_in(state).values() if wrapped(m) is not None), None)
    for name, value in state.items():
        entry = manifest.states.get(name)
        if entry is None:
            there = ", ".join(sorted(set(manifest.states) - {RNG}))
            plan.problems.append(f"it holds nothing called {name!r}; it holds {there}")
            continue
        kind = objects.kind_of(value)
        if kind != entry["kind"]:
            plan.problems.append(f"{name!r} is a {entry['kind']} in the checkpoint and a {kind} here")
        elif kind == "model":
            prepare_model(plan, name, entry, value)
        elif kind == "optimizer":
            prepare_optimizer(plan, name, entry, value, names, mesh)
        else:
            objects.prepare_value(plan, name, entry, state, mesh)
    if rng and RNG in manifest.states:
        prepare_rng(plan, manifest.states[RNG])
    return plan
