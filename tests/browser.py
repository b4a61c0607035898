"""A headless browser for tests: pages of any size, in light and dark, and what they do.

It is Chromium or a relative of it, found by its usual names or by `FULLSHARD_TEST_BROWSER`, and driven over the
DevTools protocol through a pipe. Nothing that a page requests leaves this machine.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

VARIABLE = "FULLSHARD_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--disable-sync", "--force-color-profile=srgb", "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
PATIENCE = 30.0
"""The most seconds that one answer of the browser may take."""
START = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and answers on 4; shells cannot redirect those of two digits."""
BEFORE = """
for (const name of ['alert', 'confirm', 'prompt'])
    window[name] = text => console.error(`${name}: ${text}`);  // a real dialog would stop the page
window.__listening = [];
const add = EventTarget.prototype.addEventListener;
EventTarget.prototype.addEventListener = function (kind, ...rest) {
    if (this instanceof Element) window.__listening.push([this, kind]);
    return add.call(this, kind, ...rest);
};
"""
"""Runs before the scripts of a page: notes dialogs as errors, and which elements listen to what."""
KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


class BrowserError(Exception):
    """The browser did not start, did not answer, or refused a command."""


def find_browser() -> str | None:
    """The program to start, if there is one. An empty variable means none."""
    names = (os.environ[VARIABLE],) if VARIABLE in os.environ else NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One browser process; pages share it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._errors = Path(self._profile.name) / "errors.txt"
        starter = [sys.executable, "-ISc", START, str(theirs_in), str(theirs_out)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*starter, program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
                pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._buffer = 0, b""
        self._pages: dict[str, Page] = {}
        try:
            self.version = str(self.send("Browser.getVersion")["product"])
        except BrowserError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    @contextmanager
    def page(self, width: int = 1280, height: int = 900, dark: bool = False, media: str = "screen") -> Iterator[Page]:
        """A new page, in a context of its own: no history, no storage."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send("Page.addScriptToEvaluateOnNewDocument", source=BEFORE)
        page.resize(width, height)
        page.emulate(dark, media)
        try:
            yield page
        finally:
            del self._pages[session]
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that arrive meanwhile go to their pages."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(method, deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page._event(answer["method"], answer["params"])

    def _receive(self, waiting: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"{waiting}: no answer in {PATIENCE:.0f} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise BrowserError(f"{waiting}: the browser ended: {self._errors.read_text(errors='replace')}")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """One tab. `problems` are console errors and warnings, exceptions, dialogs and failed requests; `requests` are the
    URLs that the page asked for; `pages` are those that it showed."""

    def __init__(self, browser: Browser, session: str, frame: str) -> None:
        self._browser, self._session, self._frame = browser, session, frame
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.pages: list[str] = []
        self._loaded = 0

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def _event(self, method: str, about: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded += 1
            case "Network.requestWillBeSent":
                shown = about["type"] == "Document" and about["frameId"] == self._frame
                (self.pages if shown else self.requests).append(about["request"]["url"])
            case "Network.webSocketCreated" | "Network.webTransportCreated":
                self.requests.append(about["url"])
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.problems.append(about["entry"]["text"])

    def open(self, address: str | Path) -> None:
        """Open a URL or a file and wait until it has loaded and was drawn once."""
        loaded = self._loaded
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        failure = self.send("Page.navigate", url=url).get("errorText")
        if failure:
            raise BrowserError(f"{url}: {failure}")
        deadline = time.monotonic() + PATIENCE
        while self._loaded == loaded:
            self.settle()
            if time.monotonic() > deadline:
                raise BrowserError(f"{url} has not loaded in {PATIENCE:.0f} s")
        self.settle()

    def settle(self) -> None:
        """Wait until the page was drawn twice."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = PATIENCE) -> Any:
        """The value of an expression, as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                raise BrowserError(f"still not true after {seconds:.0f} s: {script}")
            time.sleep(0.02)
        return value

    def resize(self, width: int, height: int) -> None:
        """Set the size of the view; one below 600 pixels is that of a phone."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def emulate(self, dark: bool = False, media: str = "screen") -> None:
        """Set the color scheme that the reader prefers, and the medium: screen or print."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme, still])

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Move the pointer, and click there."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, box: dict[str, float] | None = None) -> bytes:
        """A PNG of the view, or of a box (x, y, width, height) of the whole page."""
        clip = {"clip": {**box, "scale": 1}, "captureBeyondViewport": True} if box is not None else {}
        answer = self.send("Page.captureScreenshot", format="png", optimizeForSpeed=True, **clip)
        return base64.b64decode(answer["data"])

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])
