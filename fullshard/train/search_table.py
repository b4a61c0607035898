"""The result of a search for settings on the terminal: a table, and the files that run the fastest ones."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.byte_size import memory_size
from fullshard.console import Terminal
from fullshard.train.plan_search import Found, SearchResult

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
    for number, found in enumerate(shown[:FILES], 1):
        console.print()
        console.print(Text(f"run.yaml of {number}", "bold"))
        console.print(Text(found.yaml().rstrip()), soft_wrap=True)
    console.print()
    console.print(Text("With --json, every setting that fits has its file. Speeds are estimates (docs/planning.md)."))


def nothing_fits(result: SearchResult) -> list[str]:
    """What to say where nothing fits."""
    found = result.nearest
    if found is None:
        return [f"Nothing fits: the model excludes all {result.tried} settings that were tried."]
    verdict = found.estimate.verdict
    if verdict.fits is None:
        return ["The activations of this model cannot be planned, so its settings cannot be ranked. Its plan without "
                "search says why."]  # fmt: skip
    lines = [
        f"Nothing fits ({result.tried} settings were tried). What comes nearest: {found.words}. It needs "
        f"{memory_size(verdict.needs)} on each device, which has {memory_size(verdict.has)}, and "
        f"{memory_size(verdict.needs_host)} of host memory, of {memory_size(verdict.has_host)}."
    ]
    ways = []
    if verdict.needs_host > verdict.has_host:
        ways.append("nodes with more memory (host_memory)")
    if verdict.needs > verdict.has:
        ways += ["more or larger devices (num_processes, machine)", "a shorter max_length"]
        config = found.asked.config
        has = {"lora": bool(config.adapter_kind), "qlora": config.use_4bit_quantization}
        if methods := [name for name, there in has.items() if not there and name not in result.allowed]:
            ways.append(f"--allow {','.join(methods)}")
    return [*lines, f"What would help: {', '.join(ways)}."]


def _table(rows: tuple[Found, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="", pad_edge=False)
    for name in ("", "tokens/s", "step", "device memory", "host memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for number, found in enumerate(rows, 1):
        verdict = found.estimate.verdict
        table.add_row(
            str(number), f"{found.tokens_per_second:,.0f}", f"{found.estimate.time.total:.2f} s",
            memory_size(verdict.needs), memory_size(verdict.needs_host), found.words,
        )  # fmt: skip
    return table
