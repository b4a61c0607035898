"""Training checkpoints: saving, resuming, and converting to model files.

The names in `__all__` are the public interface. Each is imported when it is first used, so that importing this package
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from fullshard.checkpoint.dcp_storage import CheckpointReader
    from fullshard.checkpoint.manager import CheckpointManager, load_state, save_state
    from fullshard.checkpoint.preemption import EXIT_PREEMPTED

_HOMES = {
    "CheckpointManager": "manager",
    "CheckpointReader": "dcp_storage",
    "EXIT_PREEMPTED": "preemption",
    "load_state": "manager",
    "save_state": "manager",
}
__all__ = ["EXIT_PREEMPTED", "CheckpointManager", "CheckpointReader", "load_state", "save_state"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
