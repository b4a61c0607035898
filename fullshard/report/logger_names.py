"""The loggers that `report_to` can name, and what each of them needs. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_list

OWN = ("tensorboard", "wandb")
"""Loggers of our own (`loggers.py`); the others are transformers' callbacks."""
KNOWN = {
    "tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow",), "trackio": ("trackio",),
    "comet_ml": ("comet_ml",), "clearml": ("clearml",), "codecarbon": ("codecarbon",),
    "dagshub": ("dagshub", "mlflow"), "dvclive": ("dvclive",), "neptune": ("neptune",), "swanlab": ("swanlab",),
    "flyte": ("flytekit",), "azure_ml": ("azureml.core",), "kubeflow": (),
}  # fmt: skip
"""Every logger, with the packages that it needs."""


def asked_for(report_to: str) -> list[str]:
    """The loggers that `report_to` names, and those that auto and all stand for: what is installed."""
    names = as_list(report_to)
    groups = {"auto": OWN[:1], "all": tuple(name for name in KNOWN if _is_usable(name))}
    implied = [name for word in names for name in groups.get(word, ()) if not _missing(KNOWN[name])]
    return [name for name in KNOWN if name in (*names, *implied)]


def check_report_to(report_to: str) -> None:
    """Refuse a logger that is asked for by name and not installed."""
    for name in as_list(report_to):
        if missing := _missing(KNOWN.get(name, ())):
            raise ConfigError(
                f"report_to names {name}, which is not installed; pip install {missing}, or leave report_to out: "
                f"metrics.jsonl is always written."
            )


def _is_usable(name: str) -> bool:
    """Whether `all` includes it: Kubeflow's needs a job that runs there, MLflow's and Comet's can be turned off."""
    variable = {"kubeflow": "KUBEFLOW_TRAINER_SERVER_URL", "comet_ml": "COMET_API_KEY"}.get(name)
    off = os.environ.get(f"DISABLE_{name.upper()}_INTEGRATION", "").upper() == "TRUE"
    return not _missing(KNOWN[name]) and not off and (variable is None or variable in os.environ)


def _missing(packages: Iterable[str]) -> str:
    return " ".join(package.replace(".", "-") for package in packages if not is_installed(package))


def is_installed(package: str) -> bool:
    """Whether a package, or a module of one, can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False  # the package of the module
