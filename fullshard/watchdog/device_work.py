"""Whether the device has finished a collective, without touching the device.

An NCCL work has a future that a thread of torch completes. Asking the work itself queries a CUDA event while holding
the GIL. That can take as long as another thread's kernel launch: forever, if the launch queue is full behind a
collective that hangs.
"""

from __future__ import annotations

import os
from typing import Any

BLOCKING = any(os.environ.get(name) == "1" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))
"""Whether torch waits on the host; then it has no thread that completes futures."""
SUCCESS, TIMED_OUT = 0, 1  # torch's `WorkResult`


def probe(work: Any) -> Any:
    """The object that `is_done` asks about a work; it keeps no tensors alive."""
    try:
        return work if BLOCKING else work.get_future_result()
    except (AttributeError, RuntimeError):
        return work


def is_done(probe: Any) -> bool:
    """Whether a work is finished; raises if it failed."""
    if not hasattr(probe, "done"):
        return bool(probe.is_completed())
    if not probe.done():
        return False
    result = int(probe.value())
    if result != SUCCESS:
        raise RuntimeError("timed out" if result == TIMED_OUT else "NCCL reports a broken connection")
    return True
