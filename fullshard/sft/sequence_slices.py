"""Which runs compute the parts of a layer in slices of the sequence (`sequence_slices`), and in which parts.

A run and its plan decide here. Layers that are compiled run whole: a graph of torch.compile has no slices. So do
those that are split over ranks (`tp_size`, `ep_size`).
"""

from __future__ import annotations

import contextlib
from typing import Any

from fullshard.activations.slices import ELEMENTS, FEWEST, SliceCount
from fullshard.config.errors import ConfigError
from fullshard.distributed import engines
from fullshard.distributed.ranks import on_rank_0
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.slice_check import SliceVerdict, apply_slices, layers_of, try_slices
from fullshard.parallel.model import checkpointed_modules
from fullshard.parallel.settings import EngineSettings
from fullshard.sft.adapter import Say
from fullshard.sft.sft_config import SFTConfig

RATHER_THAN_COMPILED = 8 * FEWEST * ELEMENTS
"""Elements of a micro-batch's hidden states from which on a run is sliced where it could be compiled as well (262,144
tokens of 4,096): attention takes most of the time then, which the compiler leaves as it is."""


def slice_count(config: SFTConfig, model: Any, engine: EngineSettings, compiles: bool) -> SliceCount | None:
    """Into how many slices the parts of layers are divided; None where they run whole. `compiles` is whether layers
    would be compiled where the settings leave it open."""
    if (count := config.slices) is not None:
        return SliceCount(count) if count >= FEWEST else None
    recomputes = config.gradient_checkpointing or engine.activation_checkpointing
    if not recomputes or config.max_length is None or engines.current().compiles_steps:
        return None
    if engine.backend.lower() != "no" or max(engine.tp_size, engine.ep_size) > 1:  # ranks exchange tokens inside parts
        return None
    width = getattr(get_causal_lm(model).config.get_text_config(), "hidden_size", 0)
    elements = config.max_length * config.per_device_train_batch_size * width
    return SliceCount() if elements >= (RATHER_THAN_COMPILED if compiles else FEWEST * ELEMENTS) else None


def choose_slices(config: SFTConfig, engine: EngineSettings, model: Any, count: SliceCount, say: Say) -> bool:
    """Let the parts of layers run in slices that can, as a trial on the first rank shows; returns whether there are
    any. All ranks must call it."""
    verdict: SliceVerdict = on_rank_0(lambda: try_slices(model), "slices check")
    units = set()
    with contextlib.suppress(ConfigError):  # the model has no layers
        units = set(checkpointed_modules(model, engine))
    parts = apply_slices(model, verdict, count, units)
    name = type(get_causal_lm(model)).__name__
    if parts:
        layers = ", ".join(sorted({type(layer).__name__ for layer in layers_of(model)}))
        say(f"sequence_slices: {', '.join(parts)} of {layers} run in slices of the sequence.")
    elif verdict.reason:
        say(f"sequence_slices: the layers of {name} run whole, because {verdict.reason}.")
    return bool(parts)
