"""The contents of a checkpoint, or of a directory of checkpoints, for `fullshard inspect`. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    find_problems,
    published_steps,
    read_manifest,
    step_name,
    unpublished_dirs,
)
from fullshard.config.byte_size import file_size
from fullshard.config.errors import CheckpointError


def inspect_checkpoint(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """Describe one checkpoint, or all in a directory. `verify` compares the checksum of every file."""
    directory = Path(path)
    steps = published_steps(directory) if directory.is_dir() and not (directory / MANIFEST).is_file() else []
    if not steps:
        return _facts(directory, read_manifest(directory), verify)
    facts_of_each = []
    for step in steps:
        place = directory / step_name(step)
        try:
            facts_of_each.append(_facts(place, read_manifest(place), verify))
        except CheckpointError as error:
            facts_of_each.append({"path": str(place), "step": step, "health": "damaged", "problems": [str(error)]})
    intact = [facts["step"] for facts in facts_of_each if facts["health"] != "damaged"]
    return {
        "path": str(directory),
        "steps": steps,
        "latest": steps[-1],
        "latest_whole": intact[-1] if intact else None,
        "unfinished": unpublished_dirs(directory),
        "bytes": sum(facts.get("bytes", 0) for facts in facts_of_each),
        "checkpoints": facts_of_each,
    }


def _facts(directory: Path, manifest: Manifest, verify: bool) -> dict[str, Any]:
    problems = find_problems(directory, manifest, verify)
    return {
        "path": str(directory),
        "step": manifest.step,
        "created": manifest.created,
        "health": "damaged" if problems else "whole (checksums compared)" if verify else "files present",
        "problems": problems,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "states": {name: _state(name, entry, manifest) for name, entry in manifest.states.items()},
    }


def _state(name: str, entry: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    own = [tensor for key, tensor in manifest.tensors.items() if key.startswith(f"{name}/")]
    facts = {"kind": entry["kind"], "tensors": len(own), "bytes": sum(tensor.bytes for tensor in own)}
    if "class" in entry:
        facts["class"] = entry["class"]
    if entry["kind"] == "model":
        plan = entry.get("plan")
        facts["mesh"] = entry.get("mesh")
        if plan is not None:
            facts["strategy"] = plan["strategy"]
            facts["units"] = len(plan["units"])
            facts["parameters"] = sum(len(unit["parameters"]) for unit in plan["units"])
            facts["trainable"] = sum(p["trainable"] for unit in plan["units"] for p in unit["parameters"])
        facts["left_out"] = len(entry["left_out"])
        facts["base"] = entry["base"]
        if entry.get("adapters"):
            facts["adapters"] = entry["adapters"]
    elif entry["kind"] == "optimizer":
        facts["groups"] = len(entry["groups"])
        facts["parameters"] = len(entry["state"])
    elif "ranks" in entry:
        facts["per_rank"] = len(entry["ranks"])
    elif entry["kind"] == "value":
        facts["value"] = entry["value"]
    return facts


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The description as rows of a table."""
    if "checkpoints" in facts:
        rows = [("directory", facts["path"]), ("steps", ", ".join(map(str, facts["steps"])))]
        rows += [("latest", str(facts["latest"])), ("size", file_size(facts["bytes"]))]
        if facts["unfinished"]:
            rows.append(("unfinished saves", ", ".join(facts["unfinished"])))
        for one in facts["checkpoints"]:
            rows += [("", ""), *lines(one)]
        return rows
    rows = [("checkpoint", facts["path"]), ("health", facts["health"])]
    rows += [("problem", problem) for problem in facts["problems"]]
    if "states" not in facts:
        return rows
    rows += [
        ("step", "–" if facts["step"] is None else str(facts["step"])),
        ("created", facts["created"]),
        ("saved on", f"{facts['world_size']} rank(s)"),
        ("size", f"{file_size(facts['bytes'])} in {facts['files']} file(s)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
    ]
    return rows + [(name, _describe_state(state)) for name, state in facts["states"].items()]


def _describe_state(state: dict[str, Any]) -> str:
    parts = [state.get("class") or state["kind"]]
    if state["tensors"]:
        parts.append(f"{state['tensors']} tensor(s), {file_size(state['bytes'])}")
    if state.get("mesh"):
        parts.append("mesh " + ", ".join(f"{axis}={count}" for axis, count in state["mesh"].items()))
    if "strategy" in state:
        parts.append(
            f"{state['strategy']}, {state['units']} unit(s), {state['trainable']} of {state['parameters']} parameters "
            f"train"
        )
    if state.get("left_out"):
        parts.append(f"{state['left_out']} frozen parameters left to {state['base']['path']}")
    if state.get("adapters"):
        parts.append(f"adapters {', '.join(state['adapters'])}")
    if "groups" in state:
        parts.append(f"{state['groups']} group(s), state of {state['parameters']} parameters")
    if "per_rank" in state:
        parts.append("differs from rank to rank")
    if "value" in state:
        shown = str(state["value"])
        parts.append(shown if len(shown) <= 60 else shown[:57] + "...")
    return "; ".join(parts)
