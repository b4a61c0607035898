"""One save and one restore, from the state to a published directory and back.

The order of things that every rank goes through is here: agree, describe, write, publish; and agree, check, prepare,
read, finish. When to save, and in which thread, is the manager's business (`manager.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fullshard import runtime
from fullshard.checkpoint import objects as all_states
from fullshard.checkpoint import publish
from fullshard.checkpoint.dcp_planner import ReadPlanner, WritePlanner
from fullshard.checkpoint.dcp_storage import CheckpointReader, CheckpointWriter
from fullshard.checkpoint.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    damaged,
    misplaced,
    missing_or_cut,
    read_manifest,
    unpublished_name,
)
from fullshard.checkpoint.model_state import describe_model, left_out, prepare_model
from fullshard.checkpoint.objects import Description, Loading
from fullshard.checkpoint.optimizer_state import describe_optimizer, prepare_optimizer
from fullshard.checkpoint.rng_state import NAME as RNG
from fullshard.checkpoint.rng_state import describe_rng, prepare_rng
from fullshard.checkpoint.shard_index import Held
from fullshard.errors import CheckpointError
from fullshard.ranks import agree, agree_locally, by_rank, connection_lost, describe_error
from fullshard.version import library_versions
from fullshard.watchdog import watch


@dataclass(frozen=True)
class Order:
    """A save that all ranks have agreed on."""

    place: Path
    step: int | None
    token: str

    @property
    def what(self) -> str:
        return f"save of checkpoint step {self.step}" if self.step is not None else f"save of {self.place}"

    @property
    def hidden(self) -> Path:
        return self.place.with_name(unpublished_name(self.place.name, self.token))


def begin(place: Path, step: int | None, state: Mapping[str, Any], save_frozen: bool) -> tuple[Order, Description]:
    """Agree on a save on all ranks and find out what each has to write. Nothing is copied or written."""
    what = f"save of checkpoint step {step}" if step is not None else f"save of {place}"

    def offer() -> tuple[Any, str, dict[str, set[str]]]:
        all_states.check_state(state)
        if runtime.is_main():
            publish.require_free(place)
        omitted = {name: left_out(model) for name, model in all_states.models_in(state).items() if not save_frozen}
        return (str(place), step, list(state)), publish.new_token(), omitted

    heard = agree(offer, what, error=CheckpointError, watched=True)
    asked = [offered for offered, _, _ in heard]
    if odd := [rank for rank, theirs in enumerate(asked) if theirs != asked[0]]:
        raise CheckpointError(
            f"ranks do not save the same: rank 0 saves {_in_words(asked[0])}, rank(s) {', '.join(map(str, odd))} "
            f"{_in_words(asked[odd[0]])}"
        )
    # A frozen parameter that changed on one rank only is written by all.
    omitted = {name: set.intersection(*(theirs[name] for _, _, theirs in heard)) for name in heard[0][2]}
    description = agree_locally(lambda: describe(state, omitted), what, error=CheckpointError, watched=True)
    return Order(place, step, heard[0][1]), description


def _in_words(asked: tuple[str, int | None, list[str]]) -> str:
    place, step, names = asked
    return f"{', '.join(names)} of step {step} to {place}"


def describe(state: Mapping[str, Any], omitted: Mapping[str, set[str]]) -> Description:
    """Everything in the state, as entries and pieces."""
    description = Description()
    names = all_states.parameter_names(state)
    for name, value in state.items():
        kind = all_states.kind_of(value)
        if kind == "model":
            describe_model(description, name, value, omitted.get(name, set()))
        elif kind == "optimizer":
            describe_optimizer(description, name, value, names)
        else:
            all_states.describe_value(description, name, value)
    describe_rng(description)
    return description


def write(order: Order, entries: dict[str, Any], pieces: list[Held], group: Any) -> None:
    """Write what was described and publish it. All ranks raise the same error, and then nothing is left behind."""
    planner = WritePlanner(pieces, entries)

    def conclude(tensors: dict[str, TensorEntry], files: tuple[FileEntry, ...]) -> None:
        publish.stage("manifest")
        manifest = Manifest(
            step=order.step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=library_versions(),
            world_size=runtime.world_size(),
            states=all_states.merged(planner.heard),
            tensors=tensors,
            per_rank=tuple(planner.per_rank),
            files=files,
        )
        publish.write_manifest(order.hidden, manifest)
        publish.stage("publish")
        watch.check()
        publish.publish(order.hidden, order.place)
        publish.stage("published")

    try:
        dcp.save({}, storage_writer=CheckpointWriter(order.hidden, conclude), planner=planner, process_group=group)
    except CheckpointException as error:
        if runtime.is_main():
            publish.discard(order.hidden)
        cause = next((found for rank, (found, _) in error.failures.items()), None)
        raise CheckpointError(f"{order.what} failed, and nothing was published: {_from_torch(error)}") from cause
    except RuntimeError as error:  # the connection to another rank is gone
        raise connection_lost(order.what, error) from error


def _from_torch(error: CheckpointException) -> str:
    """The message of torch.distributed.checkpoint's error, which names every rank that failed."""
    return by_rank({rank: describe_error(found) for rank, (found, _) in error.failures.items()}) or str(error)


# --- restoring ------------------------------------------------------------------------------------------------------


def check(directory: Path, verify: bool, what: str) -> Manifest:
    """Read the manifest and, if asked, every byte, each file on one rank; all ranks raise the same error."""
    manifest = agree_locally(lambda: read_manifest(directory), what, error=CheckpointError, watched=True)
    mine = range(runtime.rank(), len(manifest.files), runtime.world_size())

    def look() -> list[str]:
        files = [manifest.files[i] for i in mine]
        return (damaged if verify else missing_or_cut)(directory, files) or misplaced(directory, manifest, mine)

    found = agree(look, what, error=CheckpointError)
    wrong = [line for lines in found for line in lines]
    if wrong:
        raise CheckpointError(f"the checkpoint {directory} is damaged: " + "\n".join(wrong))
    return manifest


def load(
    directory: Path, manifest: Manifest, state: MutableMapping[str, Any], rng: bool, what: str, group: Any
) -> None:
    """Read a checked checkpoint into the state. Nothing in the state changes before every rank knows that it fits."""

    def prepare() -> Loading:
        loading = _prepare(manifest, state, rng)
        if loading.problems:
            problems = "\n  ".join([f"{directory} does not fit what it is loaded into:", *loading.problems])
            raise CheckpointError(problems)
        return loading

    loading = agree_locally(prepare, what, error=CheckpointError, watched=True)
    own = [name for name in manifest.per_rank if not name.startswith(f"{RNG}/")]
    if own and manifest.world_size != runtime.world_size():
        runtime.warn_once(
            f"per rank {own}",
            f"{len(own)} tensors differed from rank to rank on the {manifest.world_size} ranks they were saved on "
            f"({', '.join(own[:3])}); on {runtime.world_size()} ranks, those beyond get the first rank's",
        )
    if loading.casts:
        runtime.warn_once(
            f"cast {sorted(loading.casts)}",
            f"values are converted while they are read: {', '.join(sorted(loading.casts))}",
        )
    try:
        with torch.no_grad():
            dcp.load(
                {},
                storage_reader=CheckpointReader(directory, manifest),
                planner=ReadPlanner(loading.targets),
                process_group=group,
            )
    except CheckpointException as error:
        raise CheckpointError(
            f"{what} failed half-way, and the state is not usable now: {_from_torch(error)}"
        ) from error
    except RuntimeError as error:
        raise connection_lost(what, error) from error

    def finish() -> None:
        for job in loading.finish:
            job()

    agree_locally(finish, what, error=CheckpointError, watched=True)


def _prepare(manifest: Manifest, state: MutableMapping[str, Any], rng: bool) -> Loading:
    all_states.check_state(state)
    loading = Loading(manifest)
    names = all_states.parameter_names(state)
    mesh = next((m.mesh for m in all_states.models_in(state).values() if hasattr(m, "_fullshard_engine")), None)
    for name, value in state.items():
        entry = manifest.states.get(name)
        if entry is None:
            there = ", ".join(sorted(set(manifest.states) - {RNG}))
            loading.problems.append(f"it holds nothing called {name!r}; it holds {there}")
            continue
        kind = all_states.kind_of(value)
        if kind != entry["kind"]:
            loading.problems.append(f"{name!r} is a {entry['kind']} in the checkpoint and a {kind} here")
        elif kind == "model":
            prepare_model(loading, name, entry, value)
        elif kind == "optimizer":
            prepare_optimizer(loading, name, entry, value, names, mesh)
        else:
            all_states.prepare_value(loading, name, entry, state, mesh)
    if rng and RNG in manifest.states:
        prepare_rng(loading, manifest.states[RNG])
    return loading
