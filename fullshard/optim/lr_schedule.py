"""The learning rate as a function of the step: transformers' schedules by name, with their options.

Nothing here imports torch. A schedule has no state: the rate of step n is computed from n, so there is nothing to
restore when a run resumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from fullshard.config.errors import ConfigError
from fullshard.config.options import nearest

Kind = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "warmup_stable_decay", "inverse_sqrt",
    "cosine_with_restarts", "polynomial", "cosine_warmup_with_min_lr",
]  # fmt: skip
SHAPES = ("linear", "cosine", "1-sqrt")
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 0.5},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None},
    "warmup_stable_decay": {
        "num_decay_steps": None, "num_stable_steps": None, "min_lr_ratio": 0.0, "warmup_type": "linear",
        "decay_type": "cosine", "num_cycles": 0.5,
    },
    "inverse_sqrt": {"timescale": None},
    "cosine_with_restarts": {"num_cycles": 1},
    "polynomial": {"lr_end": 1e-7, "power": 1.0},
    "cosine_warmup_with_min_lr": {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None, "warmup_lr_rate": None},
}  # fmt: skip
"""The options of each schedule in `lr_scheduler_kwargs`, with their defaults."""


def check_schedule(kind: str, options: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """A schedule's options, checked and with defaults filled in; `rate` is the peak learning rate."""
    allowed = SETTINGS[kind]
    for name, value in options.items():
        if name not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ConfigError(
                f"lr_scheduler_kwargs: {kind} has no setting {name!r}{nearest(name, allowed) or ';'} {takes}."
            )
        if name.endswith("_type"):
            if value not in SHAPES:
                raise ConfigError(f"lr_scheduler_kwargs: {name} is {value!r}; expected {', '.join(SHAPES)}.")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"lr_scheduler_kwargs: {name} is {value!r}; expected a number, 0 or more.")
    settings = {**allowed, **options}
    if kind == "polynomial":
        if settings["lr_end"] >= rate > 0:
            raise ConfigError(
                f"lr_scheduler_kwargs: lr_end is {settings['lr_end']:g}; expected less than learning_rate ({rate:g})."
            )
        settings["lr_end"] = settings["lr_end"] / rate if rate else 0.0
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        if (settings["min_lr"] is None) == (settings["min_lr_rate"] is None):
            raise ConfigError(
                f"lr_scheduler_type is {kind}, which needs either min_lr (a learning rate) or min_lr_rate "
                "(a fraction of learning_rate) in lr_scheduler_kwargs."
            )
        if settings["min_lr_rate"] is None:
            settings["min_lr_rate"] = settings["min_lr"] / rate if rate else 0.0
    if kind == "warmup_stable_decay" and settings["num_decay_steps"] is None:
        raise ConfigError(
            "lr_scheduler_type is warmup_stable_decay, which needs num_decay_steps in lr_scheduler_kwargs: the steps "
            "at the end over which the learning rate falls."
        )
    return settings


def factor(kind: str, step: int, warmup: int, total: int, settings: Mapping[str, Any] | None = None) -> float:
    """The factor of the learning rate at optimizer step `step`, counted from 0; `settings` as from `check_schedule`."""
    options = SETTINGS[kind] if settings is None else settings
    if kind == "constant":
        return 1.0
    if kind == "warmup_stable_decay":
        return _stable(step, warmup, total, options)
    if step < warmup and kind == "cosine_warmup_with_min_lr":
        first = options["warmup_lr_rate"]
        return (step + 1) / warmup if first is None else first + (1 - first) * step / max(1, warmup - 1)
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "inverse_sqrt":
        scale = options["timescale"] or warmup or 10_000
        return 1 / math.sqrt((step + scale - warmup) / scale)
    done = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return max(0.0, 1 - done)
    if kind == "polynomial":
        return _above(options["lr_end"], max(0.0, 1 - done) ** options["power"])
    if kind == "cosine_with_restarts":
        return 0.0 if done >= 1 else _wave(options["num_cycles"] * done % 1, 0.5)
    if kind == "cosine_warmup_with_min_lr":
        done = (step - warmup + 1) / max(1, total - warmup)
    return max(0.0, _above(options.get("min_lr_rate") or 0.0, _wave(done, options["num_cycles"])))


def _stable(step: int, warmup: int, total: int, options: Mapping[str, Any]) -> float:
    """Warmup, constant, decay, and then the minimum."""
    falls = options["num_decay_steps"]
    level = options["num_stable_steps"] if options["num_stable_steps"] is not None else total - warmup - falls
    floor = options["min_lr_ratio"]
    if step < warmup:
        done = step / max(1, warmup)
        shapes = {"linear": done, "cosine": 1 - _wave(done, 0.5), "1-sqrt": 1 - math.sqrt(1 - done)}
        return max(0.0, _above(floor, shapes[options["warmup_type"]]))
    if step < warmup + level:
        return 1.0
    if step >= warmup + level + falls:
        return floor
    done = (step - warmup - level) / max(1, falls)
    shapes = {"linear": 1 - done, "cosine": _wave(done, options["num_cycles"]), "1-sqrt": 1 - math.sqrt(done)}
    return max(0.0, _above(floor, shapes[options["decay_type"]]))


def _wave(done: float, cycles: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * cycles * 2 * done))


def _above(floor: float, value: float) -> float:
    return value * (1 - floor) + floor
