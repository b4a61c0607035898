"""The job's store, in which launchers and ranks leave values for each other: every value of ours is signed.

torch's store authenticates nobody: whoever reaches its port can read and write it. So each value carries an HMAC, made
with the job's secret, over its generation (which attempt of the job), its key and a sequence number. A value that is
not signed so, or is older than one already read, is refused. The secret reaches every process by environment and never
travels through the store. Without one the HMAC has an empty key, and only accidents are noticed.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullshard.config.errors import RuntimeSetupError
from fullshard.distributed.terminal_text import visible

SECRET_VARIABLE = "FULLSHARD_JOB_SECRET"
"""The environment variable with the secret that all processes of a job share, and nobody else knows."""
ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
TAG, NUMBER = 16, 8
"""Bytes of a value's HMAC and of its sequence number, which come before its text."""
REMEMBERED = 64
"""Up to how many bytes the last good value of a key is remembered, to be used instead of a refused one."""


def job_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The job's secret; empty if there is none."""
    return environment.get(SECRET_VARIABLE, "").encode()


def attempt() -> str:
    """Which attempt of the job this is, counted by the launcher."""
    return os.environ.get(ATTEMPT_VARIABLE, "0")


def _tag(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(len(part).to_bytes(8) + part for part in parts), "sha256")[:TAG]


class JobStore:
    """Signed values in a store of torch's. Keys begin with `prefix`; `warn` gets a line for the first refused value."""

    _last_number = 0  # of all values that this process has written: a later value has a larger number

    def __init__(self, store: Any, generation: str, prefix: str = "", warn: Callable[[str], Any] = lambda line: None):
        self._store, self._generation, self._prefix, self._warn = store, generation.encode(), prefix, warn
        self._secret = job_secret()
        self._existing: set[str] = set()
        self._seen: dict[str, tuple[int, bytes]] = {}
        self._has_multi_get = True
        self._lock = threading.RLock()  # a value is opened before a later one of the same key
        self.refused: set[str] = set()
        """The keys whose values were refused."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all these keys exist, whoever wrote them."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """The values of the keys that exist, in few calls: a key that was seen before is not checked again."""
        with self._lock:
            unseen = [key for key in keys if key not in self._existing]
            self._existing.update(self._find_existing(unseen))
            existing = [key for key in keys if key in self._existing]
            opened = {key: self.open(key, value) for key, value in zip(existing, self._values(existing), strict=True)}
        return {key: visible(value.decode(errors="replace")) for key, value in opened.items() if value is not None}

    def _find_existing(self, keys: list[str]) -> list[str]:
        if not keys:
            return []
        if self.has(keys):
            return keys
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return self._find_existing(keys[:half]) + self._find_existing(keys[half:])

    def _values(self, keys: list[str]) -> list[bytes]:
        names = [self._prefix + key for key in keys]
        if self._has_multi_get and len(names) > 1:
            try:
                return [bytes(value) for value in self._store.multi_get(names)]
            except (NotImplementedError, RuntimeError) as error:
                if "not implemented" not in str(error).lower() and "extended api" not in str(error).lower():
                    raise
                self._has_multi_get = False  # a FileStore, for example
        return [bytes(self._store.get(name)) for name in names]

    # --- writing ----------------------------------------------------------------------------------------------------

    def put(self, key: str, text: str | bytes) -> None:
        """Write a value that only this process writes."""
        JobStore._last_number = max(JobStore._last_number + 1, time.time_ns())
        self._store.set(self._prefix + key, self.sign(key, JobStore._last_number, _bytes(text)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that all ranks share; returns the result."""
        return int(self.change(key, lambda now: str(int(now or 0) + amount).encode() if amount or now is None else now))

    def replace(self, key: str, text: str) -> None:
        """Write a value that other ranks may write too."""
        self.change(key, lambda now: text.encode())

    def change(self, key: str, new: Callable[[bytes | None], bytes]) -> bytes:
        """Replace a shared value by a function of it, at once for all ranks; returns what the value is now."""
        name, tries = self._prefix + key, 0
        while True:
            with self._lock:
                raw = bytes(self._store.get(name)) if key in self._existing or self._store.check([name]) else b""
                now = self.open(key, raw) if raw else None
                value = new(now)
                if value == now:
                    return value
                # Larger than the last number, and not that of another process which writes the same text now.
                number = (self._seen.get(key, (0, b""))[0] >> 32) + 1 << 32 | _chance.getrandbits(32)
                signed = self.sign(key, number, value)
                if bytes(self._store.compare_set(name, raw, signed)) == signed:
                    self._existing.add(key)
                    self.open(key, signed)
                    return value
            tries += 1
            time.sleep(_chance.uniform(0, 0.002 * min(tries, 50)))

    # --- signatures -------------------------------------------------------------------------------------------------

    def sign(self, key: str, number: int, text: bytes) -> bytes:
        """A value as it is stored."""
        numbered = number.to_bytes(NUMBER)
        return _tag(self._secret, self._generation, key.encode(), numbered, text) + numbered + text

    def open(self, key: str, raw: bytes) -> bytes | None:
        """The text of a stored value. One that is refused counts as the last short value of this key, or as none."""
        number, text = int.from_bytes(raw[TAG : TAG + NUMBER]), raw[TAG + NUMBER :]
        last, last_value = self._seen.get(key, (0, b""))
        if number < last or not hmac.compare_digest(raw, self.sign(key, number, text)):
            if not self.refused:
                self._warn(
                    f"the job's store holds a value of {key!r} that this job did not write, or an earlier one again; "
                    f"it is ignored. Another program can reach the store's port, or processes of the job have "
                    f"different values of {SECRET_VARIABLE}."
                )
            self.refused.add(key)
            return last_value or None
        self._seen[key] = (number, text if len(text) <= REMEMBERED else b"")
        return text


_chance = random.SystemRandom()  # not the generator that a program seeds


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def parse(text: str) -> Any:
    """A JSON value from another process, with `visible` texts."""
    return _each_visible(json.loads(text))


def _each_visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, list):
        return [_each_visible(one) for one in value]
    return {visible(k): _each_visible(v) for k, v in value.items()} if isinstance(value, dict) else value


# --- objects --------------------------------------------------------------------------------------------------------


class SignedPickler:
    """What torch's object collectives pickle with: an object is signed, and one that is not is never unpickled."""

    def __init__(self, file: io.BytesIO):
        self._file = file

    def dump(self, value: Any) -> None:
        """Write an object behind its signature."""
        data = pickle.dumps(value)
        self._file.write(_tag(job_secret(), b"object", attempt().encode(), data) + data)

    def load(self) -> Any:
        """Read an object; raises if its signature is wrong."""
        signed = self._file.read()
        tag, data = signed[:TAG], signed[TAG:]
        if not hmac.compare_digest(tag, _tag(job_secret(), b"object", attempt().encode(), data)):
            raise RuntimeSetupError(
                "an object that arrived from another rank is not signed with this job's secret, so it was not "
                f"unpickled. Start all ranks with the same {SECRET_VARIABLE}."
            )
        return pickle.loads(data)


# --- torch's store --------------------------------------------------------------------------------------------------


def listen(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on the interface of `host` only, at `port` or at a free one if that is 0.

    A name that this machine resolves to its loopback address, or an address that is none of its own (behind a
    translation of addresses), does not tell which interface other machines reach: then it listens on all of them.
    Raises `OSError` if the port is in use.
    """
    listener = _bound(host, port)
    return dist.TCPStore(
        host, listener.getsockname()[1], is_master=True, wait_for_workers=False, timeout=timeout,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket on the interface of `host`."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    named_loopback = not _is_loopback(host) and all(_is_loopback(str(address[0])) for *_, address in addresses)
    if (
        host != "localhost"
        and named_loopback
        or not any(_is_ours(family, address) for family, *_, address in addresses)
    ):
        both = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024, dualstack_ipv6=both
        )
    family, *_, address = next(one for one in addresses if _is_ours(one[0], one[4]))
    return socket.create_server(address[:2], family=family, backlog=1024)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_ours(family: int, address: Any) -> bool:
    """Whether an address belongs to this machine."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
