"""Documents longer than a model was trained for: its rotary positions are scaled, where it has any.

The configuration is changed before the model is built, as transformers documents it, so the saved model has it too.
"""

from __future__ import annotations

from typing import Any

from fullshard.errors import ConfigError
from fullshard.train.adapter import Say


def scale_rope(shape: Any, kind: str, length: int, say: Say) -> None:
    """Make room for documents of `length` tokens in a configuration, by scaling of this kind."""
    text = shape.get_text_config()
    trained, name = getattr(text, "max_position_embeddings", None), f"a {text.model_type} model"
    rope = getattr(text, "rope_parameters", None)
    if not rope or not isinstance(trained, int):
        raise ConfigError(f"rope_scaling {kind}: {name} has no rotary positions that could be scaled; leave it out.")
    if length <= trained:
        say(f"rope_scaling: nothing to do; max_seq_len {length} is within the model's {trained:,} positions.")
        return
    # Where kinds of layers have positions of their own, those with a window never look farther than it.
    target = rope.get("full_attention", rope)
    if (present := target.get("rope_type", "default")) != "default":
        raise ConfigError(
            f"rope_scaling {kind}: the positions of this model are scaled already ({present}); change rope_parameters "
            f"in its config.json, or set max_seq_len to {trained} or less."
        )
    target |= {"rope_type": kind, "factor": length / trained}
    if kind == "yarn":
        target["original_max_position_embeddings"] = trained
    if kind != "dynamic":  # which begins beyond the length that the model says
        text.max_position_embeddings = length
    say(f"rope_scaling: {kind}, from {trained:,} to {length:,} positions (factor {length / trained:g}).")


def longest_document(config: Any) -> int | None:
    """How many positions a model has; None if it does not say."""
    text = config.get_text_config()
    positions, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if not isinstance(positions, int):
        return None
    target = rope.get("full_attention", rope)
    return int(positions * target["factor"]) if target.get("rope_type") == "dynamic" else positions
