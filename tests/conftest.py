"""What all tests share: hypothesis profile, terminal, Triton's interpreter, reasons to skip, browser, worker pools."""

from __future__ import annotations

import collections
import importlib.util
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import tests.profile  # noqa: F401 - loads it
from fullshard.config import redaction
from tests import pool
from tests.browser import VARIABLE, Browser, BrowserError, find_browser

ORACLES = (
    "hypothesis", "bitsandbytes", "expecttest", "datasets", "accelerate", "trl", "tensorboard", "triton", "vl_convert",
)  # fmt: skip
"""Packages that only tests need. `make test-gpu` and `make test-xla` skip the modules that import one that is missing;
`make test` installs them all."""
REASONS = (
    "needs a GPU", "needs a browser", "needs torch_xla", "needs a C++ compiler", "needs the torch engine's interpreter",
    "needs a machine without a GPU", "needs a kernel that lets a process reset its peak memory", "needs torch 2.",
    "needs transformers 5.", "needs a newer peft",
)  # fmt: skip
"""How the reason of a skipped test may begin; a test that skips for another one fails. Those of versions are for older
libraries than `constraints.txt` has."""
ON_EITHER_DEVICE = Path(__file__).parent / "gpu"
"""GPU tests that also run on the CPU when told so (`pool.DEVICE_VARIABLE`)."""

# What is printed must not depend on the window that the tests are started from, here or in processes they start.
os.environ |= {"COLUMNS": "80", "LINES": "25"}
for _name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)
# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Kernels run in Triton's interpreter where there is no GPU. Triton reads this when it is imported, so it is set before
# any test module is; looking for devices this way does not import torch.
if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
skips = collections.Counter[str]()
"""How many tests and modules were skipped, by reason."""
lacking: set[str] = set()
"""The reasons of files that need a library which machines for GPUs and for XLA may lack."""
notes: list[str] = []
"""What the tests noted (`pool.note`)."""


@pytest.fixture(autouse=True)
def _only_own_secrets() -> Iterator[None]:
    """What a test taught `redaction` is not hidden in the output of the tests after it."""
    yield
    redaction.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if pool.bodies and not session.config.option.collectonly:
        pool.modules_in_use = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
        pool.fork_server()  # imports torch while the tests without ranks run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if notes:
        terminalreporter.section("notes")
        for line in notes:
            terminalreporter.write_line(line)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why something was skipped, as `REASONS` has it; otherwise empty. For another reason it fails."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return ""
    text = report.longrepr[2].removeprefix("Skipped: ")
    reason = next((reason for reason in (*REASONS, *lacking) if text.startswith(reason)), "")
    if not reason:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} would be skipped: {text!r}; REASONS in tests/conftest.py has no such reason"
    return reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _reason(report)
    report.user_properties += [("note", line) for line in pool.notes]  # to the process that counts
    pool.notes.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if reason := _reason(report):
        skips[reason] += 1
    notes.extend(str(line) for name, line in report.user_properties if name == "note")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if reason := _reason(report):
        skips[reason] += 1


def pytest_unconfigure(config: pytest.Config) -> None:
    pool.close_pools()  # also when the run was interrupted
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not config.option.collectonly:  # the last line of all
        counts = ", ".join(f"{reason} ({count})" for reason, count in skips.most_common())
        terminal.write_line(f"Skipped: {counts or 'nothing'}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    may_lack = collector.config.option.markexpr == "gpu" or importlib.util.find_spec("torch_xla") is not None
    _reason(report)
    if report.outcome == "failed" and may_lack:
        missing = [name for name in ORACLES if f"No module named '{name}'" in str(report.longrepr)]
        if missing:
            report.outcome = "skipped"
            lacking.add(f"needs {missing[0]}")
            report.longrepr = (str(collector.path), 1, f"Skipped: needs {missing[0]}")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if pool.chosen_device() == "cpu":
        wanting = [item for item in wanting if ON_EITHER_DEVICE not in item.path.parents]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless browser, one for all tests; skips where there is none."""
    program = find_browser()
    if program is None:
        pytest.skip(f"needs a browser: Chromium or Chrome, on the PATH or named by {VARIABLE}")
    try:
        opened = Browser(program)
    except BrowserError as error:
        raise BrowserError(f"{program} does not start; {VARIABLE} names another one, or none: {error}") from None
    with opened:
        yield opened
