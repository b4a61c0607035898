"""`fullshard report --serve`: shows runs live on loopback, and ends with them.

The page asks for news every second and changes only what differs (`live.js`). Files are read again only when they have
changed and a page asks. A server whose runs are over when it starts runs until Ctrl-C.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.reporting.html_report import contents
from fullshard.reporting.page import Contents, body, escape, whole_page
from fullshard.reporting.records import METRICS_FILE
from fullshard.reporting.run_charts import labels
from fullshard.reporting.run_record import RunReader, RunRecord
from fullshard.results.compare import comparison
from fullshard.results.loopback_server import Content, LoopbackServer
from fullshard.results.run_state import RunState, has_finished, last_step, state_of, total_steps, training_seconds
from fullshard.terminal_text import print_text
from fullshard.train.run_lock import owner_of

PORT = 8765
"""The port if none is given, where it is free."""
EVERY = 0.5
"""Seconds between looks at the runs."""
PAGE_ASKS = 1.0
"""Seconds between the questions of an open page."""
RESTART = 300.0
"""How long a run that has not finished may be away: a launcher restarts a run that has crashed, and it reads data and
model before it is seen again."""
SHARE_OF_TIME = 0.1
"""The part of the time that may be spent on making the page: the run needs the processors."""
LINGER = 3.0
"""How long the last state is served, so that every open page gets it."""


def serve(folders: Sequence[Path], port: int | None = None) -> str:
    """Serve until the runs have ended. Returns how they ended, in words."""
    watches, page = [RunWatch(folder) for folder in folders], LivePage(folders)
    with _open(page, port) as server:
        live = any(owner_of(folder) is not None for folder in folders)
        end, going = ("the run ends", "the run is") if len(folders) == 1 else ("the runs end", "the runs are")
        until = f"{end}, or until Ctrl-C" if live else f"Ctrl-C; {going} not going on"
        print_text(f"{server.url} shows {', '.join(map(str, folders))} until {until}.")
        while not over(watches):
            time.sleep(EVERY)
        page.over = True
        time.sleep(LINGER)
    return "\n".join(f"{run.folder}: {_ending(run)}" for run in (watch.run.read() for watch in watches))


def _open(page: LivePage, port: int | None) -> LoopbackServer:
    paths = {"/": page.whole, "/update": page.update}
    try:
        return LoopbackServer(paths, PORT if port is None else port)
    except ConfigError:
        if port is not None:
            raise
        return LoopbackServer(paths, 0)  # somebody has the usual port, often another server of ours


# --- the end --------------------------------------------------------------------------------------------------------


class RunWatch:
    """Watches one run: whether it is going on, and whether it has ended since."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunReader(folder)
        self.was_running = False
        self._first = _stamp(folder / METRICS_FILE)
        self._gone: float | None = None
        self._read: tuple[object, bool] | None = None

    def has_ended(self) -> bool:
        """Whether it has ended. One that was over from the start has not."""
        if owner_of(self.folder) is not None:
            self.was_running, self._gone = True, None
            return False
        # Where there are no locks, a run shows itself by its metrics.
        if not self.was_running and _stamp(self.folder / METRICS_FILE) == self._first:
            return False
        if self._has_finished():
            self.was_running = True
            return True
        self._gone = time.monotonic() if self._gone is None else self._gone
        return self.was_running and time.monotonic() - self._gone >= RESTART

    def _has_finished(self) -> bool:
        there = _files(self.folder)
        if self._read is None or self._read[0] != there:
            self._read = there, has_finished(self.run.read())
        return self._read[1]


def over(watches: Sequence[RunWatch]) -> bool:
    """Whether all runs that were going on have ended."""
    ended = [watch.has_ended() for watch in watches]
    return any(ended) and all(end for end, watch in zip(ended, watches, strict=True) if watch.was_running)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


# --- the page -------------------------------------------------------------------------------------------------------


class LivePage:
    """The page of the runs as they are now. A change is shown at once, unless making the page takes long."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders, self._runs = folders, [RunReader(folder) for folder in folders]
        self.over = False
        """Whether this is the last state that is served."""
        self._lock = threading.Lock()
        self._known: tuple[object, object] | None = None
        """The state of the runs and of their files that the contents were made of."""
        self._contents = Contents("", {}, ())
        self._update = Content("text/html", "")
        self._due = 0.0

    def whole(self) -> Content:
        """The page with its scripts."""
        script = files("fullshard.results").joinpath("live.js").read_text(encoding="utf-8")
        with self._lock:
            self._look()
            return Content("text/html", whole_page(self._contents, [script], connects=True))

    def update(self) -> Content:
        """What may have changed in it."""
        with self._lock:  # one reader at a time; the others get what it has read
            self._look()
            return self._update

    def _look(self) -> None:
        """Make the contents again if something has changed."""
        known = ((self.over, *map(owner_of, self.folders)), [_files(folder) for folder in self.folders])
        began = time.monotonic()
        same = self._known is not None and self._known[0] == known[0]
        if self._known == known or (same and began < self._due):
            return
        runs = [run.read() for run in self._runs]
        found = contents(runs[0]) if len(runs) == 1 else comparison(runs)
        self._contents = replace(found, lead=found.lead + lead(runs, self.over))
        self._update = Content("text/html", body(self._contents))
        self._known = known
        now = time.monotonic()
        self._due = now + (now - began) / SHARE_OF_TIME


def _files(folder: Path) -> list[tuple[str, object]]:
    """The files of a run as they are now; none if the folder has vanished."""
    try:
        return sorted((path.name, _stamp(path)) for path in folder.iterdir())
    except OSError:
        return []


def lead(runs: Sequence[RunRecord], over: bool) -> str:
    """The top of the page: what the runs are doing."""
    states = [state_of(run) for run in runs]
    going = sum(state is RunState.RUNNING for state in states)
    if len(runs) == 1:
        headline = _ending(runs[0]).capitalize() if not going else "Running"
    else:
        headline = f"{going} of {len(runs)} runs are going on"
    rows = [
        f"<p>{escape(name) + ': ' if len(runs) > 1 else ''}{escape(_progress(run))}{_bar(run)}</p>"
        for name, run, state in zip(labels(runs), runs, states, strict=True)
        if state is RunState.RUNNING
    ]
    rest = " This page is no longer updated." if over else ""
    status = f'<p><strong role="status">{escape(headline)}.{rest}</strong></p>'
    state = "over" if over else "live"
    return f'<div id="live" data-state="{state}" data-every="{PAGE_ASKS:g}">{status}{"".join(rows)}</div>'


def _progress(run: RunRecord) -> str:
    """How far a run is, and when it will end."""
    step, total = last_step(run), total_steps(run)
    if not run.metrics:
        return "no values yet"
    parts = [f"step {step:,} of {total:,}" if total else f"step {step:,}"]
    trained, seconds = training_seconds(run)[-1]
    if total and trained and total > step:
        parts.append(f"about {timedelta(seconds=round((total - step) * seconds / trained))} of training left")
    if run.changed_at is not None:
        parts.append(f"last values at {datetime.fromtimestamp(run.changed_at):%H:%M:%S}")
    return ", ".join(parts)


def _bar(run: RunRecord) -> str:
    total = total_steps(run)
    return f' <progress value="{last_step(run)}" max="{total}" aria-label="Steps"></progress>' if total else ""


def _ending(run: RunRecord) -> str:
    if state_of(run) is RunState.RUNNING:
        return "running"
    if has_finished(run):
        return f"finished at step {last_step(run):,}"
    total = total_steps(run)
    return f"ended at step {last_step(run):,}{f' of {total:,}' if total else ''}, before it had finished"
