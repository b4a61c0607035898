"""The script of the charting library: bundled once, by another process, and kept in the user's cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from fullshard.report import charts as library
from fullshard.report.charts import chart_library, with_checksum


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "version", lambda name: "1.2.3")
    chart_library.cache_clear()
    yield tmp_path / "fullshard" / "charts" / "vega-1.2.3.js"
    chart_library.cache_clear()


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that bundle the script; it is another one each time."""
    calls: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, f"script {len(calls)}".encode(), b"")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_it_is_bundled_once(cache: Path, bundled: list[Any]) -> None:
    first = chart_library()
    chart_library.cache_clear()
    assert chart_library() == first == with_checksum("script 1") and len(bundled) == 1 and cache.read_text() == first


def test_a_damaged_cache_is_replaced(cache: Path, bundled: list[Any]) -> None:
    cache.parent.mkdir(parents=True)
    for damaged in (
        b"half of the scr",
        b"\xff\xfe",
        b"",
        with_checksum("script 0").replace("script 0", "scripu 0").encode(),
    ):
        chart_library.cache_clear()
        cache.write_bytes(damaged)
        assert chart_library() == with_checksum(f"script {len(bundled)}") == cache.read_text()


def test_a_cache_that_cannot_be_written_costs_time_only(cache: Path, bundled: list[Any]) -> None:
    cache.parent.parent.write_text("a file where the folder would be")
    assert chart_library() == with_checksum("script 1")


def test_a_package_that_fails_or_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> Any:
        def fail(*asked: Any, **options: Any) -> Any:
            raise error

        return fail

    broken, absent = subprocess.CalledProcessError(1, "python"), PackageNotFoundError("vl-convert-python")
    for place, name, error in ((subprocess, "run", broken), (library, "version", absent)):
        monkeypatch.setattr(place, name, failing(error))
        chart_library.cache_clear()
        assert chart_library() is None and not cache.exists()


def test_the_real_one_is_not_imported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # an import would fail
    chart_library.cache_clear()
    script = chart_library()
    assert script is not None and "window.vegaEmbed" in script
    assert "</script" not in script, "it would end the element that it is in"
