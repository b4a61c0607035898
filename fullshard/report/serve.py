"""`fullshard report --serve`: shows runs live on loopback, and ends with them.

The page asks for news every second and changes only what differs (`live.js`). Files are read again only when they have
changed and a page asks. A server whose runs are over when it starts runs until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from fullshard.config.errors import ConfigError, UserError
from fullshard.distributed.terminal_text import print_text
from fullshard.report.compare import RunState, comparison, state_of
from fullshard.report.html_report import contents
from fullshard.report.page import Contents, body, escape, whole_page
from fullshard.report.records import METRICS_FILE
from fullshard.report.run_charts import labels
from fullshard.report.run_record import RunReader, RunRecord
from fullshard.sft.output_dir import lock_owner

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
MOST_REQUESTS = 16
"""The most requests that are answered at a time."""
SECONDS = 10.0
"""How long a client may take to send its whole request."""
ANSWER_SECONDS = 60.0
"""How long it may take to accept the whole answer, which may go through a slow tunnel."""
ROOM = 1.0
"""Seconds until a connection that was given up has made room."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page has the rest in itself
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Content:
    """The answer to a request."""

    kind: str
    """Its media type."""
    text: str

    @functools.cached_property
    def tag(self) -> str:
        """Tells it apart from others, for clients that have it already."""
        return f'"{hashlib.sha256(self.text.encode()).hexdigest()[:32]}"'


Paths = dict[str, Callable[[], Content]]
"""What is served: a function for each path."""


class LoopbackServer:
    """Serves in threads of its own from `with` until its end."""

    def __init__(self, paths: Paths, port: int) -> None:
        try:
            self._server = _Server((HOST, port), paths)
        except (OSError, OverflowError) as error:
            raise ConfigError(_why(port, error)) from None
        self.port: int = self._server.server_address[1]
        self.url = self.address("/")

    def address(self, path: str) -> str:
        """The URL of a path, with the token."""
        return f"http://{HOST}:{self.port}{path}?token={self._server.token}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="report server", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _why(port: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"--port {port} is in use by another program; choose another port, or 0 for any free one."
    if isinstance(error, PermissionError):
        return f"--port {port}: this user may not listen there; choose a port above 1023, or 0 for any free one."
    return f"--port {port} cannot be used ({error}); choose another port, or 0 for any free one."


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_REQUESTS

    def __init__(self, address: tuple[str, int], paths: Paths) -> None:
        self.paths, self.token = paths, secrets.token_urlsafe(24)
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        self._silent: dict[Any, None] = {}
        """The connections that have not sent their request yet, the oldest first."""
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks a name server for the name of this machine

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False) and not (self._give_up_oldest() and self._free.acquire(timeout=ROOM)):
            self.shutdown_request(request)
            return
        self._silent[request] = None
        super().process_request(request, client_address)

    def _give_up_oldest(self) -> bool:
        """Close the connection that has been silent for longest; whether there was one."""
        oldest = next(iter(list(self._silent)), None)
        if oldest is not None:
            self.has_spoken(oldest)
            with contextlib.suppress(OSError):  # its thread has closed it meanwhile
                oldest.shutdown(socket.SHUT_RDWR)
        return oldest is not None

    def has_spoken(self, request: Any) -> None:
        """The connection has sent its request, with the token."""
        self._silent.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_spoken(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or takes too long, is no error of ours; a broken page must be seen."""
        import sys

        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _UntilDeadline(io.RawIOBase):
    """What a socket receives, until a deadline for all of it: a timeout alone begins again with each byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "fullshard", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, SECONDS))

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name.lower() not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, f"expected {HOST} or localhost as host")
            return
        if not self._has_token():
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that fullshard report --serve has printed")
            return
        self.server.has_spoken(self.connection)
        content = self.server.paths.get(self.path.partition("?")[0])
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            answer = content()
        except (UserError, OSError) as error:  # files that are read meanwhile may vanish, and come back
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self._answer(answer)

    def _has_token(self) -> bool:
        try:
            token = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        except ValueError:
            return False
        return secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode())

    def _answer(self, content: Content) -> None:
        self.connection.settimeout(ANSWER_SECONDS)
        unchanged = self.headers.get("If-None-Match") == content.tag
        self.send_response(HTTPStatus.NOT_MODIFIED if unchanged else HTTPStatus.OK)
        self.send_header("ETag", content.tag)
        for header, value in HEADERS.items():
            self.send_header(header, value)
        body = b"" if unchanged else content.text.encode()
        if not unchanged:
            self.send_header("Content-Type", f"{content.kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


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
        live = any(lock_owner(folder) is not None for folder in folders)
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
        self._absent_since: float | None = None
        self._read: tuple[object, bool] | None = None

    def has_ended(self) -> bool:
        """Whether it has ended. One that was over from the start has not."""
        if lock_owner(self.folder) is not None:
            self.was_running, self._absent_since = True, None
            return False
        # Where there are no locks, a run shows itself by its metrics.
        if not self.was_running and _stamp(self.folder / METRICS_FILE) == self._first:
            return False
        if self._has_finished():
            self.was_running = True
            return True
        self._absent_since = time.monotonic() if self._absent_since is None else self._absent_since
        return self.was_running and time.monotonic() - self._absent_since >= RESTART

    def _has_finished(self) -> bool:
        there = _files(self.folder)
        if self._read is None or self._read[0] != there:
            self._read = there, self.run.read().has_finished
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
        script = files("fullshard.report").joinpath("live.js").read_text(encoding="utf-8")
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
        state = ((self.over, *map(lock_owner, self.folders)), [_files(folder) for folder in self.folders])
        began = time.monotonic()
        same = self._known is not None and self._known[0] == state[0]
        if self._known == state or (same and began < self._due):
            return
        runs = [run.read() for run in self._runs]
        page = contents(runs[0]) if len(runs) == 1 else comparison(runs)
        self._contents = replace(page, lead=page.lead + lead(runs, self.over))
        self._update = Content("text/html", body(self._contents))
        self._known = state
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
    step, total = run.last_step, run.total_steps
    if not run.metrics:
        return "no values yet"
    parts = [f"step {step:,} of {total:,}" if total else f"step {step:,}"]
    trained, seconds = run.training_seconds[-1]
    if total and trained and total > step:
        parts.append(f"about {timedelta(seconds=round((total - step) * seconds / trained))} of training left")
    if run.changed_at is not None:
        parts.append(f"last values at {datetime.fromtimestamp(run.changed_at):%H:%M:%S}")
    return ", ".join(parts)


def _bar(run: RunRecord) -> str:
    total = run.total_steps
    return f' <progress value="{run.last_step}" max="{total}" aria-label="Steps"></progress>' if total else ""


def _ending(run: RunRecord) -> str:
    if state_of(run) is RunState.RUNNING:
        return "running"
    if run.has_finished:
        return f"finished at step {run.last_step:,}"
    total = run.total_steps
    return f"ended at step {run.last_step:,}{f' of {total:,}' if total else ''}, before it had finished"
