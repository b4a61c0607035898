"""What the parts of one trainer share: the settings, the script's objects, and the loop once there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.paths import Inputs
from fullshard.planner.estimate import Estimate
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.hub import Hub
from fullshard.sft.loop import Loop
from fullshard.sft.micro_batch import MicroBatch
from fullshard.sft.results import ResultWriter
from fullshard.sft.run_parts import Parts
from fullshard.sft.sft_config import SFTConfig


@dataclass
class Prepared:
    """A run whose model is sharded."""

    loop: Loop
    writer: ResultWriter
    hub: Hub | None


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
    prepared: Prepared | None = None
    estimate: Estimate | None = None
    """What the run was planned to need; on the first rank."""

    # Of the script, under transformers' names.
    data_collator: Any = None
    compute_loss_func: Any = None
    compute_metrics: Any = None
    preprocess_logits_for_metrics: Any = None
    formatting_func: Callable[[Any], str] | None = None
    """Makes the text of each row, also of rows that `evaluate` is given."""
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
    def loop(self) -> Loop:
        """The training loop that `prepare()` has made."""
        if self.prepared is None:
            raise ConfigError("the model is not sharded yet; call trainer.prepare(), train() or evaluate() first.")
        return self.prepared.loop

    @property
    def hub(self) -> Hub | None:
        """The uploads of the run, if it uploads."""
        return self.prepared.hub if self.prepared is not None else None


class Shared:
    """An attribute of the trainer that lies in its context, under the same name unless another is given."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer._context, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        setattr(trainer._context, self.name, value)
