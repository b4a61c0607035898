"""The tests of the XLA engine, on 4 CPU devices in one process: collected only where it is the engine."""

from __future__ import annotations

import os

import pytest

from fullshard.distributed import engines

collect_ignore_glob = [] if engines.can_be_used() and engines.current().name == "XLA" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _four_devices() -> None:
    """One program over 4 devices; nothing may touch a device before."""
    from fullshard.distributed import runtime

    assert (os.environ.get("PJRT_DEVICE"), os.environ.get("CPU_NUM_DEVICES")) == ("CPU", "4"), "run make test-xla"
    runtime.use_spmd()


@pytest.fixture(autouse=True)
def _no_global_mesh() -> None:
    from fullshard.spmd import set_global_mesh

    set_global_mesh(None)
