"""Finds the sharding plan that is stored at a path: in a checkpoint, in the newest checkpoint of a run, or in a file.

torch is imported only once there is a plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.manifest import MANIFEST, published_steps, read_manifest, step_name
from fullshard.config.errors import ConfigError
from fullshard.sft.run_dir import CHECKPOINTS, PLAN, SETTINGS

if TYPE_CHECKING:
    from fullshard.fsdp.plan import ShardingPlan


@dataclass(frozen=True)
class StoredPlan:
    """A plan and where it was found."""

    title: str
    plan: ShardingPlan
    place: Path
    """The checkpoint or file with the plan."""
    estimate: dict[str, Any] | None = None
    """What the run had estimated before it started, if it has recorded that."""


def find_plan(name: str) -> StoredPlan | None:
    """The plan stored at a path; None if there is something to plan instead: a model, its config.json, settings."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return _from_file(path)
    if not path.is_dir():
        return None
    if (path / MANIFEST).is_file():
        return _from_checkpoint(path)
    checkpoints = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if steps := published_steps(checkpoints):
        return _from_checkpoint(checkpoints / step_name(steps[-1]))
    if (path / SETTINGS).is_file():
        raise ConfigError(
            f"{path} is a run without checkpoints, which would hold its plan; show its model with the run's settings: "
            f"fullshard show RUN.YAML."
        )
    return None


def _from_checkpoint(path: Path) -> StoredPlan:
    models = [entry for entry in read_manifest(path).states.values() if entry["kind"] == "model"]
    plans = [entry["plan"] for entry in models if entry.get("plan") is not None]
    if len(plans) != 1:
        raise ConfigError(
            f"the checkpoint {path} contains {len(models)} models, {len(plans)} of them sharded; expected one sharded "
            f"model."
        )
    above = path.absolute().parent
    run = next((folder for folder in (above.parent, above) if (folder / SETTINGS).is_file()), None)
    estimate = _read(run / PLAN) if run is not None and (run / PLAN).is_file() else None
    return StoredPlan(str(path), _parse(plans[0], path / MANIFEST), path, estimate)


def _from_file(path: Path) -> StoredPlan | None:
    data = _read(path)
    if data is None or not data.keys() & {"units", "strategy"}:
        return None
    return StoredPlan(str(path), _parse(data, path), path)


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _parse(data: dict[str, Any], path: Path) -> ShardingPlan:
    from fullshard.fsdp.plan import ShardingPlan

    try:
        return ShardingPlan.from_json(json.dumps(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no sharding plan that can be read ({type(error).__name__}: {error}); expected the plan of a "
            f"checkpoint, or a file with ShardingPlan.to_json()."
        ) from None
