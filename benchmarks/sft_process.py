"""A process of `benchmarks/sft_gpu.py` that trains one case: started early, told to go, and given up after a while."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.sft_rank import READY, RESULT

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Run:
    """A process that is to train one case."""

    name: str
    contestant: str
    job: dict[str, Any]
    libraries: str | None = None
    """A folder with libraries of its own."""
    process: subprocess.Popen[str] | None = None
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    log: Any = None

    def start(self, environment: dict[str, str] | None = None) -> None:
        """Start the process, which imports its libraries and waits."""
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        command = [sys.executable, "-m", "benchmarks.sft_rank", json.dumps(self.job)]
        path = os.pathsep.join([str(ROOT), *filter(None, [self.libraries, os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **(environment or {})}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _await(self, prefix: str, until: float) -> str | None:
        """The next line that begins so; None if the process ends or the time is over."""
        while (left := until - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None or line.startswith(prefix):
                return line
        return None

    def finish(self, timeout: float) -> dict[str, Any]:
        """Let the process train; what it measured, or why it failed."""
        assert self.process is not None and self.process.stdin is not None
        until = time.monotonic() + timeout
        line = self._await(READY, until)
        if line is not None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            line = self._await(RESULT, until)
        if line is not None:
            self.process.wait(30)
            return json.loads(line.removeprefix(RESULT))
        why = f"no result within {timeout:.0f} s" if time.monotonic() >= until else "failed"
        self.stop()
        self.log.seek(0)
        text = self.log.read()
        print(f"--- {self.name}, {self.contestant}: {why}\n{text[-3000:]}", flush=True)
        last = [line for line in text.splitlines() if line.strip()]
        return {"error": why if "no result" in why or not last else last[-1][:160]}

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def finish_together(runs: list[Run], timeout: float) -> list[dict[str, Any]]:
    """What several processes that train together measured."""
    with ThreadPoolExecutor(len(runs)) as threads:
        return list(threads.map(lambda run: run.finish(timeout), runs))
