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
from fullshard.errors import first_line
from fullshard.train import results
from fullshard.train.config import SFTConfig
from fullshard.train.folder import CHECKPOINTS
from fullshard.weights.manifest import published_steps, step_name
from fullshard.weights.meeting import any_of

if TYPE_CHECKING:
    from fullshard.train.sft import SFTTrainer

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
        if any_of(int(idle), state.global_step, "uploads"):
            return
        place = self._place
        results.export(self.trainer.loop.model, self.trainer.parts, args, place)
        if runtime.is_main():
            step, newest = state.global_step, published_steps(place / CHECKPOINTS)[-1:]
            self._start(lambda: self._send(place, f"step {step}", [*NEVER, *GROWING], newest))

    def push(self, place: Path) -> None:
        """Send the result and wait for it; for the first rank alone. Whether it works or not, the run is done."""
        if self._flight is not None:
            self._flight.join()
        steps = published_steps(self._place / CHECKPOINTS)
        self._warned.clear()  # the last word is said again
        if reason := _why_not():
            self._warn(reason, place)
        elif self._attempt(lambda: self._send(place, "the end of training", list(NEVER), steps[-1:]), place):
            self.trainer.loop.reporter.say(f"uploaded to {self._repository}")

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Path:
        return Path(self.trainer.args.output_dir).expanduser()

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
            return False
        return True

    def _create(self) -> None:
        from huggingface_hub import HfApi

        if self._repository is None:
            private = self.trainer.args.hub_private_repo
            self._repository = HfApi().create_repo(self._name, private=private, exist_ok=True).repo_id

    def _send(self, place: Path, when: str, ignored: list[str], steps: list[int]) -> None:
        from huggingface_hub import HfApi

        self._create()
        api, repository = HfApi(), self._repository
        assert repository is not None
        api.upload_folder(
            folder_path=place, repo_id=repository, ignore_patterns=ignored, commit_message=f"fullshard: {when}"
        )
        strategy = self.trainer.args.hub_strategy
        for step in steps if strategy in ("checkpoint", "all_checkpoints") else ():
            name = step_name(step)
            whole = strategy == "all_checkpoints"
            api.upload_folder(
                folder_path=self._place / CHECKPOINTS / name,
                repo_id=repository,
                path_in_repo=f"{CHECKPOINTS}/{name}" if whole else LAST_CHECKPOINT,
                delete_patterns=None if whole else ["*"],  # of the checkpoint that was there before
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
