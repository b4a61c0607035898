"""What scripts written for transformers and Accelerate use beside training: methods that training does not need, and
`trainer.accelerator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manager import save_state
from fullshard.config.errors import ConfigError
from fullshard.config.options import nearest
from fullshard.distributed import runtime
from fullshard.parallel.gather import gather_for_metrics
from fullshard.sft.loop import Loop
from fullshard.sft.overrides import Calls
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer_context import TrainerContext
from fullshard.sft.training_state import MicroBatch

# --- methods --------------------------------------------------------------------------------------------------------


class ScriptMethods:
    """Methods of transformers' trainer that scripts call and training itself does not need."""

    def __init__(self, context: TrainerContext, calls: Calls) -> None:
        self._context, self._calls = context, calls

    @property
    def args(self) -> SFTConfig:
        """The settings, which transformers' functions read."""
        return self._context.args

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an object or a class."""
        self._context.events.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class; returns it, or None if there is none."""
        return self._context.events.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class if there is one."""
        self._context.events.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its node."""
        return runtime.local_rank() == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first rank."""
        return runtime.is_main()

    def save_state(self) -> None:
        """Write the state to `trainer_state.json` in `output_dir`, on the first rank."""
        if runtime.is_main():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self._context.events.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def get_num_trainable_parameters(self) -> int:
        """The number of trainable parameters, of all ranks together."""
        return sum(p.numel() for p in self._context.events.model.parameters() if p.requires_grad)

    def end(self) -> None:
        """Leave the process group, at the end of a script."""
        runtime.shutdown()

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refused: ranks are started once per run."""
        raise ConfigError(
            "hyperparameter_search is not supported: ranks are started once per run; start one run per trial, each "
            "with its own output_dir."
        )

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics as a table, on the first rank."""
        from transformers import trainer_pt_utils

        trainer_pt_utils.log_metrics(self._calls, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json` and `all_results.json` in `output_dir`, on the first rank."""
        from transformers import trainer_pt_utils

        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        trainer_pt_utils.save_metrics(self, split, metrics, combined)

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics as text for people."""
        from transformers import trainer_pt_utils

        return trainer_pt_utils.metrics_format(metrics)


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

    state: AcceleratorState
    micro: MicroBatch = field(repr=False)
    prepare: Callable[[], Loop] = field(repr=False)
    """The trainer's method: the training loop."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first rank."""
        return runtime.is_main()

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return runtime.local_rank() == 0

    @property
    def process_index(self) -> int:
        """This rank."""
        return runtime.rank()

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return runtime.world_size()

    @property
    def device(self) -> Any:
        """This rank's device."""
        return runtime.device()

    def print(self, *values: object, **options: Any) -> None:
        """Print on the first rank."""
        runtime.print0(*values, **options)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        runtime.barrier()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The values of all ranks, without rows that were repeated to fill a batch."""
        return gather_for_metrics(input_data, use_gather_object)

    def gather(self, tensor: Any) -> Any:
        """The values of all ranks."""
        return gather_for_metrics(tensor)

    def backward(self, loss: Any, **options: Any) -> None:
        """The gradients of a micro-batch's loss; in fp16 the loss is scaled."""
        self.micro.backward(loss, **options)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model itself: sharding adds no wrapper."""
        return model

    def save_state(self, output_dir: str) -> None:
        """Save model, optimizer, progress and random generators. All ranks must call it."""
        save_state(output_dir, self.prepare().snapshot())

    def load_state(self, input_dir: str) -> None:
        """Resume from what `save_state` or a run's checkpoint holds. All ranks must call it."""
        self.prepare().load(Path(input_dir))
