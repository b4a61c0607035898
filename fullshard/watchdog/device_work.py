"""Whether the device has finished a work, without touching the device.

An NCCL work has a future that torch's own thread completes. To ask the work itself queries a CUDA event under Python's
lock, which can last as long as another thread's launch does: for ever, when the launch queue is full behind an
operation that hangs.
"""

from __future__ import annotations

import os
from typing import Any

BLOCKING = any(os.environ.get(name) == "1" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))
"""Whether torch was asked to wait on the host; then it has no thread that completes futures."""
SUCCESS, TIME_OUT = 0, 1  # torch's `WorkResult`


def probe(work: Any) -> Any:
    """What to ask whether a work is done; it keeps no tensors alive."""
    try:
        return work if BLOCKING else work.get_future_result()
    except (AttributeError, RuntimeError):
        return work


def is_done(probe: Any) -> bool:
    """Whether a work is done; raises if it failed."""
    if not hasattr(probe, "done"):
        return bool(probe.is_completed())
    if not probe.done():
        return False
    result = int(probe.value())
    if result != SUCCESS:
        raise RuntimeError("its time-out is over" if result == TIME_OUT else "NCCL reports that a connection broke")
    return True
