"""What a subclass of the trainer may override: which of transformers' and TRL's methods are called here.

A method that this engine does not call is refused when the class is made, with what to do instead: passed over, it
would change a run in silence. Reading such a name on a trainer gives the same advice.
"""

from __future__ import annotations

from typing import Any

from fullshard.config.errors import ConfigError

CALLED = frozenset({
    "train", "evaluate", "predict", "evaluation_loop", "prediction_step", "training_step", "compute_loss",
    "compute_loss_context_manager", "autocast_smart_context_manager", "create_optimizer", "create_scheduler",
    "create_optimizer_and_scheduler", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader",
    "get_batch_samples", "get_decay_parameter_names", "floating_point_ops", "store_flos", "log", "save_model",
    "create_model_card", "call_model_init", "loss_is_scaled_for_ga", "_prepare_inputs", "_prepare_input",
    "_get_num_items_in_batch", "_clip_grad_norm", "_evaluate", "_save", "_save_checkpoint", "_load_best_model",
    "_determine_best_metric", "_tag_names", "__init__",
})  # fmt: skip
"""Called by training, evaluation and saving, so that an override takes effect."""

OFFERED = frozenset({
    "add_callback", "pop_callback", "remove_callback", "end", "get_learning_rates", "get_num_trainable_parameters",
    "get_optimizer_group", "is_local_process_zero", "is_world_process_zero", "log_metrics", "metrics_format",
    "num_examples", "push_to_hub", "save_state", "save_metrics", "hyperparameter_search", "prepare",
})  # fmt: skip
"""Called by scripts only, so that an override is the script's own affair."""

SEEN = (
    "compute_loss", "training_step", "prediction_step", "evaluation_loop", "get_batch_samples", "floating_point_ops",
    "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch", "get_train_dataloader", "get_eval_dataloader",
    "get_test_dataloader",
)  # fmt: skip
"""Methods that get batches: where one is overridden, batches are as transformers' are."""

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


def check_subclass(kind: type, base: type) -> None:
    """Refuse a class that overrides what would not be called, or what the trainer uses for itself."""
    for name in vars(kind):
        if name in NOT_CALLED:
            raise ConfigError(
                f"{kind.__name__}.{name}: fullshard's trainer does not call this method, so overriding it would have "
                f"no effect; {NOT_CALLED[name]}."
            )
        own = hasattr(base, name) and name.startswith("_") and not name.startswith("__")
        if own and name not in CALLED and not hasattr(object, name):
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
