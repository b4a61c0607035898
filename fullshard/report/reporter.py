"""The reporter of a run: terminal output, metrics.jsonl, samples.jsonl and metric loggers.

Only the first rank prints and writes; on other ranks a `Reporter` only keeps the history. `sft/loop.py` decides which
metrics are logged; `terminal.py` formats them; `loggers.py` sends them to TensorBoard and Weights & Biases.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fullshard.config.errors import first_line
from fullshard.config.paths import replaced_text
from fullshard.config.redaction import hide
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.progress import resolve_progress
from fullshard.distributed.terminal_text import print_text
from fullshard.report.loggers import MetricLogger, OpenLoggers, attempt, no_loggers
from fullshard.report.records import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE, Sample, add_thinned, finite
from fullshard.report.terminal import Clock, LiveBar, step_line, width_of_stdout

MOST = 500
"""The most warnings of a run that are recorded."""


class EventLog:
    """Appends events to a file, the warnings of fullshard's logger among them. A callback of the run, on the first rank
    only. Until training begins, and the folder is the run's, events are kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.path, self.step = folder / EVENTS_FILE, 0
        self._early: list[dict[str, Any]] | None = []
        self._warnings = 0
        handler, logger = _Warnings(self), runtime.get_logger()
        for earlier in [one for one in logger.handlers if isinstance(one, _Warnings)]:
            logger.removeHandler(earlier)  # of a trainer that a script still holds
        logger.addHandler(handler)
        weakref.finalize(self, logger.removeHandler, handler)

    def add(self, kind: str, text: str = "") -> None:
        """Record an event of the current step."""
        event = {"time": time.time(), "step": self.step, "kind": kind, "text": hide(text)}
        if self._early is not None:
            self._early.append(event)
            return
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def warn(self, text: str) -> None:
        """Record a warning."""
        self._warnings += 1
        if self._warnings <= MOST:
            self.add("warning", text)

    def close(self) -> None:
        """Record the exception that ends training, if there is one."""
        error = sys.exception()
        if error is not None and self._early is None:
            stopped = isinstance(error, SystemExit | KeyboardInterrupt)
            self.add("stopped" if stopped else "failed", f"{type(error).__name__}: {first_line(error)}")

    # --- events of the run ------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Record the start of the training, or that it resumes, and what was recorded before it."""
        self.step, early = state.global_step, self._early or []
        if not self.step:
            self.path.unlink(missing_ok=True)  # of a training that starts again
        self._early = None
        self.add(*(("resume", f"resumed at step {self.step}") if self.step else ("start",)))
        for event in early:
            self.add(event["kind"], event["text"])

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Keep the step that later events belong to."""
        self.step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Record a checkpoint."""
        self.add("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Record the end of the training."""
        self.add("end")


class _Warnings(logging.Handler):
    """Hands warnings to a log that is still in use."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._log = weakref.ref(log)

    def emit(self, record: logging.LogRecord) -> None:
        if (log := self._log()) is not None:
            log.warn(record.getMessage())


PROMPT_SHOWN = 300
"""The number of characters, from the end of a prompt, that the terminal shows."""


def memory_gib() -> float:
    """Peak memory of this rank so far: of its GPU, or of the process on CPUs."""
    if accelerator.is_accelerator(runtime.device()):
        return accelerator.peak_memory(runtime.device()) / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


@dataclass
class Window:
    """Sums over the steps since the last logged line. Saved in checkpoints, so that a resumed run continues them.
    Steps with a non-finite loss are left out of the means."""

    steps: int = 0
    loss: float = 0.0
    accuracy: float = 0.0
    entropy: float = 0.0
    router_loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Seconds spent before `began`, by the run that was resumed."""
    began: float = field(default_factory=time.monotonic, compare=False)

    def add(self, loss: float, accuracy: float, entropy: float, tokens: int, router_loss: float = 0.0) -> None:
        """Add the metrics of a step."""
        self.tokens += tokens
        if math.isfinite(loss):
            self.steps += 1
            self.loss, self.accuracy, self.entropy = self.loss + loss, self.accuracy + accuracy, self.entropy + entropy
            self.router_loss += router_loss

    @property
    def elapsed(self) -> float:
        """The seconds of the window."""
        return max(1e-9, self.seconds + time.monotonic() - self.began)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second."""
        return self.tokens / self.elapsed

    def means(self) -> dict[str, float]:
        """The metrics to log; NaN if no step had a finite loss."""
        sums = {
            "loss": self.loss, "mean_token_accuracy": self.accuracy, "entropy": self.entropy,
            "aux_loss": self.router_loss,
        }  # fmt: skip
        return {name: value / self.steps if self.steps else math.nan for name, value in sums.items()}

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on steps."""
        self.began += seconds

    def state(self, elapsed: float) -> dict[str, float]:
        """The state to save in a checkpoint; `elapsed` must be the same on every rank."""
        sums = {name: value for name, value in asdict(self).items() if name != "began"}
        return {**sums, "seconds": elapsed}


class Reporter:
    """Prints and records the metrics and samples of a run. Every rank has `history`."""

    def __init__(self, folder: Path, total: int, progress: str, open_loggers: OpenLoggers = no_loggers) -> None:
        self.folder, self.total = folder, total
        self.is_main = runtime.is_main()
        self.mode = resolve_progress(progress)
        self.history: list[dict[str, Any]] = []
        """The logged records; of a very long run those that stay (`records.add_thinned`)."""
        self.events = EventLog(folder) if self.is_main else None
        self._open_loggers, self._loggers = open_loggers, list[MetricLogger]()
        self._file: Any = None
        self._bar: LiveBar | None = None
        self._clock = Clock(total, 0)

    def start(self, step: int) -> None:
        """Start at this step. Records of later steps, from a run that was interrupted, are dropped."""
        self._clock = Clock(self.total, step)
        if not self.is_main:
            return
        self.history[:] = _keep(self.folder / METRICS_FILE, step)
        self._file = (self.folder / METRICS_FILE).open("a", buffering=1)
        if (self.folder / SAMPLES_FILE).exists():
            _keep(self.folder / SAMPLES_FILE, step)
        self._loggers = self._open_loggers(self.folder, step)
        if self.mode == "live":
            self._bar = LiveBar(self._clock, step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record and show the metrics of a step."""
        # JSON has no NaN or infinity.
        record = {"step": step, **{name: finite(value) for name, value in values.items()}}
        add_thinned(self.history, record)
        if not self.is_main:
            return
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._for_each_logger(lambda logger: logger.metrics(step, numbers))
        if self.mode == "json":
            print_text(json.dumps(record))
        elif self.mode == "plain":
            print_text(step_line(step, self.total, values, self._clock.left(step), width_of_stdout()))
        elif self._bar is not None:
            self._bar.print_above(step_line(step, self.total, values, width=self._bar.width))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record and show sample generations."""
        if not self.is_main or not samples:
            return
        records = [sample.record() for sample in samples]
        if self._file is not None:
            with (self.folder / SAMPLES_FILE).open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        self._for_each_logger(lambda logger: logger.samples(step, samples))
        if self.mode == "json":
            for record in records:
                print_text(json.dumps(record))
        for sample in samples:
            self.say(sample_text(sample))

    def _for_each_logger(self, act: Callable[[MetricLogger], None]) -> None:
        """Call `act` with every logger; a logger that fails is disabled."""

        def succeeds(logger: MetricLogger) -> bool:
            act(logger)
            return True

        self._loggers = [
            logger
            for logger in self._loggers
            if attempt(f"report_to {type(logger).__name__}", functools.partial(succeeds, logger))
        ]

    @property
    def is_live(self) -> bool:
        """Whether there is a live display, which `tick` updates."""
        return self._bar is not None

    def tick(self, step: int, values: Mapping[str, Any]) -> None:
        """Update the live display after a step."""
        if self._bar is not None:
            self._bar.move(step, values)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.is_main and self.mode in ("plain", "live"):
            print_text(text)

    def close(self) -> None:
        """Close loggers, display and file. An exception that is on its way is recorded."""
        if self.events is not None:
            self.events.close()
        self._for_each_logger(lambda logger: logger.close())
        for resource in (self._bar, self._file):
            if resource is not None:
                resource.close()
        self._loggers, self._bar, self._file = [], None, None


def sample_text(sample: Sample) -> str:
    """The terminal output of a sample."""
    prompt = sample.prompt.strip()
    cut = f"… {prompt[-PROMPT_SHOWN:]}" if len(prompt) > PROMPT_SHOWN else prompt
    parts = {"prompt": cut, "answer": sample.answer.strip() or "(nothing)", "reference": sample.reference}
    lines = [f"sample at step {sample.step}"]
    for name, text in parts.items():
        if text is not None:
            lines.append(f"  {name:<9}  {text}".replace("\n", "\n" + " " * 13))
    return "\n".join(lines)


def _keep(path: Path, step: int) -> list[dict[str, Any]]:
    """Truncate a JSON lines file after this step; returns the records that remain, thinned where they are many."""
    remaining: list[dict[str, Any]] = []
    with replaced_text(path) as file:
        for record in _read(path) if step and path.exists() else ():
            if record["step"] <= step:
                file.write(json.dumps(record) + "\n")
                add_thinned(remaining, record)
    return remaining


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON lines file; an incomplete last line is ignored."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
