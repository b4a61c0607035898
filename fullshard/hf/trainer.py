"""transformers' `Trainer` on this engine: its own FSDP arguments, and a `save_model` that always writes weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fullshard.config.options import options_of
from fullshard.distributed import engines, runtime
from fullshard.fsdp import FSDPv2
from fullshard.hf.accelerate_prepare import is_served, shard
from fullshard.hf.accelerate_state import NAMES
from fullshard.parallel.fsdp_flags import read_section, read_words, settings_from_trainer_flags
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.settings import EngineSettings, overlay


def prepare_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `trl.models.utils.prepare_fsdp`, which shards a reference model with torch's `fully_shard`."""

    def prepared(model: Any, accelerator: Any) -> Any:
        if not is_served(accelerator):
            return original(model, accelerator)
        if not isinstance(model, FSDPv2):
            shard(accelerator, model)
        return model.eval()

    return prepared


_PLUGIN_NAMES = {setting: keyword for keyword, setting in NAMES.items()}


def fsdp_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `TrainingArguments._process_fsdp_args`: `fsdp` and `fsdp_config` as keywords of the plugin.

    They are read here, as `fullshard launch` reads them: transformers turns the hybrid strategies into FULL_SHARD and
    fills in defaults that would overrule the launched settings.
    """

    from accelerate import FullyShardedDataParallelPlugin

    def process(self: Any) -> dict[str, Any] | None:
        words, section = self.fsdp, self.fsdp_config
        if not words:
            return original(self)
        notes: list[str] = []
        values = overlay(read_section(section, notes), read_words(words))
        settings = settings_from_trainer_flags(words, section)  # refuses what cannot be served
        renamed = {_PLUGIN_NAMES.get(name, name): value for name, value in values.items()}
        parameters = inspect.signature(FullyShardedDataParallelPlugin).parameters
        notes += [*_without_effect(values), *_not_of_the_plugin(renamed.keys() - parameters, values)]
        for note in (*notes, *engines.current().sharding_notes(settings)):
            runtime.get_logger().info("TrainingArguments: %s", note)
        self.fsdp, self.fsdp_config = True, {}
        original(self)
        options = section if isinstance(section, dict) else {"config_file": str(Path(section))} if section else {}
        self.fsdp_config |= {name.removeprefix("fsdp_"): value for name, value in options.items()}
        return {name: value for name, value in renamed.items() if name in parameters}

    return process


def _without_effect(values: dict[str, Any]) -> Iterator[str]:
    for one in IGNORED_OPTIONS:
        if values.get(one.name, one.default) not in (one.default, {}):
            yield f"fsdp_config: {one.name} is ignored: {one.no_op}"


def _not_of_the_plugin(names: set[str], values: dict[str, Any]) -> Iterator[str]:
    """Notes on settings that a whole configuration file has beside those of FSDP."""
    for one in options_of(EngineSettings):
        if one.name in names and values[one.name] != one.default and not one.name.startswith("xla"):
            yield f"fsdp_config: {one.key} is ignored: it applies to `fullshard launch --config_file`"


def save_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Trainer.save_model`: whole weights whatever the state-dict type.

    The call from within a checkpoint is left as it is: the checkpoint holds the sharded weights already.
    """

    def saved(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not is_served(self.accelerator) or (_internal_call and output_dir is not None):
            return original(self, output_dir, _internal_call)
        plugin = self.accelerator.state.fsdp_plugin
        before = plugin.state_dict_type.name
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            return original(self, output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(before)

    return saved
