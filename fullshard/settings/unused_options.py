"""Settings of transformers' `TrainingArguments` and TRL's `SFTConfig` that change nothing here, each with the reason,
and those of which only the default is accepted, because another value would ask for something that is not done.

Part of `SFTConfig`, so that scripts and their files keep working. docs/options.md lists both. tests/train/test_peers.py
fails when a field of those classes is neither here nor an option.
"""

# ruff: noqa: RUF009 - options are fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.errors import ConfigError
from fullshard.options import option, options_of

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
