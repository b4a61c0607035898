"""What all tests share: hypothesis profile, terminal, GPU marker, browser, and the end of the worker pools."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import tests.profile  # noqa: F401 - loads it
from tests import pool
from tests.browser import VARIABLE, Browser, BrowserError, find_browser

ORACLES = ("hypothesis", "bitsandbytes", "expecttest", "datasets", "trl")
"""Packages that only tests need. A GPU machine may lack them; the modules that import them are skipped there."""
ON_EITHER_DEVICE = Path(__file__).parent / "gpu"
"""GPU tests that also run on the CPU when told so (`pool.DEVICE_VARIABLE`)."""

# What is printed must not depend on the window that the tests are started from, here or in processes they start.
os.environ |= {"COLUMNS": "80", "LINES": "25"}
for _name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)
# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if pool.bodies and not session.config.option.collectonly:
        pool.modules_in_use = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
        pool.fork_server()  # imports torch while the tests without ranks run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if pool.notes:
        terminalreporter.section("notes")
        for line in pool.notes:
            terminalreporter.write_line(line)


def pytest_unconfigure() -> None:
    pool.close_pools()  # also when the run was interrupted


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "failed":
        missing = [name for name in ORACLES if f"No module named '{name}'" in str(report.longrepr)]
        if missing:
            report.outcome = "skipped"
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
        pytest.skip(f"needs Chromium or Chrome (on the PATH, or named by {VARIABLE})")
    try:
        opened = Browser(program)
    except BrowserError as error:
        raise BrowserError(f"{program} does not start; {VARIABLE} names another one, or none: {error}") from None
    with opened:
        yield opened
