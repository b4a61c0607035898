"""What a subclass of the trainer may override: one table of transformers' and TRL's methods.

Each row names the part of the trainer that implements a method. From the table the trainer's class gets its methods
(`with_methods`), and parts and loop get them as plain functions (`Calls`), a script's override where there is one. A
method that this engine does not call is refused when the class is defined, with what to do instead: ignored, it would
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


def _methods(part: str, names: str, *, called: bool = True, sees_batches: bool = False) -> dict[str, Method]:
    return dict.fromkeys(names.split(), Method(part, called, sees_batches))


METHODS = {
    **_methods("trainer", "__init__ train call_model_init _tag_names loss_is_scaled_for_ga"),
    **_methods("trainer", "prepare", called=False),
    **_methods(
        "step",
        "get_train_dataloader get_batch_samples _get_num_items_in_batch _prepare_inputs _prepare_input "
        "training_step compute_loss floating_point_ops",
        sees_batches=True,
    ),
    **_methods("step", "compute_loss_context_manager autocast_smart_context_manager _clip_grad_norm store_flos log"),
    **_methods(
        "optimizers",
        "create_optimizer_and_scheduler create_optimizer create_scheduler get_decay_parameter_names",
    ),
    **_methods("optimizers", "get_learning_rates get_optimizer_group", called=False),
    **_methods(
        "evaluation",
        "get_eval_dataloader get_test_dataloader evaluation_loop prediction_step",
        sees_batches=True,
    ),
    **_methods("evaluation", "evaluate predict _evaluate _determine_best_metric"),
    **_methods("evaluation", "num_examples", called=False),
    **_methods("saver", "save_model create_model_card _save _save_checkpoint _load_best_model"),
    **_methods("saver", "push_to_hub", called=False),
    **_methods(
        "script",
        "add_callback pop_callback remove_callback end get_num_trainable_parameters hyperparameter_search "
        "is_local_process_zero is_world_process_zero log_metrics metrics_format save_metrics save_state",
        called=False,
    ),
}
"""The methods of transformers' and TRL's trainers that this trainer has."""

ADVICE = {
    "choose how the model is sharded with fsdp and fsdp_config, or the launcher's options": (
        "create_accelerator_and_postprocess get_cp_size get_sp_size get_tp_size _build_accelerator_args "
        "_has_mixed_mesh_grads _mixed_mesh_grad_norm _move_model_to_device _prepare_context_parallel_inputs "
        "_sync_replicated_trainable_parameters _wrap_model"
    ),
    "fullshard resumes model, optimizer and data together; use a callback with a state (ExportableState)": (
        "_init_training_state _issue_warnings_after_load _load_callback_state _load_from_checkpoint "
        "_load_optimizer_and_scheduler _load_rng_state _load_scaler"
    ),
    "override training_step, evaluate or log, or use callbacks: they have every event of transformers": (
        "_inner_training_loop _maybe_log_save_evaluate _prepare_for_training _run_epoch"
    ),
    "prepare the rows yourself: give rows with input_ids and labels": (
        "_prepare_dataset _reject_skip_prepare_without_labels _remove_unused_columns _set_signature_columns_if_needed"
    ),
    "use push_to_hub, hub_model_id and hub_strategy": "init_hf_repo _finish_current_push _push_from_checkpoint",
    "start one run per trial, each with its own output_dir": (
        "_hp_search_setup _report_to_hp_search _tune_save_checkpoint"
    ),
    "override _save_checkpoint, or save beside it in a callback's on_save": (
        "_save_optimizer_and_scheduler _save_rng_state _save_scaler"
    ),
    "override create_model_card": "_paper _template_file",
    "set per_device_train_batch_size and gradient_accumulation_steps": "get_total_train_batch_size",
    "pass optimizer_cls_and_kwargs, or override create_optimizer": "get_optimizer_cls_and_kwargs",
    "set num_train_epochs or max_steps": "set_initial_training_values",
    "use a callback's on_train_end": "_finalize_training",
    "pass data_collator": "_get_collator_with_removed_columns",
    "override get_train_dataloader or get_eval_dataloader": "_get_dataloader",
    "override get_eval_dataloader and return a DataLoader with your sampler": "_get_eval_sampler",
    "override _clip_grad_norm": "_get_grad_norm",
    "override create_scheduler": "_get_learning_rate",
    "set output_dir": "_get_output_dir",
    "override get_train_dataloader and return a DataLoader with your sampler": "_get_train_sampler",
    "set run_name": "_name",
    "nothing is sent": "_send_telemetry",
    "the log has num_tokens": "_track_num_input_tokens",
    "set per_device_train_batch_size": "_update_auto_batch_size",
    "check the settings before you make the trainer": "_validate_args",
}
"""What to do instead of overriding methods of transformers' and TRL's trainers that are not called here."""
NOT_CALLED = {name: advice for advice, names in ADVICE.items() for name in names.split()}


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
        self._is_overridden = functools.partial(is_overridden, trainer)
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


def missing_attribute(trainer: Any, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have."""
    kind = type(trainer).__name__
    if name in NOT_CALLED:
        return AttributeError(f"{kind} has no {name}, which transformers' trainer has: {NOT_CALLED[name]}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")


def is_overridden(trainer: Any, name: str) -> bool:
    """Whether a script has replaced a method, in a subclass or on the trainer itself."""
    if name in vars(trainer):
        return True
    owner = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
    return not owner.__module__.startswith("fullshard.")
