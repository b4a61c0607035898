"""What scripts written for transformers and Accelerate use around a run: callbacks (`on_log(args, state, control,
logs=…)` and the like), and `trainer.accelerator`.

A callback may set `control.should_training_stop`; one rank is enough. The trainer's own callbacks (`samples.py`,
`hub.py`) are called the same way, and never stop a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard import runtime
from fullshard.checkpoint.manager import load_state, save_state
from fullshard.checkpoint.manifest import published_steps, step_name
from fullshard.errors import ConfigError
from fullshard.options import nearest
from fullshard.parallelize.gather import gather_for_metrics
from fullshard.ranks import any_of
from fullshard.train.loop import Loop
from fullshard.train.run_dir import CHECKPOINTS

# --- callbacks ------------------------------------------------------------------------------------------------------


@dataclass
class TrainerState:
    """The progress of a run under transformers' names."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    best_metric: float | None = None
    best_global_step: int | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_world_process_zero: bool = True


@dataclass
class TrainerControl:
    """What a callback asks for."""

    should_training_stop: bool = False


class Callbacks:
    """Calls every callback that has a method for an event."""

    def __init__(self, callbacks: Sequence[Any], args: Any, state: TrainerState, own: Sequence[Any] = ()) -> None:
        self.callbacks, self.args, self.state, self.own = list(callbacks), args, state, list(own)
        self.control = TrainerControl()

    def __call__(self, event: str, step: int = 0, checkpoints: Any = None, **facts: Any) -> bool:
        """Call the callbacks of an event. Returns whether one of them, on any rank, asks to stop.

        `checkpoints`, the run's checkpoint manager, is for the trainer's own callbacks only.
        """
        self.state.global_step = step
        for callback in self.own:
            if (method := getattr(callback, event, None)) is not None:
                method(self.args, self.state, self.control, checkpoints=checkpoints, **facts)
        for callback in self.callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(self.args, self.state, self.control, **facts)
        if not self.callbacks or event != "on_step_end":
            return False
        return bool(any_of(int(self.control.should_training_stop), "callbacks"))


# --- accelerator ----------------------------------------------------------------------------------------------------

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
        """Choose the values that a script's own saving gathers. `save_model` writes whole values in any case."""
        name = str(getattr(state_dict_type, "name", state_dict_type) or self.state_dict_type).upper()
        if name not in STATE_DICT_TYPES:
            raise ConfigError(f"state_dict_type {state_dict_type!r}{nearest(name, STATE_DICT_TYPES)}")
        self.state_dict_type = name


@dataclass
class AcceleratorState:
    """The `state` of an `Accelerator`."""

    fsdp_plugin: Plugin
    distributed_type: str = "FSDP"
    mixed_precision: str = "no"


@dataclass
class Accelerator:
    """The ranks of a trainer's run, under the names of Accelerate's `Accelerator`."""

    prepare: Callable[[], Loop] = field(repr=False)
    """The trainer's: the training loop, made at the first call."""
    state: AcceleratorState

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
        """The model itself: sharding adds no wrapper."""
        return model

    def save_state(self, output_dir: str) -> None:
        """Save model, optimizer, progress and random generators. All ranks must call it."""
        save_state(output_dir, self.prepare().state())

    def load_state(self, input_dir: str) -> None:
        """Resume from what `save_state` or a run's checkpoint holds. All ranks must call it."""
        loop = self.prepare()
        loop.adopt(load_state(_newest(Path(input_dir)), loop.state()))


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder or its folder of checkpoints; else the folder itself."""
    for root in (folder, folder / CHECKPOINTS):
        if root.is_dir() and (steps := published_steps(root)):
            return root / step_name(steps[-1])
    return folder
