"""`fullshard show`: how a model lies over the ranks, in the terminal, as a picture (SVG) or as a page (HTML).

A model is planned like a run of `fullshard sft`. A checkpoint, a run's folder and a file with a plan have theirs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.manifest import MANIFEST, published_steps, read_manifest, step_name
from fullshard.config.byte_size import file_size
from fullshard.config.errors import ConfigError
from fullshard.config.options import Option, option, options_of, parse_flags
from fullshard.config.paths import replace_text, within
from fullshard.distributed.terminal_text import print_text
from fullshard.launch.help_text import HELP, show_help
from fullshard.launch.plan_command import read_request, with_data
from fullshard.launch.sft_command import separate
from fullshard.sft.output_dir import CHECKPOINTS, PLAN, SETTINGS

if TYPE_CHECKING:
    from fullshard.fsdp.plan import ShardingPlan
    from fullshard.planner.engine_memory import Schedule
    from fullshard.planner.request import PlanRequest
    from fullshard.report.step_memory import StepMemory

SUFFIXES = (".svg", ".html")


@dataclass(frozen=True)
class ShowOptions:
    """What is drawn, and where to."""

    out: str | None = option(None, metavar="FILE.svg|FILE.html")
    """Write a picture or a page instead of printing."""
    units: str | None = option(None, metavar="all|NAME,…")
    """Units to show, by name or pattern (such as *.0). Without it all are shown, those that are alike in one row."""
    ranks: str | None = option(None, metavar="all|0-7,12")
    """Ranks to show in a column each. Without it all are shown, and many of them folded into few columns."""
    json: bool = False
    """Print one JSON object; docs/show.md describes it."""


@dataclass(frozen=True)
class StoredOptions:
    """What can be set for a plan that exists already."""

    gpus_per_node: int | None = None
    """Ranks in one node. Without it all are in one."""


@dataclass(frozen=True)
class Shown:
    """A plan to draw, and what is known about its run."""

    title: str
    plan: ShardingPlan
    ranks_per_node: int | None
    schedule: Schedule | None
    memory: StepMemory | None
    """None if nothing but the plan is known."""


def show(words: Sequence[str]) -> int:
    """Run `fullshard show` with these arguments; returns the exit code."""
    if not words or any(word in HELP for word in words):
        show_show_help()
        return 0
    options, rest = read_options(words)
    out = check_out(options.out) if options.out is not None else None
    stored = find_plan(rest[0]) if rest and not rest[0].startswith("-") else None
    if stored is not None and out is not None and within(out, stored.place):
        raise ConfigError(
            f"--out {out} is inside {stored.place}, and inputs are never written to; choose another place."
        )
    shown = _from_store(stored, rest[1:]) if stored is not None else _from_estimate(read_request(rest)[0])
    _draw(shown, options, out)
    return 0


def read_options(words: Sequence[str]) -> tuple[ShowOptions, list[str]]:
    """The command's own options, and the words that `fullshard plan` reads."""
    rest, mine = separate(words, _by_name(options_of(ShowOptions)))
    return ShowOptions(**parse_flags(mine, options_of(ShowOptions), "show").values), rest


def _by_name(options: Sequence[Option]) -> dict[str, Option]:
    return {name: one for one in options for name in (one.key, *one.flags)}


def check_out(name: str) -> Path:
    """The file to write: of a known kind, in a folder that exists."""
    path = Path(name).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {name}: expected a file that ends in {' or '.join(SUFFIXES)}.")
    if path.is_dir():
        raise ConfigError(f"--out {name} is a folder; expected a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {name}: the folder {path.parent} does not exist.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {name}: the folder {path.parent} cannot be written to.")
    return path


# --- what is shown ----------------------------------------------------------------------------------------------------


def _from_store(stored: StoredPlan, words: Sequence[str]) -> Shown:
    stored_options = options_of(StoredOptions)
    others, mine = separate(words, _by_name(stored_options))
    if others:
        raise ConfigError(
            f"show: {stored.place} has a plan already, which settings do not change: leave out {others[0]}, or show "
            f"the model instead."
        )
    per_node = StoredOptions(**parse_flags(mine, stored_options, "show").values).gpus_per_node
    if per_node is not None and per_node < 1:
        raise ConfigError(f"--gpus_per_node is {per_node}; expected 1 or more.")
    estimate = stored.estimate
    memory = _memory_of_run(estimate) if estimate is not None else None
    per_node = per_node or (estimate or {}).get("machine", {}).get("gpus_per_node")
    return Shown(stored.title, stored.plan, per_node, None, memory)


def _memory_of_run(estimate: dict[str, Any]) -> StepMemory | None:
    """The memory in a run's `plan.json`; None if it is of another format."""
    from fullshard.report.step_memory import StepMemory

    try:
        memory = estimate["memory"]
        timeline = tuple((str(what), int(size)) for what, size in memory["timeline"])
        moments = {name: {part: int(size) for part, size in own.items()} for name, own in memory["moments"].items()}
        machine, host = estimate["machine"], {part: int(size) for part, size in memory["host"].items()}
        return StepMemory(
            moments, timeline, int(memory["reserved"]), machine["device_memory"], host, machine["host_memory"]
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _from_estimate(request: PlanRequest) -> Shown:
    from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy
    from fullshard.planner.engine_memory import Schedule
    from fullshard.planner.estimate import Estimator
    from fullshard.report.step_memory import StepMemory

    estimate = Estimator()(with_data(request))
    engine, machine, memory = request.engine, estimate.machine, estimate.memory
    ahead = BackwardPrefetch.of(engine.backward_prefetch or BackwardPrefetch.BACKWARD_PRE)
    return Shown(
        f"{estimate.model} on {machine.num_processes:,} × {machine.name}",
        estimate.plan,
        machine.gpus_per_node,
        Schedule(ShardingStrategy[estimate.plan.strategy], engine.forward_prefetch is not False, ahead),
        StepMemory(
            memory.moments, memory.timeline, memory.reserved, machine.device_memory, memory.host, machine.host_memory,
            tuple(note for note in estimate.assumptions if note not in estimate.time.assumptions),
        ),
    )  # fmt: skip


# --- drawing ----------------------------------------------------------------------------------------------------------


def _draw(shown: Shown, options: ShowOptions, out: Path | None) -> None:
    from fullshard.planner.engine_memory import gathered_timeline
    from fullshard.planner.memory import memory_of_plan
    from fullshard.report.plan_view import view_plan

    view = view_plan(shown.plan, shown.ranks_per_node, ranks=options.ranks, units=options.units)
    gathered = gathered_timeline(shown.plan, shown.schedule)
    memory = shown.memory or memory_of_plan(shown.plan, gathered)
    if out is not None:
        from fullshard.report.plan_charts import plan_charts
        from fullshard.report.plan_page import plan_page
        from fullshard.report.plan_svg import plan_svg

        page = out.suffix.lower() == ".html"
        text = (
            plan_page(shown.title, view, gathered, memory)
            if page
            else plan_svg(view, shown.title, plan_charts(gathered, memory))
        )
        try:
            replace_text(out, text)
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from None
        if not options.json:
            print_text(f"{'page' if page else 'picture'} written to {out} ({file_size(out.stat().st_size)})")
    if options.json:
        from fullshard.report.plan_page import plan_facts

        print_text(json.dumps(plan_facts(shown.title, view, gathered, memory)))
    elif out is None:
        from fullshard.report.plan_terminal import print_plan

        print_plan(shown.title, view, gathered, memory)


def show_show_help() -> None:
    """The flags of `fullshard show`."""
    show_help(
        "fullshard show MODEL_OR_RUN [flags] [flags of fullshard plan]",
        "Shows how a model lies over the ranks: the mesh with its nodes and replicas, the units in order, which rank "
        "holds what of each parameter, the gathered bytes over one step, and the memory of a device by part.\n\n"
        "MODEL is what fullshard plan takes, with the same flags: a folder, a name on the hub, a config.json, or a "
        "RUN.YAML. A checkpoint, the folder of a run with checkpoints, and a file with ShardingPlan.to_json() are "
        "shown as they are; --gpus_per_node sets how many of their ranks are in a node. For example:\n\n"
        "fullshard show meta-llama/Llama-3.1-8B --machine h100-80gb --num_processes 16 --out layout.svg",
        {"Flags": options_of(ShowOptions)},
    )


# --- stored plans -----------------------------------------------------------------------------------------------------


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
    content = _read(path)
    if content is None or not content.keys() & {"units", "strategy"}:
        return None
    return StoredPlan(str(path), _parse(content, path), path)


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _parse(plan: dict[str, Any], path: Path) -> ShardingPlan:
    from fullshard.fsdp.plan import ShardingPlan

    try:
        return ShardingPlan.from_json(json.dumps(plan))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no sharding plan that can be read ({type(error).__name__}: {error}); expected the plan of a "
            f"checkpoint, or a file with ShardingPlan.to_json()."
        ) from None
