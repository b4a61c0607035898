"""The values that the parts of one trainer share: settings, model and data, the script's objects, the sharded run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.paths import Inputs
from fullshard.data.loader import Batch
from fullshard.data.stream import Stream
from fullshard.data.token_table import TokenTable
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.packed_inputs import PackingMethod
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.estimate import Estimate
from fullshard.report.reporter import Reporter
from fullshard.sft import adapter
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.hub import Hub
from fullshard.sft.loop import LoopFunctions
from fullshard.sft.optimizer_step import StepFunctions
from fullshard.sft.results import ResultWriter
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.training_state import MicroBatch, TrainingState


@dataclass(frozen=True)
class Parts:
    """What a run consists of before its model is sharded: model, adapter, tokenizer and data."""

    engine: EngineSettings
    model: Any
    """The model with its adapter. `assemble.build_loop` shards it in place."""
    base: Path | None
    """The folder with the weights; None for a model in memory, which has its weights."""
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
    """Several sets by name, where the script has a dict."""
    adapter_config: Any = None
    """PEFT's configuration of the adapter, with the tokens that train beside it."""

    @property
    def from_weights(self) -> bool:
        """Whether the new adapter is initialized from the base weights (PiSSA, OLoRA)."""
        return self.new_adapter and adapter.starts_from_weights(self.model)


@dataclass(frozen=True)
class TrainerFunctions:
    """What a run shares with its trainer and calls of it."""

    micro: MicroBatch
    events: Callbacks
    step: StepFunctions
    loop: LoopFunctions
    store_flos: Callable[[], None]
    make_optimizer: Callable[[int], tuple[Any, Any]]
    """Make the optimizer and the schedule of a run of this many steps."""
    own_optimizer: bool
    """Whether the optimizer is the one that the settings name."""
    own_loss: bool
    """Whether loss and batches are the engine's own, not a script's."""


@dataclass
class ShardedRun:
    """What evaluating, logging and saving need of a run whose model is sharded."""

    state: TrainingState
    head: ChunkedLossHead
    isolate_documents: Callable[[Batch], AbstractContextManager[None]]
    """Surrounds forward passes over a batch, so that packed documents do not see each other."""
    snapshot: Callable[[], dict[str, Any]]
    """The objects and values that a checkpoint holds. All ranks must call it."""
    reporter: Reporter
    writer: ResultWriter
    hub: Hub | None
    """The uploads of the run, if it uploads."""


@dataclass
class TrainerContext:
    """The values that the trainer's parts share. They may change between, and some in, its trainings."""

    args: SFTConfig
    parts: Parts
    events: Callbacks
    say: Callable[[str], None]
    inputs: Inputs
    """The paths that the run reads, by setting."""
    micro: MicroBatch = field(default_factory=MicroBatch)
    sharded: ShardedRun | None = None
    estimate: Estimate | None = None
    """What the run was planned to need; on the first rank."""

    # Of the script, under transformers' names.
    data_collator: Any = None
    compute_loss_func: Any = None
    compute_metrics: Any = None
    preprocess_logits_for_metrics: Any = None
    formatting_func: Callable[[Any], str] | None = None
    """Makes the text of each row, also of rows that a script evaluates."""
    optimizer: Any = None
    lr_scheduler: Any = None
    optimizer_cls_and_kwargs: Any = None

    # Of the training that is under way.
    is_in_train: bool = False
    began: float = 0.0
    ignored_keys: list[str] | None = None
    """What evaluations during training leave out of the model's outputs."""
    current_flos: float = 0.0
    current_gradient_accumulation_steps: int = 1

    @property
    def run(self) -> ShardedRun:
        """The sharded run; an error before `prepare()`."""
        if self.sharded is None:
            raise ConfigError("the model is not sharded yet; call trainer.prepare(), train() or evaluate() first.")
        return self.sharded


class Shared:
    """An attribute of the trainer that is stored in its context, under the same name unless another is named."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer._context, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        setattr(trainer._context, self.name, value)
