"""The callbacks of a run, with their state and control.

State and control are transformers' own classes. Every event of transformers comes, in its order and with its arguments;
what a callback asks for counts if it asks on any rank. The trainer's own callbacks (`samples.py`, `hub.py`) are called
first, and never change the course of a run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import any_of, exchange
from fullshard.sft.sft_config import SFTConfig

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""What a callback can ask for, in `control`."""
CLEARED_FLAGS = {
    "on_train_begin": FLAGS[:1],
    "on_epoch_begin": FLAGS[1:2],
    "on_step_begin": FLAGS[2:],
    "on_save": FLAGS[2:3],
    "on_evaluate": FLAGS[3:4],
    "on_log": FLAGS[4:],
}
"""The requests that an event clears."""


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
        """The events after which the ranks agree on the requests."""
        for callback in callbacks:
            self.add_callback(callback)

    # --- the list ---------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an object or a class. One rank alone may: the ranks meet before the next event."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class; returns it, or None if there is none."""
        match = next((one for one in self.callbacks if _is(one, callback)), None)
        if match is not None:
            self.callbacks.remove(match)
        return match

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
        for flag in CLEARED_FLAGS.get(event, ()):
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
        requests = sum(bool(getattr(self.control, flag)) << bit for bit, flag in enumerate(FLAGS))
        requests = any_of(requests, "callbacks")
        for bit, flag in enumerate(FLAGS):
            setattr(self.control, flag, bool(requests >> bit & 1))

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

        states_of: dict[str, list[Any]] = {}
        for callback in (*self.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states_of.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states if len(states) > 1 else states[0] for name, states in states_of.items()}

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
    """transformers' callback that requests logs, evaluations and checkpoints by the settings, which also logs the last
    step."""
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
