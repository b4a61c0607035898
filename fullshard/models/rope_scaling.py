"""RoPE scaling: lets a model train on documents longer than its pretraining context.

The configuration is changed before the model is built, as transformers documents it, so the saved model has it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fullshard.config.errors import ConfigError


def scale_rope(config: Any, kind: str, length: int, log: Callable[[str], None]) -> None:
    """Change a model configuration so that documents of `length` tokens fit. `kind`: linear, dynamic or yarn.

    A message about the change is passed to `log`.
    """
    text = config.get_text_config()
    trained, name = getattr(text, "max_position_embeddings", None), f"a {text.model_type} model"
    rope = getattr(text, "rope_parameters", None)
    if not rope or not isinstance(trained, int):
        raise ConfigError(f"rope_scaling {kind}: {name} has no rotary positions to scale; remove the option.")
    if length <= trained:
        log(f"rope_scaling: not needed; max_length {length} is within the model's {trained:,} positions.")
        return
    # If layer types have separate rope parameters, only full attention looks beyond its sliding window.
    target = rope.get("full_attention", rope)
    if (present := target.get("rope_type", "default")) != "default":
        raise ConfigError(
            f"rope_scaling {kind}: this model already has scaled positions ({present}); change rope_parameters in its "
            f"config.json, or set max_length to {trained} or less."
        )
    target |= {"rope_type": kind, "factor": length / trained}
    if kind == "yarn":
        target["original_max_position_embeddings"] = trained
    if kind != "dynamic":  # dynamic scaling starts beyond max_position_embeddings
        text.max_position_embeddings = length
    log(f"rope_scaling: {kind}, from {trained:,} to {length:,} positions (factor {length / trained:g}).")


def longest_document(config: Any) -> int | None:
    """The number of positions of a model, with its scaling; None if its configuration has none."""
    text = config.get_text_config()
    positions, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if not isinstance(positions, int):
        return None
    target = rope.get("full_attention", rope)
    return int(positions * target["factor"]) if target.get("rope_type") == "dynamic" else positions
