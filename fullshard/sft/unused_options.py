"""Settings of transformers' `TrainingArguments` and TRL's `SFTConfig` that change nothing here, each with the reason,
and those of which only the default is accepted, because another value would ask for something that is not done.

Part of `SFTConfig`, so that scripts and their files keep working. docs/options.md lists both. tests/sft/test_peers.py
fails when a field of those classes is neither here nor an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.options import option, options_of

PEER_NAMES = frozenset({
    "accelerator_config", "activation_offloading", "adam_beta1", "adam_beta2", "adam_epsilon", "assistant_only_loss",
    "auto_find_batch_size", "average_tokens_across_devices", "batch_eval_metrics", "bf16", "bf16_full_eval",
    "chat_template_path", "completion_only_loss", "data_seed", "dataloader_drop_last", "dataloader_in_order",
    "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "dataset_kwargs", "dataset_num_proc", "dataset_text_field",
    "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
    "ddp_timeout", "debug", "deepspeed", "disable_tqdm", "do_eval", "do_predict", "do_train", "enable_jit_checkpoint",
    "eos_token", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start", "eval_packing",
    "eval_steps", "eval_strategy", "eval_use_gather_object", "fp16", "fp16_full_eval", "fsdp", "fsdp_config",
    "full_determinism", "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "greater_is_better", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy",
    "hub_token", "ignore_data_skip", "include_for_metrics", "include_num_input_tokens_seen", "label_names",
    "label_smoothing_factor", "learning_rate", "length_column_name", "liger_kernel_config", "load_best_model_at_end",
    "local_rank", "log_level", "log_level_replica", "log_on_each_node", "logging_first_step",
    "logging_nan_inf_filter", "logging_steps", "logging_strategy", "loss_type", "lr_scheduler_kwargs",
    "lr_scheduler_type", "max_grad_norm", "max_length", "max_steps", "metric_for_best_model", "model_init_kwargs",
    "neftune_noise_alpha", "num_train_epochs", "optim", "optim_args", "optim_target_modules", "output_dir", "packing",
    "packing_strategy", "pad_to_multiple_of", "pad_token", "padding_free", "parallelism_config",
    "per_device_eval_batch_size", "per_device_train_batch_size", "prediction_loss_only", "project", "push_to_hub",
    "remove_unused_columns", "report_to", "restore_callback_states_from_checkpoint", "resume_from_checkpoint",
    "router_aux_loss_coef", "run_name", "save_on_each_node", "save_only_model", "save_steps", "save_strategy",
    "save_total_limit", "seed", "shuffle_dataset", "skip_memory_metrics", "tf32", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "trackio_bucket_id", "trackio_space_id",
    "trackio_static_space_id", "train_sampling_strategy", "truncation_mode", "trust_remote_code", "use_cache",
    "use_cpu", "use_liger_kernel", "warmup_steps", "weight_decay",
})  # fmt: skip

# ruff: noqa: RUF009 - options are fields


_DDP = "it configures DDP, which is not used"
_WORKERS = "batches are prepared by threads, in order, whose number is dataloader_num_workers"
_SCRIPT = "it is for the script, which decides what to call"


def _unused(default: Any, reason: str, **about: Any) -> Any:
    return option(default, no_op=reason, **about)


def _only(default: Any, reason: str, **about: Any) -> Any:
    return option(default, refused=reason, **about)


@dataclass
class UnusedOptions:
    """Settings that are accepted, and change nothing."""

    # --- without effect ---
    do_train: bool = _unused(False, _SCRIPT)
    do_eval: bool = _unused(False, _SCRIPT)
    do_predict: bool = _unused(False, _SCRIPT)
    local_rank: int = _unused(-1, "ranks come from the launcher; it holds this process's rank on its node")
    use_cache: bool = _unused(False, "training never uses the attention cache, generation always does")
    log_on_each_node: bool = _unused(True, "the first rank of the job logs")
    log_level_replica: str = _unused("warning", "ranks other than the first log warnings and errors")
    logging_nan_inf_filter: bool = _unused(
        True, "the logged loss is the mean of the finite ones; on_nonfinite_loss decides what a non-finite one does"
    )
    skip_memory_metrics: bool = _unused(True, "every log line has the memory in use, memory_gib")
    eval_accumulation_steps: int | None = _unused(None, "an evaluation keeps sums on the device, not predictions")
    enable_jit_checkpoint: bool = _unused(False, "a run that is asked to end (SIGTERM) always saves a checkpoint")
    restore_callback_states_from_checkpoint: bool = _unused(
        False, "a resumed run always restores the state of callbacks that have one"
    )
    dataloader_persistent_workers: bool = _unused(False, _WORKERS)
    dataloader_prefetch_factor: int | None = _unused(None, _WORKERS)
    dataloader_multiprocessing_context: str | None = _unused(None, _WORKERS)
    dataloader_in_order: bool = _unused(True, _WORKERS)
    remove_unused_columns: bool = _unused(True, "columns that are not used stay behind, and are counted")
    length_column_name: str = _unused("length", "lengths are counted in tokens")
    ddp_find_unused_parameters: bool | None = _unused(None, _DDP)
    ddp_bucket_cap_mb: int | None = _unused(None, _DDP)
    ddp_broadcast_buffers: bool | None = _unused(None, _DDP)
    ddp_static_graph: bool | None = _unused(None, _DDP)
    ddp_backend: str | None = _unused(None, "the devices decide: NCCL for GPUs, Gloo for CPUs")

    # --- only the default ---
    auto_find_batch_size: bool = _only(
        False, "the batch size is never changed behind the script's back; set per_device_train_batch_size"
    )
    bf16_full_eval: bool = _only(False, "evaluation computes as training does; set bf16")
    fp16_full_eval: bool = _only(False, "evaluation computes as training does; set fp16")
    use_liger_kernel: bool = _only(False, "Liger's kernels are not used; chunked_loss saves the memory of the logits")
    liger_kernel_config: dict[str, Any] | str | None = _only(None, "Liger's kernels are not used", kind=dict)
    ignore_data_skip: bool = _only(False, "a resumed run always continues with the row after the last one it used")
    save_on_each_node: bool = _only(False, "all nodes write one checkpoint together, in a folder they share")
    parallelism_config: dict[str, Any] | str | None = _only(
        None, "sizes of the mesh are settings of fullshard launch", kind=object
    )
    deepspeed: dict[str, Any] | str | None = _only(
        None, "DeepSpeed does not run here; the model is sharded by fullshard", kind=object
    )
    debug: str = _only("", "transformers' debug hooks do not run here", kind=object, script_only=True)
    include_for_metrics: list[str] = _only(list, "compute_metrics gets predictions and labels", kind=list)
    batch_eval_metrics: bool = _only(False, "compute_metrics is called once, with all predictions")
    eval_do_concat_batches: bool = _only(True, "compute_metrics is called once, with all predictions")
    eval_use_gather_object: bool = _only(False, "predictions are tensors")
    label_names: list[str] | None = _only(None, "labels are in the column labels", kind=list)

    def check_unused(self) -> None:
        """Refuse values that would ask for something that is not done."""
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            if one.refused and value != one.default and (value or one.default):
                raise ConfigError(f"{one.name} is {value!r}, which is not supported: {one.refused}. Leave it out.")
