"""An estimate on the terminal: the verdict in words, then tables of memory, traffic and time."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.activations.levels import describe_levels
from fullshard.config.byte_size import memory_size
from fullshard.distributed.console import Terminal
from fullshard.planner.estimate import Estimate
from fullshard.planner.longest import LongestRows
from fullshard.planner.memory import MemoryEstimate
from fullshard.planner.search import Candidate, SearchResult

ROWS, FILES = 12, 3
"""How many settings are listed, and how many are shown as files."""


def print_search(result: SearchResult, console: Console | None = None) -> None:
    """Print what a search has found; without colors unless the output is a terminal."""
    console = console or Terminal()
    if not result.fitting:
        for line in nothing_fits(result):
            console.print(Text(line))
        return
    shown = result.fitting[:ROWS]
    console.print(Text(f"{len(result.fitting)} settings fit ({result.tried} were tried). The fastest:", "bold green"))
    console.print()
    console.print(_table(shown))
    for number, candidate in enumerate(shown[:FILES], 1):
        console.print()
        console.print(Text(f"run.yaml of {number}", "bold"))
        console.print(Text(candidate.yaml().rstrip()), soft_wrap=True)
    console.print()
    console.print(Text("With --json, every setting that fits has its file. Speeds are estimates (docs/planning.md)."))


def nothing_fits(result: SearchResult) -> list[str]:
    """What to say where nothing fits."""
    candidate = result.nearest
    if candidate is None:
        return [f"Nothing fits: the model excludes all {result.tried} settings that were tried."]
    verdict = candidate.estimate.verdict
    if verdict.fits is None:
        return ["The activations of this model cannot be planned, so its settings cannot be ranked. Its plan without "
                "search says why."]  # fmt: skip
    lines = [
        f"Nothing fits ({result.tried} settings were tried). What comes nearest: {candidate.words}. It needs "
        f"{memory_size(verdict.needs)} on each device, which has {memory_size(verdict.has)}, and "
        f"{memory_size(verdict.needs_host)} of host memory, of {memory_size(verdict.has_host)}."
    ]
    ways = []
    if verdict.needs_host > verdict.has_host:
        ways.append("nodes with more memory (host_memory)")
    if verdict.needs > verdict.has:
        ways += ["more or larger devices (num_processes, machine)", "a shorter max_length"]
        config = candidate.requested.config
        has = {"lora": bool(config.adapter_kind), "qlora": config.use_4bit_quantization}
        if methods := [name for name, there in has.items() if not there and name not in result.allowed]:
            ways.append(f"--allow {','.join(methods)}")
    return [*lines, f"What would help: {', '.join(ways)}."]


def _table(rows: tuple[Candidate, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="", pad_edge=False)
    for name in ("", "tokens/s", "step", "device memory", "host memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for number, candidate in enumerate(rows, 1):
        verdict = candidate.estimate.verdict
        table.add_row(
            str(number), f"{candidate.tokens_per_second:,.0f}", f"{candidate.estimate.time.total:.2f} s",
            memory_size(verdict.needs), memory_size(verdict.needs_host), candidate.words,
        )  # fmt: skip
    return table


GIB, MIB = 1024**3, 1024**2
WIDE = 76
"""Columns that a table with all moments takes."""
PARTS = (
    "shards", "buffers", "gathered", "communication", "gradients", "optimizer", "activations", "logits", "workspace",
)  # fmt: skip
"""The order of parts of memory."""
COLORS = {True: "bold green", False: "bold red", None: "bold yellow"}


def print_longest(result: LongestRows, console: Console | None = None) -> None:
    """Print how long rows can be; without colors unless the output is a terminal."""
    console = console or Terminal()
    first, rows = result.stages[0], result.request.config.per_device_train_batch_size
    verdict = first.estimate.verdict
    if not verdict.certain:
        console.print(Text("\n".join(verdict.sentences())))
        return
    if first.length:
        console.print(
            Text(f"The longest rows that fit: {first.length:,} tokens, {rows} in a micro-batch.", "bold green")
        )
    else:
        console.print(Text("No rows fit with these settings.", "bold red"))
    console.print(Text(f"What limits them is {first.limit}."))
    longest = result.stages[-1].length
    if result.positions is not None and longest > result.positions:
        console.print(Text(f"The model has {result.positions:,} positions; for longer documents see rope_scaling."))
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="", pad_edge=False)
    for name in ("longest", "tokens/s", "device memory", "host memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for stage in result.stages:
        needs = stage.estimate.verdict
        table.add_row(
            f"{stage.length:,}", f"{stage.estimate.time.tokens_per_second:,.0f}", memory_size(needs.needs),
            memory_size(needs.needs_host), stage.words.replace(", ", "\n") or "as they are",
        )  # fmt: skip
    console.print(table)
    if len(result.stages) > 1:
        console.print()
        console.print(Text(f"What limits the last is {result.stages[-1].limit}."))


def print_estimate(estimate: Estimate, console: Console | None = None) -> None:
    """Print an estimate; without colors unless the output is a terminal."""
    console = console or Terminal()
    first, *others = estimate.verdict.sentences()
    console.print(Text(first, COLORS[estimate.verdict.fits]))
    for sentence in others:
        console.print(Text(sentence))
    console.print()
    console.print(_facts(summary(estimate)))
    if estimate.verdict.certain:
        _print_numbers(estimate, console)
    console.print()
    console.print(Text("Assumed", "bold"))
    for line in estimate.assumptions:
        console.print(_item(line))
    console.print()
    console.print(Text(planning_time(estimate), "dim"))


def _print_numbers(estimate: Estimate, console: Console) -> None:
    """Memory, traffic and time."""
    console.print()
    for table in memory_tables(estimate.memory, console.width):
        console.print(table)
    if reserved := estimate.memory.reserved:
        console.print(f"and {memory_size(reserved)} reserved: context, communicators, and a margin for fragmentation")
    for title, rows in sections(estimate).items():
        console.print()
        console.print(Text(title, "bold"))
        console.print(_facts(rows))


def summary(estimate: Estimate) -> dict[str, str]:
    """What was planned."""
    machine, batch = estimate.machine, estimate.batch
    mesh, experts = (
        " × ".join(f"{size} {name}" for name, size in axes) for axes in (estimate.plan.axes, estimate.plan.expert_axes)
    )
    of_experts = f"; experts on {experts}" if experts else ""
    packed = "packed " if batch.packed else ""
    micro = f" × {batch.accumulation} micro-batches" if batch.accumulation > 1 else ""
    groups, ranks = estimate.plan.data_size, ""
    if machine.num_processes > 1:
        each = machine.num_processes // groups
        ranks = f" × {groups} devices" if each == 1 else f" × {groups} groups of {each} devices"
    return {
        "model": f"{estimate.model}: {count_text(estimate.parameters)} parameters, "
        f"{count_text(estimate.trained)} trained",
        "machine": f"{machine}; {memory_size(machine.device_memory)} per device, "
        f"{memory_size(machine.host_memory)} of host memory per node",
        "sharding": f"{estimate.plan.strategy} on {mesh}{of_experts}, {len(estimate.plan.units)} units",
        "batch": f"{batch.rows} {packed}rows × {batch.length:,} tokens{micro}{ranks}: {estimate.tokens:,} tokens",
        "layers": describe_levels(estimate.levels),
    }


def memory_tables(memory: MemoryEstimate, width: int) -> list[Table]:
    """Memory of one device, by part and moment; in a narrow window in two tables, one below the other."""
    unit, name = (GIB, "GiB") if memory.peak >= GIB else (MIB, "MiB")
    largest: dict[str, int] = {}
    for sizes in memory.moments.values():
        for part, size in sizes.items():
            largest[part] = max(size, largest.get(part, 0))
    parts = sorted((part for part in largest if largest[part] >= unit / 200), key=_place)
    moments = list(memory.moments)
    each = len(moments) if width >= WIDE else -(-len(moments) // 2)
    tables = []
    for first in range(0, len(moments), each):
        table = Table(title=f"Memory of one device, {name}", title_style="bold", title_justify="left", box=None,
                      padding=(0, 2, 0, 0), header_style="", pad_edge=False)  # fmt: skip
        table.add_column("", no_wrap=True)
        shown = moments[first : first + each]
        for moment in shown:
            table.add_column(moment, justify="right", style="bold" if moment == memory.peak_moment else "")
        for part in parts:
            table.add_row(part, *(_number(memory.moments[moment].get(part, 0), unit) for moment in shown))
        table.add_row(
            "allocated", *(_number(sum(memory.moments[moment].values()), unit) for moment in shown), style="bold"
        )
        tables.append(table)
    return tables


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else len(PARTS)


def sections(estimate: Estimate) -> dict[str, dict[str, str]]:
    """Everything besides device memory, as rows of text by title."""
    traffic, rows = estimate.traffic, dict[str, dict[str, str]]()
    if estimate.memory.host:
        host = {**estimate.memory.host, "total": estimate.memory.host_total}
        rows["Host memory per node"] = _sizes(host)
    sent = {
        **{f"{kind}, inside the node": size for kind, size in traffic.inside.items()},
        **{f"{kind}, to other nodes": size for kind, size in traffic.across.items()},
        "from host memory": traffic.from_host, "to host memory": traffic.to_host,
    }  # fmt: skip
    least = sum(sent.values()) / 1000
    shown = {name: size for name, size in sent.items() if size > least}
    rows["Sent by each device in a step"] = _sizes(shown) or {"nothing": ""}
    rows["Time of a step"] = time_rows(estimate)
    return rows


def time_rows(estimate: Estimate) -> dict[str, str]:
    """The estimate of a step's time, by part."""
    time = estimate.time
    return {
        **{part: duration_text(seconds) for part, seconds in time.parts.items()},
        "total": f"{duration_text(time.total)}, {time.tokens_per_second:,.0f} tokens per second on all devices",
        "FLOPs": f"{count_text(estimate.flops_per_token)} per token, without recomputation",
    }


def duration_text(seconds: float) -> str:
    """A time such as 1.53 s or 12.4 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def planning_time(estimate: Estimate) -> str:
    """How long planning took."""
    parts = {what: seconds for what, seconds in estimate.seconds.items() if what != "imports"}
    listed = ", ".join(f"{what} {duration_text(seconds)}" for what, seconds in parts.items())
    imports = f"; imports {duration_text(estimate.seconds['imports'])}" if "imports" in estimate.seconds else ""
    return f"Planned in {duration_text(sum(parts.values()))}: {listed}{imports}."


def count_text(number: float) -> str:
    """A count such as 8.03 billion."""
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return f"{number:,}"


def _sizes(rows: Mapping[str, int]) -> dict[str, str]:
    return {name: memory_size(size) for name, size in rows.items()}


def _number(size: int, unit: int) -> str:
    return f"{size / unit:,.2f}" if size >= unit / 200 else "–"  # others show as 0.00


def _facts(rows: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _item(line: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_row("-", line)
    return table
