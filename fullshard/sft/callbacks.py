"""What scripts written for transformers and Accelerate use around a run: callbacks, with their state and control, and
`trainer.accelerator`.

State and control are transformers' own classes. Every event of transformers comes, in its order and with its arguments;
what a callback asks for counts if it asks on any rank. The trainer's own callbacks (`samples.py`, `hub.py`) are called
first, and never change the course of a run.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manager import load_state, save_state
from fullshard.checkpoint.manifest import published_steps, step_name
from fullshard.config.errors import ConfigError
from fullshard.config.options import nearest
from fullshard.distributed import runtime
from fullshard.distributed.ranks import any_of, exchange
from fullshard.parallel.gather import gather_for_metrics
from fullshard.sft.loop import Loop
from fullshard.sft.run_dir import CHECKPOINTS
from fullshard.sft.run_progress import check_progress
from fullshard.sft.sft_config import SFTConfig

# --- callbacks ------------------------------------------------------------------------------------------------------

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""What a callback can ask for, in `control`."""
ANSWERED = {
    "on_train_begin": FLAGS[:1],
    "on_epoch_begin": FLAGS[1:2],
    "on_step_begin": FLAGS[2:],
    "on_save": FLAGS[2:3],
    "on_evaluate": FLAGS[3:4],
    "on_log": FLAGS[4:],
}
"""Requests that are over when an event comes."""


class Callbacks:
    """The callbacks of a run; transformers' `CallbackHandler`, for several ranks. Each rank has its own callbacks."""

    def __init__(self, args: Any, callbacks: Sequence[Any]) -> None:
        from transformers.trainer_callback import TrainerControl, TrainerState

        self.args = args
        self.callbacks: list[Any] = [default_flow()]
        self.own: list[Any] = []
        """The trainer's own callbacks."""
        self.control: Any = TrainerControl()
        self.state: Any = TrainerState(
            is_local_process_zero=runtime.local_rank() == 0, is_world_process_zero=runtime.is_main()
        )
        self.model: Any = None
        self.processing_class: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self._agreed: frozenset[str] = frozenset()
        """The events after which the ranks agree on what was asked for."""
        for callback in callbacks:
            self.add_callback(callback)

    # --- the list ---------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an object or a class. One rank alone may: the ranks meet before the next event."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class; returns it, or None if there is none."""
        found = next((one for one in self.callbacks if _is(one, callback)), None)
        if found is not None:
            self.callbacks.remove(found)
        return found

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class if there is one."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ConfigError(f"remove_callback: {callback!r} is not one of the trainer's callbacks.")

    # --- events -----------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Find out after which events the ranks must agree: those that a callback of any rank has a method for. All
        ranks must call it, before training, evaluation and the trainer's first event."""
        self._agreed = frozenset().union(*exchange(self._events(), "callbacks"))

    def _events(self) -> frozenset[str]:
        from transformers.trainer_callback import TrainerCallback

        def has(callback: Any, name: str) -> bool:
            method = getattr(callback, name, None)
            return method is not None and getattr(method, "__func__", method) is not getattr(TrainerCallback, name)

        names = [name for name in dir(TrainerCallback) if name.startswith("on_")]
        return frozenset(name for name in names if any(has(callback, name) for callback in self.callbacks[1:]))

    def __call__(self, event: str, *, checkpoints: Any = None, **facts: Any) -> Any:
        """Call the callbacks of an event; returns the control, which is the same on every rank.

        `checkpoints`, the run's checkpoint manager, is for the trainer's own callbacks only.
        """
        for flag in ANSWERED.get(event, ()):
            setattr(self.control, flag, False)
        for callback in self.own:
            if (method := getattr(callback, event, None)) is not None:
                method(self.args, self.state, self.control, checkpoints=checkpoints, **facts)
        facts |= {
            "model": self.model, "processing_class": self.processing_class, "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler, "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
        }  # fmt: skip
        for callback in list(self.callbacks):
            if (method := getattr(callback, event, None)) is not None:
                self.control = method(self.args, self.state, self.control, **facts) or self.control
        if event in self._agreed:
            self._agree()
        return self.control

    def _agree(self) -> None:
        asked = sum(bool(getattr(self.control, flag)) << bit for bit, flag in enumerate(FLAGS))
        asked = any_of(asked, "callbacks")
        for bit, flag in enumerate(FLAGS):
            setattr(self.control, flag, bool(asked >> bit & 1))

    def begin(self, total: int, steps: Any, history: list[dict[str, Any]]) -> None:
        """A new state, for a training of this many steps."""
        from transformers.trainer_callback import TrainerState

        length, args = steps.steps_per_epoch, self.args
        self.state = TrainerState(
            max_steps=total, num_train_epochs=-(-total // length) if length else sys.maxsize,
            train_batch_size=args.per_device_train_batch_size, log_history=history,
            is_local_process_zero=runtime.local_rank() == 0, is_world_process_zero=runtime.is_main(),
            stateful_callbacks=self.exported(),
        )  # fmt: skip
        self.state.compute_steps(args, total)
        if args.eval_steps is None:
            self.state.eval_steps = self.state.logging_steps if args.logging_steps else args.evaluates_every
        if args.logging_steps is None:
            self.state.logging_steps = args.logs_every(total)
        self.meet()

    # --- what a checkpoint holds ------------------------------------------------------------------------------------

    def exported(self) -> dict[str, Any]:
        """The state of the callbacks that have one (transformers' `ExportableState`), by class name: plain data."""
        from transformers.trainer_callback import ExportableState

        found: dict[str, list[Any]] = {}
        for callback in (*self.callbacks, self.control):
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states if len(states) > 1 else states[0] for name, states in found.items()}

    def restore(self, exported: dict[str, Any]) -> None:
        """Give callbacks the state that a checkpoint holds for their class."""
        self.state.stateful_callbacks = exported
        for name, states in exported.items():
            mine = [callback for callback in self.callbacks if type(callback).__name__ == name]
            for callback, state in zip(mine, states if isinstance(states, list) else [states], strict=False):
                vars(callback).update({**state.get("args", {}), **state.get("attributes", {})})


def _is(one: Any, callback: Any) -> bool:
    return isinstance(one, callback) if isinstance(callback, type) else one is callback or one == callback


def with_best_metric(config: SFTConfig) -> SFTConfig:
    """The settings as transformers fills them in where the best model is asked for; callbacks read them."""
    if not config.load_best_model_at_end and config.metric_for_best_model is None:
        return config
    metric = config.metric_for_best_model or "loss"
    return dataclasses.replace(config, metric_for_best_model=metric, greater_is_better=config.higher_is_better)


def default_flow() -> Any:
    """The callback that asks for logs, evaluations and checkpoints as the settings say; it is the first one.

    As transformers', and the last step is logged whatever `logging_steps` is.
    """
    from transformers.trainer_callback import DefaultFlowCallback

    class DefaultFlow(DefaultFlowCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> Any:
            step, last = state.global_step, state.global_step >= state.max_steps
            control.should_training_stop |= last
            first = step == 1 and args.logging_first_step
            control.should_log |= (
                first or last or (args.logging_strategy == "steps" and step % state.logging_steps == 0)
            )
            evaluates = args.eval_strategy == "steps" and getattr(args, "eval_delay", 0) <= step
            control.should_evaluate |= evaluates and (step % state.eval_steps == 0 or last)
            control.should_save |= args.save_strategy == "steps" and (step % state.save_steps == 0 or last)
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **facts: Any) -> Any:
            control.should_log |= args.logging_strategy == "epoch"
            control.should_evaluate |= args.eval_strategy == "epoch" and getattr(args, "eval_delay", 0) <= state.epoch
            control.should_save |= args.save_strategy == "epoch"
            return control

    return DefaultFlow()


# --- methods for scripts --------------------------------------------------------------------------------------------


class ScriptMethods:
    """Methods of transformers' trainer that scripts call and training itself does not need."""

    args: Any
    callback_handler: Callbacks
    optimizer: Any
    model_init: Any = None

    @property
    def state(self) -> Any:
        """The progress of the run, as transformers' `TrainerState`."""
        return self.callback_handler.state

    @property
    def control(self) -> Any:
        """What the callbacks ask for, as transformers' `TrainerControl`."""
        return self.callback_handler.control

    def add_callback(self, callback: Any) -> None:
        """Add a callback, given as an object or as a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class; returns it, or None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class if there is one."""
        self.callback_handler.remove_callback(callback)

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
            self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._groups()]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group of a parameter, or the parameters of all groups."""
        groups = self._groups()
        found = (group for group in groups if any(param is each for each in group["params"]))
        return next(found, None) if param is not None else [group["params"] for group in groups]

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ConfigError("there is no optimizer yet; call trainer.prepare() or train() first.")
        return self.optimizer.param_groups

    def get_num_trainable_parameters(self) -> int:
        """The number of trainable parameters, of all ranks together."""
        return sum(p.numel() for p in self.callback_handler.model.parameters() if p.requires_grad)

    def end(self) -> None:
        """Leave the process group, at the end of a script."""
        runtime.shutdown()

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refused: ranks are started once per run."""
        raise ConfigError(
            "hyperparameter_search is not supported: ranks are started once per run; start one run per trial, each "
            "with its own output_dir."
        )

    def call_model_init(self, trial: Any = None) -> Any:
        """A model from `model_init`, with the run's seed."""
        takes_trial = inspect.signature(self.model_init).parameters
        made = self.model_init(trial) if takes_trial else self.model_init()
        if made is None:
            raise ConfigError("model_init returned None; expected a model.")
        return made


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

    def gather(self, tensor: Any) -> Any:
        return gather_for_metrics(tensor)

    def backward(self, loss: Any, **options: Any) -> None:
        """The gradients of a micro-batch's loss; in fp16 the loss is scaled."""
        loop = self.prepare()
        factor = 0.0 if loop.stands_in else loop.scale
        (loss if factor == 1 else loss * factor).backward(**options)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model itself: sharding adds no wrapper."""
        return model

    def save_state(self, output_dir: str) -> None:
        """Save model, optimizer, progress and random generators. All ranks must call it."""
        save_state(output_dir, self.prepare().state())

    def load_state(self, input_dir: str) -> None:
        """Resume from what `save_state` or a run's checkpoint holds. All ranks must call it."""
        loop = self.prepare()
        loop.adopt(load_state(_newest(Path(input_dir)), loop.state(), check_values=check_progress))


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder or its folder of checkpoints; else the folder itself."""
    for root in (folder, folder / CHECKPOINTS):
        if root.is_dir() and (steps := published_steps(root)):
            return root / step_name(steps[-1])
    return folder
