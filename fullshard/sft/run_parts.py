"""The parts of a run before its model is sharded: model, adapter, tokenizer and data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.data.stream import Stream
from fullshard.data.token_table import TokenTable
from fullshard.models.packed_inputs import PackingMethod
from fullshard.parallel.settings import EngineSettings
from fullshard.sft import adapter


@dataclass(frozen=True)
class Parts:
    """The parts of a run before the model is sharded."""

    engine: EngineSettings
    model: Any
    """The model with its adapter. `assemble.build_loop` shards it in place."""
    base: Path | None
    """The folder with the weights; None if the model was given in memory, with its weights."""
    adapter: Path | None
    """The folder of the adapter to resume."""
    tokenizer: Any
    new_adapter: bool
    """Whether the run has added a new adapter to the model."""
    grown: bool
    """Whether the model has more token rows than its files."""
    own_tables: bool
    """Whether embedding and head are saved with the adapter, because those of its base differ."""
    packing: PackingMethod | None
    """How the model receives packed rows; None without packing."""
    train: TokenTable | Stream | None
    evaluation: TokenTable | dict[str, TokenTable] | None
    """Several sets by name, where the script gave a dict."""
    adapter_config: Any = None
    """PEFT's configuration of the adapter, with the tokens that train beside it."""

    @property
    def from_weights(self) -> bool:
        """Whether the new adapter is initialized from the base weights (PiSSA, OLoRA)."""
        return self.new_adapter and adapter.is_from_weights(self.model)
