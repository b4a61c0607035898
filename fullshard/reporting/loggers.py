"""Where metrics go besides the run's own files: TensorBoard and Weights & Biases, behind one small interface.

Without a word from the user, TensorBoard is used where it is installed. A board that fails is given up with one
warning; training never stops for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fullshard import runtime
from fullshard.options import as_list
from fullshard.paths import replace_text
from fullshard.train.config import SFTConfig

if TYPE_CHECKING:
    from fullshard.train.samples import Sample

TENSORBOARD = "runs"
WANDB = "wandb.json"
"""Holds the id of the run on Weights & Biases, so that a resumed run goes on there."""
WANDB_PROJECT = "fullshard"
AUTO = "tensorboard"
"""What `report_to` is where it is auto."""


class Board(Protocol):
    """A place that shows a run."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


Opens = Callable[[Path, int], list[Board]]
"""Opens the boards of a run in its folder, from a step on; for the first rank alone."""


def none(folder: Path, step: int) -> list[Board]:
    """No boards."""
    return []


def opener(config: SFTConfig) -> Opens:
    """What opens the boards that `report_to` names, as far as they are installed."""
    named = as_list(config.report_to)

    def open_all(folder: Path, step: int) -> list[Board]:
        found: list[Board] = []
        for name, board in BOARDS.items():
            wanted = name in named or "all" in named or ("auto" in named and name == AUTO)
            if not wanted or importlib.util.find_spec(name) is None:
                continue  # one that the user named was looked for before the run began
            made = attempt(f"report_to {name}", functools.partial(board, config, folder, step))
            found += [made] if made is not None else []
        return found

    return open_all


def attempt(what: str, act: Callable[[], Any]) -> Any:
    """What `act` gives, or None and a warning."""
    try:
        return act()
    except Exception as error:
        reason = str(error).strip().splitlines()
        runtime.get_logger().warning("%s: %s; training goes on without it", what, reason[0] if reason else repr(error))
        return None


def grouped(values: Mapping[str, float]) -> dict[str, float]:
    """Numbers under the names that both boards sort them by."""
    return {"eval/" + name[5:] if name.startswith("eval_") else f"train/{name}": v for name, v in values.items()}


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, config: SFTConfig, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1 if step else None)
        rows = "".join(f"| {name} | `{value}` |\n" for name, value in config.to_dict().items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", step)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in grouped(values).items():
            self.writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples, 1):
            parts = {"prompt": sample.prompt, "answer": sample.answer, "reference": sample.reference}
            text = "\n\n".join(f"**{name}**\n\n{_indented(said)}" for name, said in parts.items() if said is not None)
            self.writer.add_text(f"samples/{number}", text, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run on Weights & Biases; `WANDB_PROJECT`, `WANDB_MODE` (offline) and its other variables are respected."""

    def __init__(self, config: SFTConfig, folder: Path, step: int) -> None:
        self.wandb: Any = importlib.import_module("wandb")
        self.run: Any = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT") or WANDB_PROJECT,
            name=config.run_name or folder.resolve().name,
            config=config.to_dict(),
            dir=str(folder),
            id=_run_id(folder),
            resume="allow",
        )
        # Steps are numbers of their own: a resumed run may log again what came after its checkpoint.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **grouped(values)})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[step, s.prompt, s.answer, s.reference or ""] for s in samples]
        self.run.log({"step": step, "samples": self.wandb.Table(["step", "prompt", "answer", "reference"], data=rows)})

    def close(self) -> None:
        self.run.finish()


BOARDS: dict[str, Callable[[SFTConfig, Path, int], Board]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""By the name in `report_to`, which is also that of the package it needs."""


def _run_id(folder: Path) -> str:
    path = folder / WANDB
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        made = uuid.uuid4().hex[:8]
        replace_text(path, json.dumps({"id": made}) + "\n")
        return made


def _indented(text: str) -> str:
    """As Markdown's preformatted text."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
