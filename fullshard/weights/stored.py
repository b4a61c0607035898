"""The parameters of a wrapped model, as weights are read into them and written from them.

On XLA the names in `fullshard.xla.loading.REPLACES` are that file's: weights are read in host memory and then moved.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard import engines
from fullshard.fsdp.engine import Engine
from fullshard.fsdp.state_dict import whole_value as whole_value


def stored_units(model: nn.Module) -> Any:
    """The engine of a wrapped model, whose units hold its parameters; None if the model is not wrapped."""
    engine = getattr(model, "_fullshard_engine", None)
    return engine if isinstance(engine, Engine) else None


def finish_loading(engine: Any) -> None:
    """Put values that were loaded where the model keeps them: they are there."""


engines.use_xla_names(globals(), "loading")
