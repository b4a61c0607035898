"""A small HTTP server for pages on this machine: it listens on 127.0.0.1 only and answers GET for known paths.

Other users of the machine can reach the port, so every request needs the random token of the address. Requests with
another name in their Host header are refused, so that a page on the internet whose name leads here (DNS rebinding)
reads nothing. A request has a deadline. Threads are limited; when all are taken, the connection that has sent no
request for longest makes room.
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
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from fullshard.errors import ConfigError, UserError

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
            given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        except ValueError:
            return False
        return secrets.compare_digest(given.encode(errors="replace"), self.server.token.encode())

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
