"""What scripts written for Accelerate ask of `trainer.accelerator`: who speaks, settings, save and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard import runtime
from fullshard.checkpoint.manager import load_state, save_state
from fullshard.errors import ConfigError
from fullshard.options import nearest
from fullshard.parallelize.gather import gather_for_metrics

if TYPE_CHECKING:
    from fullshard.train.trainer import SFTTrainer

STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")


@dataclass
class Plugin:
    """The engine's settings under the names of Accelerate's `FullyShardedDataParallelPlugin`."""

    sharding_strategy: str
    cpu_offload: bool
    state_dict_type: str
    auto_wrap_policy: Any = None
    """May be set; the engine does not need it, since a unit may hold trainable and frozen parameters side by side."""

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Which values a user's own saving gathers. `save_model` writes whole values either way."""
        name = str(getattr(state_dict_type, "name", state_dict_type) or self.state_dict_type).upper()
        if name not in STATE_DICT_TYPES:
            raise ConfigError(f"state_dict_type {state_dict_type!r}{nearest(name, STATE_DICT_TYPES)}")
        self.state_dict_type = name


@dataclass
class State:
    fsdp_plugin: Plugin
    distributed_type: str = "FSDP"
    mixed_precision: str = "no"


@dataclass
class Accelerator:
    """The trainer's own view of the ranks."""

    trainer: SFTTrainer = field(repr=False)
    state: State

    @property
    def is_main_process(self) -> bool:
        return runtime.is_main()

    @property
    def is_local_main_process(self) -> bool:
        return runtime.local_rank() == 0

    @property
    def process_index(self) -> int:
        return runtime.rank()

    @property
    def num_processes(self) -> int:
        return runtime.world_size()

    @property
    def device(self) -> Any:
        return runtime.device()

    def print(self, *values: object, **options: Any) -> None:
        runtime.print0(*values, **options)

    def wait_for_everyone(self) -> None:
        runtime.barrier()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return gather_for_metrics(input_data, use_gather_object)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model itself: sharding leaves no wrapper around it."""
        return model

    def save_state(self, output_dir: str) -> None:
        """Save model, optimizer, position and random generators. All ranks must call it."""
        save_state(output_dir, self.trainer.loop.state())

    def load_state(self, input_dir: str) -> None:
        """Go on from what `save_state` or a run's checkpoint holds. All ranks must call it."""
        loop = self.trainer.loop
        loop.adopt(load_state(_newest(Path(input_dir)), loop.state()))


def _newest(place: Path) -> Path:
    """A checkpoint's folder from itself, or from the folder of a run's checkpoints."""
    from fullshard.checkpoint.manifest import published_steps, step_name

    for root in (place, place / "checkpoints"):
        if root.is_dir() and (steps := published_steps(root)):
            return root / step_name(steps[-1])
    return place
