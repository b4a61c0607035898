"""`CheckpointManager`: saves training checkpoints, removes old ones, resumes, and stops on preemption.

The manager keeps the checkpoints of a run in one directory, as `step-N`. `save_state` and `load_state` write and read a
single directory of any name. `save_restore.py` performs one save or one restore.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fullshard.checkpoint import publish, save_restore
from fullshard.checkpoint.manifest import (
    Manifest,
    find_damage,
    published_steps,
    read_manifest,
    step_name,
    unpublished,
)
from fullshard.checkpoint.objects import check_state
from fullshard.checkpoint.preemption import EXIT_PREEMPTED, SIGNALS, SignalListener
from fullshard.checkpoint.save_restore import HostBuffer
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import BorrowedGroup, agree, any_of, exchange, host_group, run_on_all_ranks

PREEMPTED, FAILED = 1, 2


class CheckpointManager:
    """The checkpoints of one run. Every rank creates a manager and calls the same methods in the same order."""

    def __init__(
        self,
        path: str | Path,
        save_interval: int,
        max_to_keep: int | None = None,
        *,
        save_frozen: bool = False,
        keep_every: int | None = None,
        protect: Callable[[int], bool] | None = None,
        signals: Sequence[int] = SIGNALS,
        verify: bool = True,
    ):
        """
        - `save_interval`: `should_save` is true at every multiple of it.
        - `max_to_keep`: remove the oldest checkpoints beyond this number once a newer one is published; None keeps all.
        - `keep_every`: never remove multiples of this step. `protect(step)` can protect others, such as the best one so
          far; it is called on rank 0, in the thread that calls `save` or `save_async`, at the time of the call.
        - `save_frozen`: also write frozen parameters that the base model's files provide.
        - `signals`: the signals to handle, from `listen()` or the first `reached_preemption` on.
        - `verify`: compare every file's checksum before a restore.
        """
        for name, value, least in (("save_interval", save_interval, 1), ("max_to_keep", max_to_keep, 1),
                                   ("keep_every", keep_every, 1)):  # fmt: skip
            if value is None and name != "save_interval":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(f"{name}={value!r}: expected a whole number of {least} or more")
        self.path = Path(path).absolute()
        self.save_interval, self.max_to_keep, self.keep_every = save_interval, max_to_keep, keep_every
        self.save_frozen, self.verify = save_frozen, verify
        self._protect = protect or (lambda step: False)
        self._signals = SignalListener(signals)
        self._stop_requested = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._buffer = HostBuffer()
        runtime.use_spmd()
        publish.probe(self.path)
        self._background = BorrowedGroup()  # asynchronous saves use a process group that training does not use
        listing = exchange((published_steps(self.path), unpublished(self.path)), "start of checkpoints")[0]
        self._known, self._stale = set(listing[0]), listing[1]

    # --- saving -----------------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save at `step`: true at multiples of `save_interval` that have not been saved yet."""
        if step % self.save_interval or step in self._known:
            return False
        self.join()  # reports a failed save on every rank at the same step
        return True

    def save(self, step: int, state: Mapping[str, Any], force: bool = False) -> bool:
        """Save and return once published; without `force`, only if `should_save(step)`. Returns whether it saved."""
        if not (force or self.should_save(step)):
            return False
        self.join()
        save_job, description = self._begin(step, state)
        expired = self._expired(step)
        save_restore.write(save_job, description.entries, description.pieces, self._background.group)
        self._published(step, expired)
        return True

    def save_async(self, step: int, state: Mapping[str, Any], force: bool = False) -> bool:
        """Copy the state to host memory and return; a background thread writes and publishes it.

        Waits first for a save that is still running. If this save fails, a later call raises the error.
        """
        if not (force or self.should_save(step)):
            return False
        self.join()
        save_job, description = self._begin(step, state)
        # If memory runs out here on one rank, all ranks must raise.
        copy = functools.partial(self._buffer.copy, description.pieces)
        pieces = run_on_all_ranks(copy, save_job.what, error=CheckpointError, watched=True)
        expired = self._expired(step)  # asked now, not when the background save ends

        def work() -> None:
            try:
                save_restore.write(save_job, description.entries, pieces, self._background.group)
                self._published(step, expired)
            except BaseException as error:
                self._failure = error

        # Not a daemon thread: a program that ends right after its last save still publishes it.
        self._thread = threading.Thread(target=work, name="fullshard-save", daemon=False)
        self._thread.start()
        return True

    def _begin(self, step: int, state: Mapping[str, Any]) -> tuple[save_restore.AgreedSave, Any]:
        self._require_open()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"step={step!r}: expected a whole number of 0 or more")
        return save_restore.begin(self.path / step_name(step), step, state, self.save_frozen)

    def _expired(self, step: int) -> list[int]:
        """The steps whose checkpoints are removed once `step` is published, as rank 0 decides."""
        if self.max_to_keep is None:
            return []
        steps = sorted(self._known | {step})
        kept = {step, *steps[-self.max_to_keep :]}
        return exchange([s for s in steps if s not in kept and not self._is_protected(s)], "old checkpoints")[0]

    def _published(self, step: int, expired: list[int]) -> None:
        """Record a published checkpoint and remove the expired ones."""
        self._known.add(step)
        self._remove(expired)
        if runtime.is_main():
            for name in self._stale:  # unfinished saves of an earlier run
                publish.discard(self.path / name)
        self._stale = []

    def _remove(self, steps: list[int]) -> None:
        self._known -= set(steps)
        for step in steps if runtime.is_main() else ():
            publish.retire(self.path / step_name(step))

    def prune(self) -> None:
        """Remove checkpoints beyond `max_to_keep` now: those that were still protected at the last save."""
        self.join()
        if self._known:
            self._remove(self._expired(max(self._known)))

    def _is_protected(self, step: int) -> bool:
        return (self.keep_every is not None and step % self.keep_every == 0) or self._protect(step)

    def join(self) -> None:
        """Wait for the background save; raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(f"a save in the background failed: {failure}") from failure

    # --- restoring --------------------------------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """All published steps, oldest first."""
        return published_steps(self.path)

    def latest(self) -> int | None:
        """The newest published step; None if there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def read_manifest(self, step: int | None = None) -> Manifest:
        """The manifest of a checkpoint: of `step`, or of the newest one."""
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.path}")
        return read_manifest(self.path / step_name(step))

    def restore(
        self,
        step: int | None,
        state: MutableMapping[str, Any],
        *,
        fallback: bool = False,
        rng: bool = True,
        check_values: save_restore.CheckValues | None = None,
    ) -> int:
        """Load a checkpoint (the newest if `step` is None) into the objects in `state` and return its step.

        Plain values are assigned to `state`. Entries of the checkpoint that `state` does not name are ignored. With
        `fallback`, a damaged checkpoint is skipped in favor of the newest older one that is intact. `check_values` may
        refuse plain values before anything changes.
        """
        self._require_open()
        self.join()
        requests = exchange((step, published_steps(self.path), unpublished(self.path)), "restore")
        steps, hidden = requests[0][1], requests[0][2]
        if len({target for target, _, _ in requests}) > 1:
            raise CheckpointError(f"ranks restore different steps: {[target for target, _, _ in requests]}")
        if hidden and runtime.is_main():
            runtime.get_logger().warning("%s: skipping unfinished saves: %s", self.path, ", ".join(hidden))
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.path}")
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.path}; there are {steps}")
        chosen = steps[-1] if step is None else step
        try:
            manifest = self._check(chosen)
        except CheckpointError as error:
            intact = self._newest_intact(before=chosen, steps=steps)
            if intact is None:
                raise CheckpointError(f"{error}\nThere is no other intact checkpoint") from error
            if not fallback:
                raise CheckpointError(
                    f"{error}\nThe checkpoint of step {intact} is intact: load it with restore({intact}, …) or "
                    f"restore(…, fallback=True)"
                ) from error
            runtime.warn_once(f"fallback {chosen}", f"{error}\nLoading the checkpoint of step {intact} instead")
            chosen, manifest = intact, self._check(intact)
        what = f"restore of checkpoint step {chosen}"
        place, group = self.path / step_name(chosen), self._background.group
        save_restore.load(place, manifest, state, rng, what, group, check_values)
        runtime.get_logger().info("resumed from %s", self.path / step_name(chosen))
        return chosen

    def _check(self, step: int) -> Manifest:
        return save_restore.check_checkpoint(
            self.path / step_name(step), self.verify, f"restore of checkpoint step {step}"
        )

    def _newest_intact(self, before: int, steps: list[int]) -> int | None:
        """The newest intact checkpoint older than `before`, as rank 0 finds it."""

        def search() -> int | None:
            for step in reversed([s for s in steps if s < before] if runtime.is_main() else []):
                directory = self.path / step_name(step)
                try:
                    if not find_damage(directory, read_manifest(directory).files):
                        return step
                except CheckpointError:
                    continue
            return None

        return agree(search, f"restore of checkpoint step {before}", error=CheckpointError)[0]

    # --- preemption -------------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Ask the job to stop, as a signal would. Calling it on one rank is enough."""
        self._stop_requested = True

    def listen(self) -> None:
        """Handle signals from now on, so that one that arrives during the first step also leads to a save."""
        self._signals.install()

    def reached_preemption(self, step: int) -> bool:
        """Whether any rank was asked to stop. Call it once per step on every rank: all ranks get the same answer at the
        same step. Also raises the error of a failed background save."""
        self.listen()
        stop = self._stop_requested or self._signals.seen is not None
        flags = any_of(PREEMPTED * stop + FAILED * (self._failure is not None), "preemption check")
        if flags & FAILED:
            self.join()
        self._stop_requested |= bool(flags & PREEMPTED)
        return self._stop_requested

    def exit_if_preempted(self, step: int, state: Mapping[str, Any]) -> None:
        """If the job was asked to stop: save, wait until the save is published, and exit with `EXIT_PREEMPTED`."""
        if not self.reached_preemption(step):
            return
        self.join()
        if step not in self._known:
            self.save(step, state, force=True)
        if runtime.is_main():
            runtime.get_logger().warning(
                "stopped at step %d on request; saved in %s; exit code %d",
                step,
                self.path / step_name(step),
                EXIT_PREEMPTED,
            )
        self.close()
        sys.exit(EXIT_PREEMPTED)

    def _require_open(self) -> None:
        if self._background.group is None:
            raise CheckpointError(f"this manager of {self.path} is closed; create another one")

    # --- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a running save, then release signal handlers, host memory and process groups."""
        try:
            self.join()
        finally:
            self._signals.remove()
            self._buffer.release()
            self._background.end()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- a single directory ---------------------------------------------------------------------------------------------


def save_state(
    directory: str | Path, state: Mapping[str, Any] | None = None, *, save_frozen: bool = False, **named: Any
) -> None:
    """Save a state to `directory`, which must be new or empty. All ranks must call this.

    Pass the state as a dict or as keyword arguments: `save_state("before", model=model, epoch=3)`.
    """
    place = Path(directory).absolute()
    publish.probe(place.parent)
    save_job, description = save_restore.begin(place, None, _merge_state(state, named), save_frozen)
    save_restore.write(save_job, description.entries, description.pieces, host_group())


def load_state(
    directory: str | Path,
    state: MutableMapping[str, Any] | None = None,
    *,
    verify: bool = True,
    rng: bool = True,
    check_values: save_restore.CheckValues | None = None,
    **named: Any,
) -> dict[str, Any]:
    """Load a checkpoint of `save_state` or of a manager into the given objects and return the state.

    For a plain value pass anything, such as None: `load_state("before", model=model, epoch=None)`.
    """
    place = Path(directory).absolute()
    merged = _merge_state(state, named)
    what = f"restore of {place}"
    manifest = save_restore.check_checkpoint(place, verify, what)
    save_restore.load(place, manifest, merged, rng, what, host_group(), check_values)
    if state is not None:
        state.update({name: merged[name] for name in state})
    return merged


def _merge_state(state: Mapping[str, Any] | None, named: dict[str, Any]) -> dict[str, Any]:
    check_state(state or {})
    return {**(state or {}), **named}
