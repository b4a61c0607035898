"""What foreign text can do to a terminal: nothing, wherever it is printed."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table

from fullshard.config.errors import DataError
from fullshard.data.encode import TextSettings
from fullshard.data.loader import load_table
from fullshard.data.sources import row_source
from fullshard.distributed import progress, rank_logging, terminal_text
from fullshard.distributed.console import Terminal
from fullshard.distributed.ranks import agree
from fullshard.distributed.terminal_text import print_text, visible
from fullshard.launch import chat, command, preview, worker
from fullshard.launch.resolve import resolve
from fullshard.report import command as report
from fullshard.report import terminal
from fullshard.report.records import SETTINGS_FILE, Sample
from fullshard.report.reporter import Reporter
from tests.data.tiny import make_tokenizer
from tests.pool import ROOT, ranks

PIECES = {
    "color": "\x1b[38;5;201mpink",
    "clear": "\x1b[2J\x1b[H",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "C1": "\x9b31mred\x9d0;title\x9c",
    "overwrite": "safe\rgone\x08\x08\x0b\x0c",
    "bidirectional": "\u202egnp.exe\u202c \u2066x\u2069 \u200f\u200e\u061c",
    "invisible": "a\u200bb\u2060c\ufeffd\u00ad\U000e0041",
    "lines": "one\u2028two\u2029three\x85four",
    "markup": "[link=http://evil.example]here[/link] [bold]b[/bold] :smile:",
    "others": "\x00\x7f\x1c\x9f",
}
HOSTILE = "begin " + " ".join(PIECES.values()) + " end"
NAME = f"begin {PIECES['color']}{PIECES['clear']}{PIECES['clipboard']}{PIECES['bidirectional']}{PIECES['overwrite']}[b]"
"""A name that a file can have."""


NUMBER_SIGNS = (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2)
"""Signs of Arabic and Syriac that are format characters, and visible."""


def assert_harmless(written: str, shown: str | None = "begin", styles: bool = False) -> None:
    """Nothing but lines of visible characters; with `styles`, rich's own colors and cursor movements too."""
    if styles:
        written = re.sub(r"\x1b\[(?!38;5;201m)[0-9;]*[mAK]|\x1b\[2K|\r(?=\x1b|\n|$)", "", written)
    kept = {"\n", "\t", "\u200c", "\u200d", *map(chr, NUMBER_SIGNS)}
    bad = {c for c in written if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in kept}
    assert not bad, (bad, written)
    assert shown is None or shown in written, written


def test_each_kind_is_written_out() -> None:
    for text in (*PIECES.values(), HOSTILE, "".join(map(chr, range(0x3000))), "\ud800\udfff"):
        assert_harmless(visible(text), None)
        assert visible(visible(text)) == visible(text)
    assert visible("\x1b[2J\x9b\u202e\r") == "\\x1b[2J\\x9b\\u202e\\r"
    for text in (
        "a\tb\nc",
        "日本\u3000語",
        "👩\u200d👩\u200d👧",
        "می\u200cخواهم",
        "e\u0301",
        "\u00a0",
        "🇩🇪",
        "❤\ufe0f",
    ):
        assert visible(text) == text


# --- the mechanism --------------------------------------------------------------------------------------------------

PRINTS = {
    ("fullshard/distributed/terminal_text.py", "print_text"): "the one place",
    ("fullshard/distributed/rank_logging.py", "print0"): "the print of a script",
    ("fullshard/distributed/rank_logging.py", "print_rank"): "the print of a script",
    ("fullshard/xm.py", "master_print"): "the print of a script",
    ("fullshard/launch/worker.py", "_run"): "what a script gives to sys.exit, as Python prints it",
    ("fullshard/launch/chat.py", "_write"): "an answer in a pipe or a file, which is data",
}
OWN_CONSOLES = {"fullshard/distributed/console.py"}


def prints(path: Path) -> Iterator[tuple[str, int]]:
    """The functions that print by themselves, with the line."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "print" or re.search(r"(^|\.)std(out|err)(\.buffer)?\.write(lines)?$", called) or called in (
            "typer.echo", "typer.secho", "click.echo", "Console", "rich.print",
        ):  # fmt: skip
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            yield max(around, key=lambda f: f.lineno).name if around else "", node.lineno


def test_nothing_else_prints() -> None:
    found = {}
    for path in sorted((ROOT / "fullshard").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for function, line in prints(path):
            found[name, function] = line
    assert found.keys() - PRINTS.keys() == set(), "use terminal_text.print_text, or console.Terminal"
    assert PRINTS.keys() - found.keys() == set(), "no longer there"


def test_consoles_take_text_as_it_is() -> None:
    for color in (False, True):
        file = io.StringIO()
        console = Terminal(file=file, width=4000, force_terminal=color, color_system="truecolor" if color else None)
        table = Table(title=HOSTILE)
        table.add_column(HOSTILE)
        table.add_row(HOSTILE)
        console.print(HOSTILE)
        console.print(table)
        console.rule(HOSTILE)
        with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
            bar.add_task(HOSTILE)
        assert_harmless(file.getvalue().replace("\x1b[?25l", ""), "[link=http://evil.example]here[/link]", color)
        assert "]8;" not in file.getvalue().replace("\\x1b]8;", "")


# --- the places -----------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def in_preview(folder: Path) -> None:
    rows = [{"text": HOSTILE}, {"text": HOSTILE * 2}, {HOSTILE: 1}, {"messages": HOSTILE}]
    reading = preview_reading()
    table = load_table(row_source(rows, NAME), make_tokenizer(), TextSettings(reading=reading), str(folder))
    for marks in (None, "truecolor"):
        console = Terminal(width=200, color_system=marks, force_terminal=marks is not None)
        preview.show_rows(table, make_tokenizer(), 2, console)
        preview.show_statistics(NAME, table, console)


def preview_reading() -> Any:
    from fullshard.data.row_formats import Reading

    return Reading(on_bad_row="skip")


def in_chat(folder: Path) -> None:
    sampling = SimpleNamespace(temperature=0.0, top_p=1.0)
    fake: Any = SimpleNamespace(templated=True, system=HOSTILE, sampling=sampling, turns=[], messages=[])

    def ask(text: str, show: Callable[[str], None], stopped: Any = None) -> Any:
        for character in HOSTILE:  # as tokens of an answer come
            show(character)
        return SimpleNamespace(text=HOSTILE, tokens=1, stopped="end", prompt_tokens=1)

    fake.ask = ask
    lines = iter([HOSTILE, "/system", f"/{HOSTILE}", "/exit"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda prompt: next(lines))
        chat.talk(fake, NAME)
    chat.one_shot(fake, "prompt")


def in_samples(folder: Path) -> None:
    reporter = Reporter(folder, 1, "plain")
    reporter.samples(1, [Sample(1, HOSTILE, HOSTILE, HOSTILE)])
    reporter.say(HOSTILE)
    reporter.close()


def in_progress(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "PLAIN_LINE_EVERY", -1.0)
        for mode in ("plain", "live"):
            with progress.TokenizingProgress(NAME, mode) as shown:
                shown(1, 2)
    with progress.Bar(NAME, 10) as bar:
        bar.at(5)
    bar_above = terminal.LiveBar(terminal.Clock(10, 0), 0)
    bar_above.print_above(HOSTILE)
    bar_above.close()


def in_names_of_models(folder: Path) -> None:
    (folder / NAME).write_text("")
    settings = resolve(["--num_processes", "1", "--cpu", NAME, NAME])
    command.show_settings(settings)
    from fullshard.report.plan_terminal import _text

    Terminal().print(_text(NAME))


def in_errors_of_ranks(folder: Path) -> None:
    command.say(f"rank 1: {HOSTILE}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(worker.ERROR_FILE, raising=False)
        worker._report(HOSTILE, "")


def in_report(folder: Path) -> None:
    run = folder / NAME
    run.mkdir()
    (run / SETTINGS_FILE).write_text(json.dumps({"settings": {}, "about": {"model": HOSTILE}}))
    report.report([str(run)], report.ReportOptions())


def in_log_lines(folder: Path) -> None:
    logger = rank_logging.get_logger()
    logger.warning("%s", HOSTILE)
    rank_logging.warn_once(HOSTILE, HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("failed")


PLACES = (
    in_preview, in_chat, in_samples, in_progress, in_names_of_models, in_errors_of_ranks, in_report, in_log_lines,
)  # fmt: skip


@pytest.mark.parametrize(
    ("place", "on_terminal"),
    [
        pytest.param(place, on_terminal, id=f"{place.__name__}-{'terminal' if on_terminal else 'pipe'}")
        for place in PLACES
        for on_terminal in (False, True)
        if on_terminal or place is not in_chat  # an answer in a pipe is data
    ],
)
def test_hostile_text_in(
    place: Callable[[Path], None], on_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.chdir(tmp_path)
    stream = Screen() if on_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    place(tmp_path)
    monkeypatch.undo()
    assert_harmless(stream.getvalue(), "\\x1b[", styles=True)


@ranks(2)
def test_an_error_of_another_rank() -> None:
    def job() -> None:
        if rank_logging.rank() == 1:
            raise DataError(HOSTILE)

    with pytest.raises(DataError) as error:
        agree(job, "test")
    file = io.StringIO()
    print_text(f"fullshard: {error.value}", file)
    assert_harmless(file.getvalue())


@pytest.mark.slow
def test_a_launched_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from fullshard.config.errors import DataError\nraise DataError({HOSTILE!r})\n")
    words = [sys.executable, "-m", "fullshard", "launch", "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert_harmless(done.stderr, "\\x1b]8;;http://evil.example")


@pytest.mark.slow
@pytest.mark.parametrize("command_name", ["sft", "plan", "show", "chat", "report", "export", "checkpoint"])
def test_commands_with_hostile_names(command_name: str, tmp_path: Path) -> None:
    words = [command_name, NAME] + ([str(tmp_path / "out")] if command_name == "export" else [])
    words += ["--dataset_name", NAME] if command_name == "sft" else []
    done = subprocess.run([sys.executable, "-m", "fullshard", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert_harmless(done.stdout + done.stderr, None)


def test_a_stream_that_is_given() -> None:
    file = io.StringIO()
    print_text(HOSTILE, file, end="")
    assert file.getvalue() == visible(HOSTILE) == terminal_text.visible(HOSTILE)
