"""The wheel, installed where there is no clone, no compiler and no package for charts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullshard.version import __version__
from tests.pool import ROOT

SOURCES = ("fullshard", "pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = ("fullshard", "__editable__", "vl_convert", "triton")
"""Packages of this environment that the other one lacks."""


def run(*command: Any, cwd: Path, **variables: str) -> str:
    hidden = ("PYTHONPATH", "PATH", "FULLSHARD_", "TRITON_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | variables
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def build_wheel(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder, PATH=os.environ["PATH"])
    (wheel,) = folder.glob("*.whl")
    return wheel


def fresh_environment(folder: Path) -> Path:
    """The interpreter of a new environment, which has the packages of this one but for `LEFT_OUT`."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)  # pip is among the packages
    packages = folder / "packages"
    packages.mkdir()
    for site in (Path(place) for place in sys.path if place.endswith("-packages")):
        for entry in site.iterdir():
            if (
                not entry.name.startswith((*LEFT_OUT, "_distutils", "distutils"))
                and not (packages / entry.name).exists()
            ):
                (packages / entry.name).symlink_to(entry)
    (own,) = (folder / "env" / "lib").glob("python*/site-packages")
    (own / "packages.pth").write_text(f"{packages}\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
def test_the_wheel_trains_and_reports_outside_the_clone(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert wheel.name == f"fullshard-{__version__}-py3-none-any.whl"
    python = fresh_environment(tmp_path)
    run(python, "-m", "pip", "install", "--no-index", "--quiet", wheel, cwd=tmp_path)  # all it requires is there
    command, place = python.with_name("fullshard"), tmp_path / "elsewhere"
    place.mkdir()
    where = "import fullshard, importlib.util as u; print(fullshard.__file__, u.find_spec('vl_convert'))"
    assert run(python, "-c", where, cwd=place).split() == [
        str(next((tmp_path / "env" / "lib").glob("python*/site-packages/fullshard/__init__.py"))), "None"
    ]  # fmt: skip
    programs = {"PATH": str(python.parent)}  # no compiler among them
    assert "sft" in run(command, "--help", cwd=place, **programs)
    shutil.copytree(ROOT / "quickstart" / "model", place / "model")
    rows = (ROOT / "quickstart" / "data" / "train.jsonl").read_text().splitlines()[:8]
    (place / "rows.jsonl").write_text("\n".join(rows) + "\n")
    run(
        command, "sft", "--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", "run",
        "--max_steps", "2", "--use_cpu", cwd=place, **programs,
    )  # fmt: skip
    steps = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert losses
    run(command, "report", "run", "--out", "again.html", cwd=place, **programs)
    for page in ((place / "run" / "report.html").read_text(), (place / "again.html").read_text()):
        assert "pip install &#x27;fullshard[report]&#x27;" in page or "pip install 'fullshard[report]'" in page
        assert f"{losses[0]:.3g}"[:4] in page and "window.vegaEmbed = vegaEmbed" not in page
