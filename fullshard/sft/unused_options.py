"""Settings without effect: those of transformers' and TRL's trainers that change nothing here, each with the reason;
those of which only the default is accepted; and what other settings need to have an effect: `lora_r` needs an adapter,
`eval_steps` needs evaluations.

On a command line and in its file, settings of LoRA turn LoRA on. Other settings without what they need are reported by
the run. docs/options.md lists the first two kinds. tests/sft/test_peers.py fails when a field of `TrainingArguments` or
TRL's `SFTConfig` is neither here nor an option; tests/sft/test_needs.py walks through all settings.
"""

# ruff: noqa: RUF009 - options are fields

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_list, option, options_of
from fullshard.lora.adapter_config import is_adapter

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


# --- what settings need ----------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """What some settings need."""

    names: tuple[str, ...]
    why: str
    """Why they have no effect without it, and what to set."""
    met: Callable[[Any], Any]
    """Whether a run has it."""
    in_scripts: bool = True
    """Whether a script, which may give a `peft_config` and call `evaluate` or `push_to_hub`, needs it too."""


def _need(names: str, why: str, met: Callable[[Any], Any], in_scripts: bool = True) -> Need:
    return Need(tuple(names.split()), why, met, in_scripts)


def _resumes(run: Any) -> bool:
    """Whether the run resumes an adapter."""
    return run.adapter_name_or_path is not None or is_adapter(run.model_name_or_path or "")


def _trains(run: Any, *kinds: str) -> bool:
    """Whether the run trains an adapter, of one of these kinds if any are named; one that it resumes may be any."""
    return _resumes(run) or run.adapter_kind in kinds or (not kinds and run.adapter_kind is not None)


def _evaluates(run: Any) -> bool:
    return run.eval_strategy != "no"


def _packs(run: Any) -> bool:
    return run.packing or bool(run.eval_packing)


def _reports_to(run: Any, *names: str) -> bool:
    return bool({*names, "all"} & {*as_list(run.report_to)})


LORA = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora", "init_lora_weights",
    "trainable_token_indices", "adapter_dtype", "fused_lora", "loraplus_lr_ratio", "peft_type",
)  # fmt: skip
"""Settings that turn LoRA on where a command line leaves `use_peft_lora` open."""
NEEDS = (
    # --- adapters ---
    _need(
        "lora_r lora_dropout lora_target_modules", "only LoRA and VeRA adapters have it; set use_peft_lora",
        lambda run: _trains(run, "lora", "vera"),
    ),
    _need(
        "lora_alpha use_rslora use_dora init_lora_weights trainable_token_indices",
        "only LoRA adapters have it; set use_peft_lora", lambda run: _trains(run, "lora"),
    ),
    _need("peft_type", "there is no adapter; set use_peft_lora", _trains),
    _need("adapter_dtype", "there is no adapter; set use_peft_lora", _trains, in_scripts=False),
    _need(
        "fused_lora lora_experts loraplus_lr_ratio", "there is no LoRA adapter; set use_peft_lora",
        lambda run: _trains(run, "lora"), in_scripts=False,
    ),
    _need(
        "lora_experts", "only all-linear has experts; set lora_target_modules to all-linear",
        lambda run: as_list(run.lora_target_modules) == ["all-linear"] or _resumes(run), in_scripts=False,
    ),
    _need("loraplus_lr_embedding", "LoRA+ is off; set loraplus_lr_ratio", lambda run: run.loraplus_lr_ratio),
    _need(
        "num_virtual_tokens", "only prompt methods have virtual tokens; set peft_type to one of them",
        lambda run: run.adapter_kind in ("prompt_tuning", "prefix_tuning", "p_tuning"),
    ),
    _need(
        "encoder_hidden_size", "only p-tuning and prefix tuning with prefix_projection have an encoder",
        lambda run: run.adapter_kind == "p_tuning" or (run.adapter_kind == "prefix_tuning" and run.prefix_projection),
    ),
    _need(
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage_dtype bnb_4bit_quant_type",
        "the model is not quantized; set use_4bit_quantization", lambda run: run.use_4bit_quantization,
    ),
    # --- data ---
    _need("stopping_strategy", "the data is no weighted mix; set dataset_weights", lambda run: run.dataset_weights),
    _need("shuffle_buffer_size", "the data is not streamed; set streaming", lambda run: run.streaming),
    _need("packing_strategy", "nothing is packed; set packing", _packs),
    _need("trust_packing", "nothing is packed; set packing", lambda run: run.keeps_apart),
    _need(
        "packing eval_packing overflow truncation_mode max_length",
        "skip_prepare_dataset uses the rows as they are", lambda run: not run.skip_prepare_dataset,
    ),
    _need(
        "overflow truncation_mode", "max_length is none, so no document is too long",
        lambda run: run.max_length is not None or run.skip_prepare_dataset,
    ),
    _need(
        "truncation_mode", "documents are not truncated; leave overflow at truncate",
        lambda run: run.overflow == "truncate" and not (_packs(run) and run.packing_strategy != "bfd"),
    ),
    _need(
        "overflow", "packing_strategy splits documents", lambda run: not run.packing or run.packing_strategy == "bfd"
    ),
    _need("chat_template_format", "chat_template_path overrides it", lambda run: run.chat_template_path is None),
    _need("preview_rows", "no rows are shown; set preview", lambda run: run.preview),
    _need(
        "data_seed", "rows keep their order (train_sampling_strategy sequential)",
        lambda run: run.train_sampling_strategy == "random",
    ),
    # --- training ---
    _need("use_flash_attn", "attn_implementation overrides it", lambda run: not run.attn_implementation),
    _need("num_train_epochs", "max_steps overrides it", lambda run: run.max_steps < 0),
    _need("warmup_ratio", "warmup_steps overrides it", lambda run: not run.warmup_steps),
    _need(
        "sync_each_batch", "each step has one micro-batch; set gradient_accumulation_steps",
        lambda run: run.gradient_accumulation_steps > 1,
    ),
    _need(
        "adam_beta1 adam_beta2", "the optimizer has none (optim)",
        lambda run: any(kind in run.optim for kind in ("adamw", "lion")) or run.optim == "muon",
    ),
    _need(
        "adam_epsilon", "the optimizer is not AdamW (optim)", lambda run: "adamw" in run.optim or run.optim == "muon"
    ),
    _need("loss_chunk_tokens", "the loss is not computed in chunks; set chunked_loss", lambda run: run.chunked_loss),
    _need(
        "use_reentrant gradient_checkpointing_kwargs", "nothing is recomputed; set gradient_checkpointing",
        lambda run: run.gradient_checkpointing,
    ),
    # --- evaluation ---
    _need(
        "per_device_eval_batch_size eval_packing prediction_loss_only", "nothing is evaluated; set eval_strategy",
        _evaluates, in_scripts=False,
    ),
    _need(
        "eval_delay eval_on_start metric_for_best_model greater_is_better", "nothing is evaluated; set eval_strategy",
        _evaluates, in_scripts=False,
    ),
    _need(
        "eval_steps", "evaluations are not by steps; set eval_strategy to steps",
        lambda run: run.eval_strategy == "steps",
    ),
    _need(
        "early_stopping_threshold", "runs do not stop early; set early_stopping_patience",
        lambda run: run.early_stopping_patience,
    ),
    _need(
        "sample_max_new_tokens", "no answers are generated; set eval_samples or sample_prompts",
        lambda run: run.eval_samples or run.sample_prompts,
    ),
    # --- checkpoints, logs, uploads ---
    _need("save_steps", "checkpoints are not saved by steps (save_strategy)", lambda run: run.save_strategy == "steps"),
    _need(
        "save_total_limit save_only_model async_save", "no checkpoint is saved; set save_strategy",
        lambda run: run.save_strategy != "no",
    ),
    _need(
        "logging_steps", "log lines are not by steps (logging_strategy)",
        lambda run: run.logging_strategy == "steps" or (run.eval_strategy == "steps" and not run.eval_steps),
    ),
    _need("logging_dir", "TensorBoard is not in report_to", lambda run: _reports_to(run, "tensorboard", "auto")),
    _need(
        "project trackio_space_id trackio_bucket_id trackio_static_space_id", "Trackio is not in report_to",
        lambda run: _reports_to(run, "trackio"),
    ),
    _need(
        "hub_model_id hub_private_repo hub_strategy hub_token hub_revision hub_always_push",
        "nothing is uploaded; set push_to_hub", lambda run: run.push_to_hub, in_scripts=False,
    ),
    _need(
        "hub_always_push", "only the result is uploaded (hub_strategy end)",
        lambda run: not run.push_to_hub or run.hub_strategy != "end",
    ),
)  # fmt: skip


def turn_on_lora(values: dict[str, Any]) -> str | None:
    """Turn LoRA on in the settings of a command line that have settings of LoRA and leave the adapter open; returns a
    note."""
    named = [name for name in LORA if values.get(name) is not None and values[name] is not False]
    is_open = values.get("use_peft_lora") is None and values.get("adapter_name_or_path") is None
    if not named or not is_open or values.get("peft_type", "lora") != "lora":
        return None
    values["use_peft_lora"] = True
    return f"use_peft_lora is on, for {', '.join(named)}; set it to false to train all weights"


def notes_without_effect(run: Any, named: Collection[str], *, script: bool = False) -> list[str]:
    """A note on each group of the settings in `named` that have no effect in this run."""
    notes, noted = [], set[str]()
    for need in NEEDS:
        names = [name for name in need.names if name in named and name not in noted]
        if names and (need.in_scripts or not script) and not need.met(run):
            notes.append(f"no effect: {', '.join(names)}: {need.why}")
            noted.update(names)
    if unused := [one.name for one in options_of(type(run)) if one.no_op and one.name in named]:
        notes.append(f"no effect here (see docs/options.md): {', '.join(unused)}")
    return notes


def named_settings(values: Mapping[str, Any], kind: type) -> set[str]:
    """The settings among these values that ask for something: those that are switched on, or not at their default."""
    defaults = {one.name: one.default for one in options_of(kind)}
    return {
        name for name, value in values.items()
        if value is not None and (value != defaults[name] or not isinstance(value, bool))
    }  # fmt: skip
