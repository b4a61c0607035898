"""A server on this machine that answers as the Hub does, for a few small repositories."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    files: dict[str, bytes]
    token: str | None = None
    """What a request needs, if the repository is private."""
    gated: bool = False
    damaged: frozenset[str] = frozenset()
    """Files that are sent with a bit changed."""
    cut: dict[str, int] = field(default_factory=dict)
    """Files whose first transfer breaks off after so many bytes."""


@dataclass
class Hub:
    repositories: dict[str, Repository]
    endpoint: str = ""
    sent: list[tuple[str, int]] = field(default_factory=list)
    """Each file that was sent, and from which byte on."""


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            repository = self._allowed(name)
            if repository is not None:
                self._send(
                    200, json.dumps(_info(name, repository)).encode(), body, {"Content-Type": "application/json"}
                )
            return
        parts = path.lstrip("/").split("/")
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        repository = self._allowed(name, file=True)
        if repository is None:
            return
        if file not in repository.files:
            self._refuse(404, "EntryNotFound")
            return
        content = repository.files[file]
        etag = hashlib.sha256(content).hexdigest() if _is_large(file) else _blob(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if file in repository.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if not body:
            self._send(200, content, False, headers)
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.hub.sent.append((file, start))
        headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        stop = repository.cut.pop(file, None)
        if stop is not None:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[:stop])
            self.wfile.flush()
            self.connection.close()
            return
        self._send(206 if start else 200, content[start:], True, headers)

    def _allowed(self, name: str, file: bool = False) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (
            repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}"
        ):
            self._refuse(401, "RepoNotFound")
            return None
        if repository.gated and file:
            self._refuse(403, "GatedRepo")
            return None
        return repository

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", self.command == "GET", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _info(name: str, repository: Repository) -> dict[str, Any]:
    siblings = []
    for file, content in repository.files.items():
        entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": _blob(content)}
        if _is_large(file):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
        siblings.append(entry)
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}


@contextlib.contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve repositories on the loopback interface."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
