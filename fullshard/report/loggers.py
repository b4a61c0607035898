"""Metric loggers: TensorBoard and Weights & Biases behind one small interface, and those of transformers as callbacks.

A logger of ours that fails is disabled with one warning; training continues. Importing this does not import torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_list
from fullshard.config.paths import replace_text
from fullshard.report.records import Sample

OWN = ("tensorboard", "wandb")
"""Loggers of our own; the others are transformers' callbacks."""
LOGGER_PACKAGES = {
    "tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow",), "trackio": ("trackio",),
    "comet_ml": ("comet_ml",), "clearml": ("clearml",), "codecarbon": ("codecarbon",),
    "dagshub": ("dagshub", "mlflow"), "dvclive": ("dvclive",), "neptune": ("neptune",), "swanlab": ("swanlab",),
    "flyte": ("flytekit",), "azure_ml": ("azureml.core",), "kubeflow": (),
}  # fmt: skip
"""Every logger, with the packages that it needs."""


def requested_loggers(report_to: str) -> list[str]:
    """The loggers that `report_to` names, and those that auto and all stand for: what is installed."""
    names = as_list(report_to)
    groups = {"auto": OWN[:1], "all": tuple(name for name in LOGGER_PACKAGES if _is_usable(name))}
    implied = [name for word in names for name in groups.get(word, ()) if not _missing(LOGGER_PACKAGES[name])]
    return [name for name in LOGGER_PACKAGES if name in (*names, *implied)]


def check_report_to(report_to: str) -> None:
    """Refuse a logger that is asked for by name and not installed."""
    for name in as_list(report_to):
        if missing := _missing(LOGGER_PACKAGES.get(name, ())):
            raise ConfigError(
                f"report_to names {name}, which is not installed; pip install {missing}, or leave report_to out: "
                f"metrics.jsonl is always written."
            )


def _is_usable(name: str) -> bool:
    """Whether `all` includes it: Kubeflow's needs a job that runs there, MLflow's and Comet's can be turned off."""
    variable = {"kubeflow": "KUBEFLOW_TRAINER_SERVER_URL", "comet_ml": "COMET_API_KEY"}.get(name)
    off = os.environ.get(f"DISABLE_{name.upper()}_INTEGRATION", "").upper() == "TRUE"
    return not _missing(LOGGER_PACKAGES[name]) and not off and (variable is None or variable in os.environ)


def _missing(packages: Iterable[str]) -> str:
    return " ".join(package.replace(".", "-") for package in packages if not _is_installed(package))


def _is_installed(package: str) -> bool:
    """Whether a package, or a module of one, can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False  # the package of the module


# --- the loggers --------------------------------------------------------------------------------------------------

TENSORBOARD = "runs"
WANDB = "wandb.json"
"""Holds the run id of Weights & Biases, so that a resumed run continues the same W&B run."""
WANDB_PROJECT = "fullshard"


@dataclass(frozen=True)
class Run:
    """The run that a logger shows."""

    folder: Path
    step: int
    """The step at which the run starts or resumes."""
    settings: Mapping[str, Any]
    name: str
    events: str | None = None
    """The folder for TensorBoard's files; None for the run's own."""


class MetricLogger(Protocol):
    """Shows the metrics and samples of a run."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log generated samples."""

    def close(self) -> None:
        """Finish the log."""


OpenLoggers = Callable[[Path, int], list[MetricLogger]]
"""Opens the loggers of a run, given its folder and the step at which it starts. Called on the first rank only."""


def no_loggers(folder: Path, step: int) -> list[MetricLogger]:
    """An empty list of loggers."""
    return []


def opener(
    report_to: str, settings: Mapping[str, Any], run_name: str | None = None, events: str | None = None
) -> OpenLoggers:
    """A function that opens the loggers named in `report_to` that are installed; they record `settings`. `events` is
    another folder for TensorBoard's files than the run's own."""
    names = requested_loggers(report_to)

    def open_all(folder: Path, step: int) -> list[MetricLogger]:
        loggers: list[MetricLogger] = []
        for name, logger in LOGGERS.items():
            if name not in names:
                continue
            run = Run(folder, step, settings, run_name or folder.resolve().name, events)
            opened = attempt(f"report_to {name}", functools.partial(logger, run))
            loggers += [opened] if opened is not None else []
        return loggers

    return open_all


def callbacks(report_to: str) -> list[Any]:
    """transformers' callbacks for the loggers in `report_to` that are not ours. They log on the first rank."""
    names = [name for name in requested_loggers(report_to) if name not in OWN]
    if not names:
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    return [callback() for callback in get_reporting_integration_callbacks(names)]


def attempt(what: str, act: Callable[[], Any]) -> Any:
    """The result of `act`; if it fails, None and a warning."""
    try:
        return act()
    except Exception as error:
        from fullshard.distributed import runtime

        reason = str(error).strip().splitlines()
        runtime.get_logger().warning(
            "%s: %s; training continues without it", what, reason[0] if reason else repr(error)
        )
        return None


def grouped(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics by the names that group them in both loggers: `train/loss`, `eval/loss`."""
    return {"eval/" + name[5:] if name.startswith("eval_") else f"train/{name}": v for name, v in values.items()}


class TensorBoard:
    """Writes TensorBoard event files."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(
            run.events or str(run.folder / TENSORBOARD), purge_step=run.step + 1 if run.step else None
        )
        rows = "".join(f"| {name} | `{value}` |\n" for name, value in run.settings.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in grouped(values).items():
            self.writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the answers of an evaluation as text."""
        for number, sample in enumerate(samples, 1):
            parts = {"prompt": sample.prompt, "answer": sample.answer, "reference": sample.reference}
            text = "\n\n".join(f"**{name}**\n\n{_indented(part)}" for name, part in parts.items() if part is not None)
            self.writer.add_text(f"samples/{number}", text, step)
        self.writer.flush()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self.writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases, which reads `WANDB_PROJECT`, `WANDB_MODE` (offline) and its other variables."""

    def __init__(self, run: Run) -> None:
        self.wandb: Any = importlib.import_module("wandb")
        self.run: Any = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT") or WANDB_PROJECT,
            name=run.name,
            config=dict(run.settings),
            dir=str(run.folder),
            id=_run_id(run.folder),
            resume="allow",
        )
        # The step is an ordinary metric, because a resumed run may log the steps after its checkpoint again.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self.run.log({"step": step, **grouped(values)})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log the answers of an evaluation as a table."""
        rows = [[step, s.prompt, s.answer, s.reference or ""] for s in samples]
        self.run.log({"step": step, "samples": self.wandb.Table(["step", "prompt", "answer", "reference"], data=rows)})

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


LOGGERS: dict[str, Callable[[Run], MetricLogger]] = dict(zip(OWN, (TensorBoard, WeightsAndBiases), strict=True))
"""Our loggers by their name in `report_to`."""


def _run_id(folder: Path) -> str:
    path = folder / WANDB
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        new = uuid.uuid4().hex[:8]
        replace_text(path, json.dumps({"id": new}) + "\n")
        return new


def _indented(text: str) -> str:
    """The text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
