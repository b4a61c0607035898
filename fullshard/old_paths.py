"""Import paths of version 0.1 that have moved. They still work in this release, with a warning that names the new path.

`install()` appends one finder to `sys.meta_path`. Python asks it only after every other finder has failed, so it costs
nothing where the new paths are used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

PACKAGES = ("adapters", "after")
"""Packages that no longer exist; their modules are in `MOVED`."""

MOVED = {
    "adapters.blocks": "quant.blocks",
    "adapters.bnb": "quant.bnb_format",
    "adapters.codes": "quant.codebooks",
    "adapters.experts": "quant.experts",
    "adapters.export": "quant.export",
    "adapters.fused": "quant.expert_weights",
    "adapters.groups": "quant.sharded_groups",
    "adapters.inventory": "lora.model_size",
    "adapters.kernels": "quant.triton_kernels",
    "adapters.layers": "quant.quantizable",
    "adapters.linear": "quant.linear",
    "adapters.lora": "lora",
    "adapters.nested": "quant.double_quant",
    "adapters.nf4": "quant.nf4",
    "adapters.ops": "quant.ops",
    "adapters.quantize": "quant",
    "adapters.reading": "quant.load_groups",
    "adapters.token_rows": "lora.trainable_tokens",
    "adapters.virtual_tokens": "lora.virtual_tokens",
    "after.chat": "results.chat",
    "after.command": "results.command",
    "after.export": "results.export",
    "after.place": "results.find_result",
    "after.speaker": "results.chat_model",
    "data.built_in": "data.built_in_templates",
    "data.chat": "data.render_chat",
    "data.elsewhere": "data.foreign_columns",
    "data.files": "data.file_formats",
    "data.find": "data.find_dataset",
    "data.formats": "data.row_formats",
    "data.once": "ranks",
    "data.rows": "data.raw_row",
    "data.scratch": "data.temp_dirs",
    "data.spool": "data.shared_pages",
    "data.tally": "progress",
    "data.templates": "data.chat_template",
    "data.tokenizing": "data.tokenize",
    "data.tokens": "data.token_table",
    "data.worker": "data.tokenize_worker",
    "fsdp.abort": "watchdog.abort",
    "fsdp.assemble": "fsdp.build",
    "fsdp.clip": "fsdp.grad_clip",
    "fsdp.compiler": "fsdp.compile",
    "fsdp.diagnosis": "watchdog.diagnosis",
    "fsdp.entry": "fsdp.backward_entry",
    "fsdp.guard": "fsdp.checks",
    "fsdp.heartbeat": "watchdog.heartbeat",
    "fsdp.held": "fsdp.no_sync_grads",
    "fsdp.inquiry": "watchdog.investigate",
    "fsdp.lookout": "watchdog.threads",
    "fsdp.meter": "fsdp.counters",
    "fsdp.outside": "watchdog.external_waits",
    "fsdp.remat": "fsdp.activation_checkpointing",
    "fsdp.split": "fsdp.split_dim",
    "fsdp.state": "fsdp.state_dict",
    "fsdp.tree": "fsdp.tensor_tree",
    "fsdp.watch": "watchdog.watch",
    "fsdp.watched": "watchdog.collectives",
    "fsdp.weigh": "fsdp.uneven_batches",
    "fsdp.works": "watchdog.device_work",
    "fsdp.wrapper": "fsdp.module",
    "fsdp.writes": "fsdp.write_count",
    "launch.ask": "launch.questionnaire",
    "launch.run": "launch.agent",
    "launch.show": "launch.help_text",
    "launch.training": "launch.sft_command",
    "launcher": "rank_env",
    "messages": "log_filter",
    "spmd.agree": "spmd.debug_check",
    "spmd.assign": "spmd.dtensor_fixes",
    "spmd.independent": "spmd.rules_elementwise",
    "spmd.lists": "spmd.foreach_ops",
    "spmd.reductions": "spmd.rules_reductions",
    "spmd.reminders": "spmd.unused_annotations",
    "spmd.show": "spmd.draw",
    "train.accelerator": "train.callbacks",
    "train.adapter_options": "settings.adapter_options",
    "train.answer": "models.generate",
    "train.arguments": "train.cli_args",
    "train.boards": "reporting.loggers",
    "train.card": "reporting.model_card",
    "train.config": "settings.sft_config",
    "train.data_sets": "train.dataset_options",
    "train.dealing": "parallelize.row_assignment",
    "train.display": "reporting.terminal",
    "train.engine": "parallelize.settings",
    "train.fit": "train.memory_check",
    "train.folder": "train.run_dir",
    "train.folder_lock": "train.run_lock",
    "train.freeze": "train.adapter",
    "train.gather": "parallelize.gather",
    "train.given": "train.cli_args",
    "train.loss": "models.chunked_loss",
    "train.metrics": "reporting.reporter",
    "train.noise": "models.neftune",
    "train.packed": "models.packed_inputs",
    "train.packing_trial": "models.packing_check",
    "train.prepare": "parallelize.prepare",
    "train.rank_loader": "parallelize.data_loader",
    "train.rates": "optimizers.lr_schedule",
    "train.report": "reporting.html_report",
    "train.rope": "models.rope_scaling",
    "train.schedule": "train.optimizer",
    "train.sft": "train.trainer",
    "train.shrink": "models.small_copy",
    "train.start": "train.checked_run",
    "train.trainer_flags": "parallelize.fsdp_flags",
    "train.wrapping": "parallelize.model",
    "weights.adapter_checkpoint": "checkpoint.adapter_from_checkpoint",
    "weights.adapter_config": "lora.adapter_config",
    "weights.base": "weights.source_files",
    "weights.checkpoint": "checkpoint.manager",
    "weights.derive": "weights.adapter_init",
    "weights.files": "weights.safetensors_index",
    "weights.grow": "weights.resize_vocab",
    "weights.hooks": "weights.transforms",
    "weights.inspect": "checkpoint.inspect",
    "weights.keys": "weights.key_mapping",
    "weights.manifest": "checkpoint.manifest",
    "weights.meeting": "ranks",
    "weights.merge": "checkpoint.consolidate",
    "weights.merged_layers": "weights.merge_layers",
    "weights.model_state": "checkpoint.model_state",
    "weights.optimizer_state": "checkpoint.optimizer_state",
    "weights.outgoing": "weights.model_dir_writer",
    "weights.pieces": "checkpoint.shard_index",
    "weights.plain_lora": "lora.plain_lora",
    "weights.planner": "checkpoint.dcp_planner",
    "weights.preemption": "checkpoint.preemption",
    "weights.progress": "progress",
    "weights.publish": "checkpoint.publish",
    "weights.reader": "weights.slice_reader",
    "weights.report": "weights.load_report",
    "weights.reverse": "weights.key_mapping",
    "weights.rng": "checkpoint.rng_state",
    "weights.rounded": "weights.dequantized",
    "weights.saving": "checkpoint.save_restore",
    "weights.snapshot": "checkpoint.host_snapshot",
    "weights.states": "checkpoint.objects",
    "weights.storage": "checkpoint.dcp_storage",
    "weights.tree": "checkpoint.json_tree",
    "weights.writer": "weights.safetensors_writer",
    "wrappers": "foreign_wrappers",
}
"""Old module name → new one, both below `fullshard`."""


class OldPathFinder(importlib.abc.MetaPathFinder):
    """Finds modules under the names they had in version 0.1."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "fullshard":
            return None
        if name in PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, _EmptyPackage(), is_package=True)
        if name in MOVED:
            return importlib.machinery.ModuleSpec(fullname, _Alias(f"fullshard.{MOVED[name]}"))
        return None


class _EmptyPackage(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        pass


class _Alias(importlib.abc.Loader):
    """Puts the moved module into `sys.modules` under its old name too."""

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(
            f"{module.__name__} has moved to {self.new_name}. The old path will be removed in the next release",
            FutureWarning,
            stacklevel=2,  # the import statement: frames of importlib are not counted
        )
        sys.modules[module.__name__] = importlib.import_module(self.new_name)


def install() -> None:
    """Make old import paths work; safe to call more than once."""
    if not any(isinstance(finder, OldPathFinder) for finder in sys.meta_path):
        sys.meta_path.append(OldPathFinder())
