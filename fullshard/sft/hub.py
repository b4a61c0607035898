"""Uploads to the hub: in the background after saves, and at the end, as `hub_strategy` asks.

A failed upload is reported once, with the command that uploads later, and training continues. The first rank uploads;
all ranks take part in writing what is uploaded.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest import MANIFEST, published_steps, step_name
from fullshard.config.errors import first_line
from fullshard.distributed import runtime
from fullshard.distributed.ranks import any_of
from fullshard.sft.output_dir import CHECKPOINTS, output_path
from fullshard.sft.results import ResultWriter
from fullshard.sft.sft_config import SFTConfig

NEVER = (f"{CHECKPOINTS}/**", "runs/**", "wandb/**", "wandb.json", ".*", "*.part")
"""What is not uploaded with the model."""
GROWING = ("metrics.jsonl", "samples.jsonl")
"""Files that the run appends to while an upload in the background would read them."""
LAST_CHECKPOINT = "last-checkpoint"


class Hub:
    """The uploads of one run; a callback of the trainer's own."""

    def __init__(self, config: SFTConfig, writer: ResultWriter, say: Callable[[str], None]) -> None:
        self.config, self.writer, self.say = config, writer, say
        self._upload: threading.Thread | None = None
        self._warned: set[str] = set()
        self._repository: str | None = None
        self._failing = False
        self._sent: set[int] = set()
        """Steps whose checkpoints are on the hub under their own names."""
        self._sending: int | None = None
        """The step whose checkpoint is being uploaded."""

    def on_train_begin(self, args: SFTConfig, state: Any, control: Any, **facts: Any) -> None:
        """Create the repository, so that a missing token or permission shows before hours of training."""
        if not runtime.is_main():
            return
        if reason := self._why_not():
            self._warn(reason)
        else:
            self._start(self._create)

    def on_save(self, args: SFTConfig, state: Any, control: Any, *, checkpoints: Any, **facts: Any) -> None:
        """Upload the model as it is now, unless the last upload is still running. All ranks must call it."""
        if args.hub_strategy == "end":
            return
        if args.hub_always_push and self._upload is not None:
            self._upload.join()
        idle = runtime.is_main() and (self._busy or self._why_not() is not None)
        if any_of(int(idle), "uploads"):
            return
        place = self._place
        checkpoints.join()  # the checkpoint to upload is the one that was just saved
        self.writer.export(place)
        if runtime.is_main():
            step = state.global_step
            self._start(lambda: self._send(place, f"step {step}", [*NEVER, *GROWING]))

    def holds(self, step: int) -> bool:
        """Whether a checkpoint is being uploaded or has yet to be, and must be kept until then.

        Where uploads fail nothing is kept: a run must not fill the disk because the network is down.
        """
        waits = self.config.hub_strategy == "all_checkpoints" and step not in self._sent
        return step == self._sending or (waits and not self._failing and self._why_not() is None)

    def push(self, place: Path, message: str = "the end of training") -> None:
        """Upload the result and wait for it; for the first rank alone. A failure does not fail the run."""
        if self._upload is not None:
            self._upload.join()
        self._warned.clear()  # report a failure at the end of the run again
        if reason := self._why_not():
            self._warn(reason, place)
        elif self._attempt(lambda: self._send(place, message, list(NEVER)), place):
            self.say(f"uploaded to {self._repository}")

    # --- uploading --------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Path:
        return output_path(self.config)

    @property
    def _name(self) -> str:
        return self.config.hub_model_id or self._place.resolve().name

    @property
    def _busy(self) -> bool:
        return self._upload is not None and self._upload.is_alive()

    def _start(self, work: Callable[[], None]) -> None:
        self._upload = threading.Thread(target=self._attempt, args=(work,), name="fullshard-hub", daemon=True)
        self._upload.start()

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

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(token=self.config.hub_token)

    def _create(self) -> None:
        if self._repository is not None:
            return
        api, private = self._api, self.config.hub_private_repo
        self._repository = api.create_repo(self._name, private=private, exist_ok=True).repo_id
        if self.config.hub_revision is not None:
            api.create_branch(self._repository, branch=self.config.hub_revision, exist_ok=True)
        if self.config.hub_strategy == "all_checkpoints" and (steps := self._steps):
            # A resumed run uploads what is missing.
            uploaded = set(api.list_repo_files(self._repository, revision=self.config.hub_revision))
            self._sent |= {step for step in steps if f"{CHECKPOINTS}/{step_name(step)}/{MANIFEST}" in uploaded}

    @property
    def _steps(self) -> list[int]:
        return published_steps(self._place / CHECKPOINTS)

    def _send(self, place: Path, when: str, ignored: list[str]) -> None:
        self._create()
        assert self._repository is not None
        strategy, newest = self.config.hub_strategy, self._steps[-1:]
        self._sending = newest[0] if newest and strategy == "checkpoint" else None
        self._api.upload_folder(
            folder_path=place, repo_id=self._repository, ignore_patterns=ignored, commit_message=f"fullshard: {when}",
            revision=self.config.hub_revision,
        )  # fmt: skip
        if self._sending is not None:
            self._send_checkpoint(self._sending, LAST_CHECKPOINT, ["*"])  # replaces the one before
        while strategy == "all_checkpoints" and (left := [step for step in self._steps if step not in self._sent]):
            self._sending = left[0]
            self._send_checkpoint(left[0], f"{CHECKPOINTS}/{step_name(left[0])}", None)
            self._sent.add(left[0])

    def _send_checkpoint(self, step: int, name: str, replaced: list[str] | None) -> None:
        assert self._repository is not None
        self._api.upload_folder(
            folder_path=self._place / CHECKPOINTS / step_name(step),
            repo_id=self._repository,
            path_in_repo=name,
            delete_patterns=replaced,
            commit_message=f"fullshard: checkpoint at step {step}",
            revision=self.config.hub_revision,
        )

    def _why_not(self) -> str | None:
        """The reason why an upload cannot work; None if it may."""
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_OFFLINE:
            return "the hub is disabled (HF_HUB_OFFLINE is set)"
        token = self.config.hub_token or get_token()
        return None if token else "there is no token; log in with `hf auth login`, or set HF_TOKEN"

    def _warn(self, reason: str, place: Path | None = None) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        place = place or self._place
        leave = " ".join(f"--exclude {shlex.quote(pattern)}" for pattern in NEVER[:3])
        runtime.get_logger().warning(
            "not uploaded to %s: %s. The run continues, and its result stays in %s; upload it later with: "
            "hf upload %s %s . %s",
            self._name, reason.rstrip("."), place, shlex.quote(self._name), shlex.quote(str(place)), leave,
        )  # fmt: skip
