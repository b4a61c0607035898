"""The charting library, Vega with Vega-Lite, as one script that a page can include.

The package `vl-convert-python` contains and bundles it, which takes a second: the script is kept in the user's cache.
It is bundled in a process of its own, so that no JavaScript engine starts in a training process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fullshard.paths import replace_text

PACKAGE = "vl-convert-python"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
BUNDLE = f"import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle({SNIPPET!r}).encode())"
SECONDS = 60


def sealed(script: str) -> str:
    """A script with its checksum as its last line."""
    return f"{script}\n/* sha256 of the chart library: {hashlib.sha256(script.encode()).hexdigest()} */"


@functools.cache
def chart_library() -> str | None:
    """The script, which defines `vegaEmbed`; None if the package is not installed or does not work."""
    try:
        cached = _cached(version(PACKAGE))
    except PackageNotFoundError:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = cached.read_text(encoding="utf-8")
        if text == sealed(text.rpartition("\n")[0]):
            return text
    try:
        done = subprocess.run([sys.executable, "-c", BUNDLE], capture_output=True, timeout=SECONDS, check=True)
        text = sealed(done.stdout.decode("utf-8"))
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        cached.parent.mkdir(parents=True, exist_ok=True)
        replace_text(cached, text)
    return text


def _cached(release: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "fullshard" / "charts" / f"vega-{release}.js"
