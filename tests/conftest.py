"""What all tests share: the hypothesis profile, the GPU marker, and the end of the worker pools."""

from __future__ import annotations

import pytest

import tests.profile  # noqa: F401 - loads it
from tests import pool


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if pool.bodies and not session.config.option.collectonly:
        pool.fork_server()  # imports torch while the tests without ranks run


def pytest_unconfigure() -> None:
    pool.close_pools()  # also when the run was interrupted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
