"""What a subclass of the trainer may override: one table of transformers' and TRL's methods.

Each row names the part of the trainer that implements a method. From the table the trainer's class gets its methods
(`with_methods`), and parts and loop get them as plain functions (`Calls`), a script's override where there is one. A
method that this engine does not call is refused when the class is made, with what to do instead: passed over, it would
change a run in silence. Reading such a name on a trainer gives the same advice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fullshard.config.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """A method of transformers' or TRL's trainer."""

    part: str
    """The part of the trainer that implements it; "trainer" for the trainer itself."""
    called: bool = True
    """Whether training, evaluation or saving call it, so that an override takes effect. The others are called by
    scripts only, and an override is the script's own affair."""
    sees_batches: bool = False
    """Whether it gets batches: where such a method is overridden, batches are as transformers' are."""


METHODS = {
    "__init__": Method("trainer"),
    "train": Method("trainer"),
    "prepare": Method("trainer", called=False),
    "call_model_init": Method("trainer"),
    "_tag_names": Method("trainer"),
    "loss_is_scaled_for_ga": Method("trainer"),
    # batches
    "get_train_dataloader": Method("step", sees_batches=True),
    "get_batch_samples": Method("step", sees_batches=True),
    "_get_num_items_in_batch": Method("step", sees_batches=True),
    "_prepare_inputs": Method("step", sees_batches=True),
    "_prepare_input": Method("step", sees_batches=True),
    # loss and gradients
    "training_step": Method("step", sees_batches=True),
    "compute_loss": Method("step", sees_batches=True),
    "compute_loss_context_manager": Method("step"),
    "autocast_smart_context_manager": Method("step"),
    "_clip_grad_norm": Method("step"),
    "floating_point_ops": Method("step", sees_batches=True),
    "store_flos": Method("step"),
    "log": Method("step"),
    # optimizer and schedule
    "create_optimizer_and_scheduler": Method("optimizers"),
    "create_optimizer": Method("optimizers"),
    "create_scheduler": Method("optimizers"),
    "get_decay_parameter_names": Method("optimizers"),
    "get_learning_rates": Method("optimizers", called=False),
    "get_optimizer_group": Method("optimizers", called=False),
    # evaluation
    "get_eval_dataloader": Method("evaluation", sees_batches=True),
    "get_test_dataloader": Method("evaluation", sees_batches=True),
    "evaluate": Method("evaluation"),
    "predict": Method("evaluation"),
    "evaluation_loop": Method("evaluation", sees_batches=True),
    "prediction_step": Method("evaluation", sees_batches=True),
    "num_examples": Method("evaluation", called=False),
    "_evaluate": Method("evaluation"),
    "_determine_best_metric": Method("evaluation"),
    # saving
    "save_model": Method("saver"),
    "create_model_card": Method("saver"),
    "push_to_hub": Method("saver", called=False),
    "_save": Method("saver"),
    "_save_checkpoint": Method("saver"),
    "_load_best_model": Method("saver"),
    # for scripts
    "add_callback": Method("script", called=False),
    "pop_callback": Method("script", called=False),
    "remove_callback": Method("script", called=False),
    "end": Method("script", called=False),
    "get_num_trainable_parameters": Method("script", called=False),
    "hyperparameter_search": Method("script", called=False),
    "is_local_process_zero": Method("script", called=False),
    "is_world_process_zero": Method("script", called=False),
    "log_metrics": Method("script", called=False),
    "metrics_format": Method("script", called=False),
    "save_metrics": Method("script", called=False),
    "save_state": Method("script", called=False),
}
"""The methods of transformers' and TRL's trainers that this trainer has."""

_LOADER = "override get_train_dataloader or get_eval_dataloader"
_DATA = "prepare the rows yourself: give rows with input_ids and labels"
_CHECKPOINT = "override _save_checkpoint, or save beside it in a callback's on_save"
_RESUME = "fullshard resumes model, optimizer and data together; use a callback with a state (ExportableState)"
_LOOP = "override training_step, evaluate or log, or use callbacks: they have every event of transformers"
_ENGINE = "choose how the model is sharded with fsdp and fsdp_config, or the launcher's options"
_HUB = "use push_to_hub, hub_model_id and hub_strategy"
_SEARCH = "start one run per trial, each with its own output_dir"

NOT_CALLED = {
    "create_accelerator_and_postprocess": _ENGINE,
    "get_cp_size": _ENGINE,
    "get_sp_size": _ENGINE,
    "get_tp_size": _ENGINE,
    "get_total_train_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "get_optimizer_cls_and_kwargs": "pass optimizer_cls_and_kwargs, or override create_optimizer",
    "init_hf_repo": _HUB,
    "set_initial_training_values": "set num_train_epochs or max_steps",
    "_build_accelerator_args": _ENGINE,
    "_finalize_training": "use a callback's on_train_end",
    "_finish_current_push": _HUB,
    "_get_collator_with_removed_columns": "pass data_collator",
    "_get_dataloader": _LOADER,
    "_get_eval_sampler": "override get_eval_dataloader and return a DataLoader with your sampler",
    "_get_grad_norm": "override _clip_grad_norm",
    "_get_learning_rate": "override create_scheduler",
    "_get_output_dir": "set output_dir",
    "_get_train_sampler": "override get_train_dataloader and return a DataLoader with your sampler",
    "_has_mixed_mesh_grads": _ENGINE,
    "_hp_search_setup": _SEARCH,
    "_init_training_state": _RESUME,
    "_inner_training_loop": _LOOP,
    "_issue_warnings_after_load": _RESUME,
    "_load_callback_state": _RESUME,
    "_load_from_checkpoint": _RESUME,
    "_load_optimizer_and_scheduler": _RESUME,
    "_load_rng_state": _RESUME,
    "_load_scaler": _RESUME,
    "_maybe_log_save_evaluate": _LOOP,
    "_mixed_mesh_grad_norm": _ENGINE,
    "_move_model_to_device": _ENGINE,
    "_name": "set run_name",
    "_paper": "override create_model_card",
    "_prepare_context_parallel_inputs": _ENGINE,
    "_prepare_dataset": _DATA,
    "_prepare_for_training": _LOOP,
    "_push_from_checkpoint": _HUB,
    "_reject_skip_prepare_without_labels": _DATA,
    "_remove_unused_columns": _DATA,
    "_report_to_hp_search": _SEARCH,
    "_run_epoch": _LOOP,
    "_save_optimizer_and_scheduler": _CHECKPOINT,
    "_save_rng_state": _CHECKPOINT,
    "_save_scaler": _CHECKPOINT,
    "_send_telemetry": "nothing is sent",
    "_set_signature_columns_if_needed": _DATA,
    "_sync_replicated_trainable_parameters": _ENGINE,
    "_template_file": "override create_model_card",
    "_track_num_input_tokens": "the log has num_tokens",
    "_tune_save_checkpoint": _SEARCH,
    "_update_auto_batch_size": "set per_device_train_batch_size",
    "_validate_args": "check the settings before you make the trainer",
    "_wrap_model": _ENGINE,
}
"""Methods of transformers' and TRL's trainers that are not called here, and what to do instead."""


Kind = TypeVar("Kind", bound=type)


def with_methods(**parts: type) -> Callable[[Kind], Kind]:
    """Give a trainer's class the methods that its parts implement; each part is an attribute, named with `_` before."""

    def decorate(kind: Kind) -> Kind:
        for name, method in METHODS.items():
            if method.part != "trainer":
                setattr(kind, name, _delegate(f"_{method.part}", name, getattr(parts[method.part], name)))
        return kind

    return decorate


def _delegate(part: str, name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the trainer that calls its part's, with the same signature and docstring."""

    @functools.wraps(implementation)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(getattr(self, part), name)(*args, **options)

    return method


class Calls:
    """The methods of a trainer as plain functions: a script's override where there is one, looked up at each call."""

    def __init__(self, trainer: Any) -> None:
        for name in METHODS.keys() - {"__init__"}:
            setattr(self, name, functools.partial(_call, trainer, name))
        self._is_overridden = functools.partial(overridden, trainer)
        self._value = functools.partial(getattr, trainer)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"{name} is no row of METHODS")

    def value(self, name: str) -> Any:
        """A value that a class may override, as `_tag_names`."""
        return self._value(name)

    def is_overridden(self, *names: str) -> bool:
        """Whether a script has replaced one of these methods."""
        return any(self._is_overridden(name) for name in names)

    @property
    def batches_are_seen(self) -> bool:
        """Whether a method that gets batches was replaced."""
        return self.is_overridden(*(name for name, method in METHODS.items() if method.sees_batches))


def _call(trainer: Any, name: str, *args: Any, **options: Any) -> Any:
    return getattr(trainer, name)(*args, **options)


def check_subclass(kind: type, base: type) -> None:
    """Refuse a class that overrides what would not be called, or what the trainer uses for itself."""
    for name in vars(kind):
        if name in NOT_CALLED:
            raise ConfigError(
                f"{kind.__name__}.{name}: fullshard's trainer does not call this method, so overriding it would have "
                f"no effect; {NOT_CALLED[name]}."
            )
        own = hasattr(base, name) and name.startswith("_") and not name.startswith("__")
        if own and not (name in METHODS and METHODS[name].called) and not hasattr(object, name):
            raise ConfigError(f"{kind.__name__}.{name}: fullshard's trainer uses this name itself; choose another.")


def missing(trainer: Any, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have."""
    kind = type(trainer).__name__
    if name in NOT_CALLED:
        return AttributeError(f"{kind} has no {name}, which transformers' trainer has: {NOT_CALLED[name]}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")


def overridden(trainer: Any, name: str) -> bool:
    """Whether a script has replaced a method, in a subclass or on the trainer itself."""
    if name in vars(trainer):
        return True
    owner = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
    return not owner.__module__.startswith("fullshard.")
