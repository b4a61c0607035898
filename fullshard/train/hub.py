"""Uploads of a run to the hub: in the background after saves, and at the end, as `hub_strategy` says.

Whatever goes wrong there is said once, with the command that uploads later, and training goes on. The first rank sends;
all ranks take part in writing what is sent.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard import runtime
from fullshard.checkpoint.manifest import MANIFEST, published_steps, step_name
from fullshard.errors import first_line
from fullshard.ranks import any_of
from fullshard.train import results
from fullshard.train.config import SFTConfig
from fullshard.train.run_dir import CHECKPOINTS, place_of

if TYPE_CHECKING:
    from fullshard.train.trainer import SFTTrainer

NEVER = (f"{CHECKPOINTS}/**", "runs/**", "wandb/**", "wandb.json", ".*", "*.part")
"""What is not uploaded with the model."""
GROWING = ("metrics.jsonl", "samples.jsonl")
"""Files that the run writes to while an upload in the background would read them."""
LAST_CHECKPOINT = "last-checkpoint"


class Hub:
    """One run's uploads; told of the run's events like a callback."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self.trainer = trainer
        self._flight: threading.Thread | None = None
        self._warned: set[str] = set()
        self._repository: str | None = None
        self._failing = False
        self._sent: set[int] = set()
        """Checkpoints that are on the hub under their own names."""
        self._sending: int | None = None
        """The checkpoint that is on its way."""

    def on_train_begin(self, args: SFTConfig, state: Any, control: Any, **facts: Any) -> None:
        """Make the repository, so that what is missing is known before hours of training."""
        if not runtime.is_main():
            return
        if reason := _why_not():
            self._warn(reason)
        else:
            self._start(self._create)

    def on_save(self, args: SFTConfig, state: Any, control: Any, **facts: Any) -> None:
        """Send the model as it is now, unless the last one is still on its way. All ranks must call it."""
        if args.hub_strategy == "end":
            return
        idle = runtime.is_main() and (self._busy or _why_not() is not None)
        if any_of(int(idle), "uploads"):
            return
        loop, place = self.trainer.loop, self._place
        if loop.manager is not None:
            loop.manager.join()  # the checkpoint to send is the one that was just saved
        results.export(loop.model, self.trainer.parts, args, place)
        if runtime.is_main():
            step = state.global_step
            self._start(lambda: self._send(place, f"step {step}", [*NEVER, *GROWING]))

    def holds(self, step: int) -> bool:
        """Whether a checkpoint is on its way or has yet to be sent, and must stay until then.

        Where uploads fail nothing is held: a run must not fill the disk because the network is gone.
        """
        waits = self.trainer.args.hub_strategy == "all_checkpoints" and step not in self._sent
        return step == self._sending or (waits and not self._failing and _why_not() is None)

    def push(self, place: Path) -> None:
        """Send the result and wait for it; for the first rank alone. Whether it works or not, the run is done."""
        if self._flight is not None:
            self._flight.join()
        self._warned.clear()  # the last word is said again
        if reason := _why_not():
            self._warn(reason, place)
        elif self._attempt(lambda: self._send(place, "the end of training", list(NEVER)), place):
            self.trainer.loop.reporter.say(f"uploaded to {self._repository}")

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Path:
        return place_of(self.trainer.args)

    @property
    def _name(self) -> str:
        return self.trainer.args.hub_model_id or self._place.resolve().name

    @property
    def _busy(self) -> bool:
        return self._flight is not None and self._flight.is_alive()

    def _start(self, work: Callable[[], None]) -> None:
        self._flight = threading.Thread(target=self._attempt, args=(work,), name="fullshard-hub", daemon=True)
        self._flight.start()

    def _attempt(self, work: Callable[[], None], place: Path | None = None) -> bool:
        try:
            work()
        except Exception as error:
            self._warn(first_line(error), place)
            self._failing = True
        else:
            self._failing = False
        finally:
            self._sending = None
        return not self._failing

    def _create(self) -> None:
        from huggingface_hub import HfApi

        if self._repository is not None:
            return
        api, private = HfApi(), self.trainer.args.hub_private_repo
        self._repository = api.create_repo(self._name, private=private, exist_ok=True).repo_id
        if self.trainer.args.hub_strategy == "all_checkpoints" and (steps := self._steps):
            there = set(api.list_repo_files(self._repository))  # a resumed run sends what is missing
            self._sent |= {step for step in steps if f"{CHECKPOINTS}/{step_name(step)}/{MANIFEST}" in there}

    @property
    def _steps(self) -> list[int]:
        return published_steps(self._place / CHECKPOINTS)

    def _send(self, place: Path, when: str, ignored: list[str]) -> None:
        from huggingface_hub import HfApi

        self._create()
        assert self._repository is not None
        strategy, newest = self.trainer.args.hub_strategy, self._steps[-1:]
        self._sending = newest[0] if newest and strategy == "checkpoint" else None
        HfApi().upload_folder(
            folder_path=place, repo_id=self._repository, ignore_patterns=ignored, commit_message=f"fullshard: {when}"
        )
        if self._sending is not None:
            self._send_checkpoint(self._sending, LAST_CHECKPOINT, ["*"])  # the one that was there before goes
        while strategy == "all_checkpoints" and (left := [step for step in self._steps if step not in self._sent]):
            self._sending = left[0]
            self._send_checkpoint(left[0], f"{CHECKPOINTS}/{step_name(left[0])}", None)
            self._sent.add(left[0])

    def _send_checkpoint(self, step: int, name: str, replaced: list[str] | None) -> None:
        from huggingface_hub import HfApi

        assert self._repository is not None
        HfApi().upload_folder(
            folder_path=self._place / CHECKPOINTS / step_name(step),
            repo_id=self._repository,
            path_in_repo=name,
            delete_patterns=replaced,
            commit_message=f"fullshard: checkpoint at step {step}",
        )

    def _warn(self, reason: str, place: Path | None = None) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        place = place or self._place
        leave = " ".join(f"--exclude {shlex.quote(pattern)}" for pattern in NEVER[:3])
        runtime.get_logger().warning(
            "not uploaded to %s: %s. The run goes on, and its result stays in %s; upload it later with: "
            "hf upload %s %s . %s",
            self._name, reason.rstrip("."), place, shlex.quote(self._name), shlex.quote(str(place)), leave,
        )  # fmt: skip


def _why_not() -> str | None:
    """What makes it useless to try."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off (HF_HUB_OFFLINE is set)"
    return None if get_token() else "there is no token; log in with `hf auth login`, or set HF_TOKEN"
