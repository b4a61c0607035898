"""What a run says while it goes on: a live display or lines on the terminal, metrics.jsonl, samples.jsonl, boards.

Only the first rank speaks and writes; on the others a `Reporter` only remembers. Which numbers there are is decided in
`train/loop.py`, which answers in `train/samples.py`; how numbers look is in `terminal.py`, TensorBoard and the like in
`loggers.py`.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fullshard import accelerator, runtime
from fullshard.paths import replace_text
from fullshard.progress import resolve_progress
from fullshard.reporting.loggers import Board, Opens, attempt, none
from fullshard.reporting.terminal import Clock, LiveBar, step_line, width_of_stdout
from fullshard.train.samples import FILE as SAMPLES
from fullshard.train.samples import Sample

FILE = "metrics.jsonl"
PROMPT_SHOWN = 300
"""Characters of a prompt that the terminal shows: its end."""


def memory_gib() -> float:
    """The most memory this rank has needed so far: of the GPU, or of the process."""
    if accelerator.is_accelerator(runtime.device()):
        return accelerator.peak_memory(runtime.device()) / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


@dataclass
class Window:
    """The steps since the last line of the log, as sums; saved with a checkpoint, so that a resumed run goes on with
    them. Losses that are not finite are left out of the means."""

    steps: int = 0
    loss: float = 0.0
    accuracy: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Spent before `began`, by the run that was resumed."""
    began: float = field(default_factory=time.monotonic, compare=False)

    def add(self, loss: float, accuracy: float, entropy: float, tokens: int) -> None:
        self.tokens += tokens
        if math.isfinite(loss):
            self.steps += 1
            self.loss, self.accuracy, self.entropy = self.loss + loss, self.accuracy + accuracy, self.entropy + entropy

    @property
    def elapsed(self) -> float:
        return max(1e-9, self.seconds + time.monotonic() - self.began)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed

    def means(self) -> dict[str, float]:
        """What the log says of the steps."""
        sums = {"loss": self.loss, "mean_token_accuracy": self.accuracy, "entropy": self.entropy}
        return {name: value / self.steps if self.steps else math.nan for name, value in sums.items()}

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on steps."""
        self.began += seconds

    def state(self, elapsed: float) -> dict[str, float]:
        """What a checkpoint holds; `elapsed` must be the same on every rank."""
        held = {name: value for name, value in asdict(self).items() if name != "began"}
        return {**held, "seconds": elapsed}


class Reporter:
    """Tells the user, and writes down, how the run goes. `history` is there on every rank."""

    def __init__(self, folder: Path, total: int, progress: str, boards: Opens = none) -> None:
        self.folder, self.total = folder, total
        self.speaks = runtime.is_main()
        self.mode = resolve_progress(progress)
        self.history: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        """The samples so far, as in their file; on the first rank."""
        self._opens, self._boards = boards, list[Board]()
        self._file: Any = None
        self._bar: LiveBar | None = None
        self._clock = Clock(total, 0)

    def start(self, step: int) -> None:
        """Begin at this step; what an earlier, broken-off run wrote beyond it is dropped."""
        self._clock = Clock(self.total, step)
        if not self.speaks:
            return
        self.history = _keep(self.folder / FILE, step)
        self._file = (self.folder / FILE).open("a", buffering=1)
        if (self.folder / SAMPLES).exists():
            self.answers = _keep(self.folder / SAMPLES, step)
        self._boards = self._opens(self.folder, step)
        if self.mode == "live":
            self._bar = LiveBar(self._clock, step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of a step, and show them."""
        # JSON has no word for a number that is none.
        record = {"step": step, **{name: _sayable(value) for name, value in values.items()}}
        self.history.append(record)
        if not self.speaks:
            return
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._tell(lambda board: board.numbers(step, numbers))
        if self.mode == "json":
            print(json.dumps(record), flush=True)
        elif self.mode == "plain":
            print(step_line(step, self.total, values, self._clock.left(step), width_of_stdout()), flush=True)
        elif self._bar is not None:
            self._bar.say(step_line(step, self.total, values, width=self._bar.width))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record and show what the model answers."""
        if not self.speaks or not samples:
            return
        records = [sample.record() for sample in samples]
        self.answers += records
        if self._file is not None:
            with (self.folder / SAMPLES).open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        self._tell(lambda board: board.samples(step, samples))
        if self.mode == "json":
            for record in records:
                print(json.dumps(record), flush=True)
        for sample in samples:
            self.say(sample_text(sample))

    def _tell(self, act: Callable[[Board], None]) -> None:
        """Hand something to every board; one that fails is left out from then on."""

        def told(board: Board) -> bool:
            act(board)
            return True

        self._boards = [
            board
            for board in self._boards
            if attempt(f"report_to {type(board).__name__}", functools.partial(told, board))
        ]

    def tick(self, step: int, values: Mapping[str, Any]) -> None:
        """A step is done: move the live display on."""
        if self._bar is not None:
            self._bar.move(step, values)

    def say(self, text: str) -> None:
        """A line for the user."""
        if self.speaks and self.mode in ("plain", "live"):
            print(text, flush=True)

    def close(self) -> None:
        self._tell(lambda board: board.close())
        for thing in (self._bar, self._file):
            if thing is not None:
                thing.close()
        self._boards, self._bar, self._file = [], None, None


def _sayable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def sample_text(sample: Sample) -> str:
    """A sample in lines for the terminal."""
    prompt = sample.prompt.strip()
    cut = f"… {prompt[-PROMPT_SHOWN:]}" if len(prompt) > PROMPT_SHOWN else prompt
    parts = {"prompt": cut, "answer": sample.answer.strip() or "(nothing)", "reference": sample.reference}
    lines = [f"sample at step {sample.step}"]
    for name, said in parts.items():
        if said is not None:
            lines.append(f"  {name:<9}  {printable(said)}".replace("\n", "\n" + " " * 13))
    return "\n".join(lines)


def _keep(path: Path, step: int) -> list[dict[str, Any]]:
    """What a file of records holds up to this step; the rest, of a run that was broken off later, is dropped."""
    kept = [r for r in _read(path) if r["step"] <= step] if step and path.exists() else []
    replace_text(path, "".join(json.dumps(r) + "\n" for r in kept))
    return kept


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that was cut off is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step"), int)]
