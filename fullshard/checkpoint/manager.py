"""Checkpoints for training: when to save, in which thread, which to keep, and how to resume.

`CheckpointManager` keeps the checkpoints of a run in one directory, `step-N` each; `save_state` and `load_state` write
and read a single named directory. What a checkpoint consists of is in `save_restore.py` and the files it uses.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fullshard import runtime
from fullshard.checkpoint import publish, save_restore
from fullshard.checkpoint.host_snapshot import HostBuffer
from fullshard.checkpoint.manifest import (
    Manifest,
    damaged,
    published_steps,
    read_manifest,
    step_name,
    unpublished,
)
from fullshard.checkpoint.objects import check_state
from fullshard.checkpoint.preemption import EXIT_PREEMPTED, SIGNALS, SignalNote
from fullshard.errors import CheckpointError
from fullshard.ranks import BorrowedGroup, agree, agree_locally, any_of, exchange, host_group

PREEMPTED, FAILED = 1, 2


class CheckpointManager:
    """The checkpoints of one run. Every rank makes one and calls its methods alike."""

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
        - `max_to_keep`: older checkpoints are removed once a newer one is published; None keeps all.
        - `keep_every`: multiples of this step are never removed. `protect(step)` may name others (the best one so far);
          it is asked on the first rank, in the thread that saves and at the time of the save.
        - `save_frozen`: also write frozen parameters that the base files provide.
        - `signals`: those that are listened for, from `listen()` or the first `reached_preemption` on.
        - `verify`: compare every file's checksum before it is restored.
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
        self._signals = SignalNote(signals)
        self._asked_to_stop = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._buffer = HostBuffer()
        runtime.use_spmd()
        publish.probe(self.path)
        self._background = BorrowedGroup()  # for saves in the background: they never mix with training's communication
        found = exchange((published_steps(self.path), unpublished(self.path)), "start of checkpoints")[0]
        self._known, self._stale = set(found[0]), found[1]

    # --- saving -----------------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `step` is one to save at: a multiple of `save_interval` that has not been saved yet."""
        if step % self.save_interval or step in self._known:
            return False
        self.join()  # so that a failed save is reported, and on every rank at the same step
        return True

    def save(self, step: int, state: Mapping[str, Any], force: bool = False) -> bool:
        """Save and return when it is published. Without `force` only if `should_save(step)`; whether it was saved."""
        if not (force or self.should_save(step)):
            return False
        self.join()
        order, description = self._begin(step, state)
        superfluous = self._superfluous(step)
        save_restore.write(order, description.entries, description.pieces, self._background.group)
        self._published(step, superfluous)
        return True

    def save_async(self, step: int, state: Mapping[str, Any], force: bool = False) -> bool:
        """Copy the state to host memory and return; writing and publishing go on in the background.

        A save still under way is waited for first. If this one fails, a later call raises what went wrong.
        """
        if not (force or self.should_save(step)):
            return False
        self.join()
        order, description = self._begin(step, state)
        # Memory may run out here; then it must on every rank, before any of them goes on alone.
        copy = functools.partial(self._buffer.copy, description.pieces)
        pieces = agree_locally(copy, order.what, error=CheckpointError, watched=True)
        superfluous = self._superfluous(step)  # as the state that is saved sees it, not as training goes on

        def work() -> None:
            try:
                save_restore.write(order, description.entries, pieces, self._background.group)
                self._published(step, superfluous)
            except BaseException as error:
                self._failure = error

        # Not a daemon: a program that ends right after its last save still publishes it.
        self._thread = threading.Thread(target=work, name="fullshard-save", daemon=False)
        self._thread.start()
        return True

    def _begin(self, step: int, state: Mapping[str, Any]) -> tuple[save_restore.Order, Any]:
        self._require_open()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"step={step!r}: expected a whole number of 0 or more")
        return save_restore.begin(self.path / step_name(step), step, state, self.save_frozen)

    def _superfluous(self, step: int) -> list[int]:
        """The checkpoints to remove once that of `step` is published, as the first rank sees it."""
        if self.max_to_keep is None:
            return []
        known = sorted(self._known | {step})
        kept = {step, *known[-self.max_to_keep :]}
        return exchange([s for s in known if s not in kept and not self._is_protected(s)], "old checkpoints")[0]

    def _published(self, step: int, superfluous: list[int]) -> None:
        """Take note of a published checkpoint, and remove what it makes superfluous."""
        self._known.add(step)
        self._remove(superfluous)
        if runtime.is_main():
            for name in self._stale:  # left by a run before this one
                publish.discard(self.path / name)
        self._stale = []

    def _remove(self, steps: list[int]) -> None:
        self._known -= set(steps)
        for step in steps if runtime.is_main() else ():
            publish.retire(self.path / step_name(step))

    def prune(self) -> None:
        """Remove checkpoints beyond `max_to_keep` now: those that `protect` held back at the last save."""
        self.join()
        if self._known:
            self._remove(self._superfluous(max(self._known)))

    def _is_protected(self, step: int) -> bool:
        return (self.keep_every is not None and step % self.keep_every == 0) or self._protect(step)

    def join(self) -> None:
        """Wait for a save in the background; raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(f"a save in the background failed: {failure}") from failure

    # --- restoring --------------------------------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """The steps that are published, oldest first."""
        return published_steps(self.path)

    def latest(self) -> int | None:
        """The newest published step; None if there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def read_manifest(self, step: int | None = None) -> Manifest:
        """What a checkpoint says of itself; the newest one's if no step is given."""
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.path}")
        return read_manifest(self.path / step_name(step))

    def restore(
        self, step: int | None, state: MutableMapping[str, Any], *, fallback: bool = False, rng: bool = True
    ) -> int:
        """Load a checkpoint (the newest if `step` is None) into the objects in `state`; its step.

        Plain values are put into `state`. Names that `state` leaves out are left alone. With `fallback` a damaged
        newest checkpoint is passed over for the newest one that is whole.
        """
        self._require_open()
        self.join()
        asked = exchange((step, published_steps(self.path), unpublished(self.path)), "restore")
        steps, hidden = asked[0][1], asked[0][2]
        if len({wanted for wanted, _, _ in asked}) > 1:
            raise CheckpointError(f"ranks restore different steps: {[wanted for wanted, _, _ in asked]}")
        if hidden and runtime.is_main():
            runtime.get_logger().warning("%s: skipped, a save that was not finished: %s", self.path, ", ".join(hidden))
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.path}")
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.path}; there are {steps}")
        chosen = steps[-1] if step is None else step
        try:
            manifest = self._check(chosen)
        except CheckpointError as error:
            sound = self._newest_sound(before=chosen, steps=steps)
            if sound is None:
                raise CheckpointError(f"{error}\nThere is no other checkpoint that is whole") from error
            if not fallback:
                raise CheckpointError(
                    f"{error}\nThe checkpoint of step {sound} is whole: restore({sound}, …) takes it, and so does "
                    f"restore(…, fallback=True)"
                ) from error
            runtime.warn_once(f"fallback {chosen}", f"{error}\nTaking the checkpoint of step {sound} instead")
            chosen, manifest = sound, self._check(sound)
        what = f"restore of checkpoint step {chosen}"
        save_restore.load(self.path / step_name(chosen), manifest, state, rng, what, self._background.group)
        runtime.get_logger().info("resumed from %s", self.path / step_name(chosen))
        return chosen

    def _check(self, step: int) -> Manifest:
        return save_restore.check(self.path / step_name(step), self.verify, f"restore of checkpoint step {step}")

    def _newest_sound(self, before: int, steps: list[int]) -> int | None:
        """The newest older checkpoint that is whole, as the first rank sees it."""

        def look() -> int | None:
            for step in reversed([s for s in steps if s < before] if runtime.is_main() else []):
                directory = self.path / step_name(step)
                try:
                    if not damaged(directory, read_manifest(directory).files):
                        return step
                except CheckpointError:
                    continue
            return None

        return agree(look, f"restore of checkpoint step {before}", error=CheckpointError)[0]

    # --- being stopped ----------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Ask the job to stop, as a signal would; one rank is enough."""
        self._asked_to_stop = True

    def listen(self) -> None:
        """Listen for signals from now on: one that comes in the first step is then answered like any other."""
        self._signals.install()

    def reached_preemption(self, step: int) -> bool:
        """Whether the job was asked to stop, on any rank. Call it once per step on every rank: all get the same answer
        at the same step. A save that failed in the background is raised here too."""
        self.listen()
        stop = self._asked_to_stop or self._signals.seen is not None
        flags = any_of(PREEMPTED * stop + FAILED * (self._failure is not None), "preemption check")
        if flags & FAILED:
            self.join()
        self._asked_to_stop |= bool(flags & PREEMPTED)
        return self._asked_to_stop

    def exit_if_preempted(self, step: int, state: Mapping[str, Any]) -> None:
        """If the job was asked to stop: save once, wait until it is published, and exit with `EXIT_PREEMPTED`."""
        if not self.reached_preemption(step):
            return
        self.join()
        if step not in self._known:
            self.save(step, state, force=True)
        if runtime.is_main():
            runtime.get_logger().warning(
                "stopped at step %d as asked; saved in %s; exit code %d",
                step,
                self.path / step_name(step),
                EXIT_PREEMPTED,
            )
        self.close()
        sys.exit(EXIT_PREEMPTED)

    def _require_open(self) -> None:
        if self._background.group is None:
            raise CheckpointError(f"this manager of {self.path} is closed; make another one")

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a save under way and let go of handlers, memory and communicators."""
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
    """Save to a directory of this name, which must not exist or be empty. All ranks call it.

    The state is a dict, or named arguments: `save_state("before", model=model, epoch=3)`.
    """
    place = Path(directory).absolute()
    publish.probe(place.parent)
    order, description = save_restore.begin(place, None, _together(state, named), save_frozen)
    save_restore.write(order, description.entries, description.pieces, host_group())


def load_state(
    directory: str | Path,
    state: MutableMapping[str, Any] | None = None,
    *,
    verify: bool = True,
    rng: bool = True,
    **named: Any,
) -> dict[str, Any]:
    """Load what `save_state` (or a manager) saved into the objects given; the state with its plain values.

    A name whose value does not matter can be given as None: `load_state("before", model=model, epoch=None)`.
    """
    place = Path(directory).absolute()
    given = _together(state, named)
    what = f"restore of {place}"
    manifest = save_restore.check(place, verify, what)
    save_restore.load(place, manifest, given, rng, what, host_group())
    if state is not None:
        state.update({name: given[name] for name in state})
    return given


def _together(state: Mapping[str, Any] | None, named: dict[str, Any]) -> dict[str, Any]:
    check_state(state or {})
    return {**(state or {}), **named}
