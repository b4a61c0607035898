"""The interpreter of the torch engine, for tests that compare the engines."""

from __future__ import annotations

import os

import pytest


def torch_python() -> str:
    """Its path; without one the test is skipped."""
    python = os.environ.get("FULLSHARD_TORCH_PYTHON")
    if not python:
        pytest.skip("needs the torch engine's interpreter, FULLSHARD_TORCH_PYTHON: make test-xla sets it")
    return python
