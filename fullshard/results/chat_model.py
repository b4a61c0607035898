"""A result loaded to be talked to: model, adapter, 4-bit weights and tokenizer, on one device.

The model is loaded as for training (`load_pretrained`), so that answers are those of the model that was trained.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from fullshard import runtime
from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.errors import ConfigError, first_line
from fullshard.models.chunked_loss import causal
from fullshard.models.generate import Ends, ends_of
from fullshard.quant.config import dense_dtype, quantization_from_options
from fullshard.results.find_result import Place
from fullshard.train.model import embedding_rows
from fullshard.weights.load import load_pretrained

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""How a model is quantised that was not trained in 4 bits; products are in the dtype of the rest."""


@dataclass
class Speaker:
    """A model that can answer."""

    model: Any
    tokenizer: Any
    ends: Ends

    @property
    def positions(self) -> int | None:
        """How many tokens it can see, where it says so."""
        found = getattr(causal(self.model).config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def rows(self) -> int:
        """How many tokens its embedding has rows for."""
        return embedding_rows(self.model)


def open_speaker(
    place: Place, dtype: str = "auto", device: str | None = None, four_bits: bool | None = None
) -> Speaker:
    """Load what lies at `place`. `four_bits`: hold linear layers in 4 bits; None does as the run did."""
    if place.checkpoint and place.kind == "model":
        raise ConfigError(
            f"{place.folder} is a checkpoint of a whole model, in a form for training. Turn it into a model first: "
            f"fullshard export {place.folder} OUT; then fullshard chat OUT."
        )
    runtime.use_spmd(device=device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.tokenizer)
    except Exception as error:  # damaged files give errors of every kind
        raise ConfigError(f"no tokenizer could be read from {place.tokenizer}: {first_line(error)}") from None
    quantization, kept = _quantization(place, four_bits)
    options = {
        "dtype": kept if kept is not None and dtype == "auto" else dtype,
        "quantization_config": quantization,
        "progress": sys.stderr.isatty(),
    }
    with tempfile.TemporaryDirectory(prefix="fullshard-adapter-") as made:
        adapter = place.folder
        if place.kind == "adapter" and place.checkpoint:
            write_adapter(place.folder, Path(made))
            adapter = made
        if place.kind == "adapter":
            model = load_pretrained(str(place.base), adapter=adapter, **options)
        else:
            model = load_pretrained(place.folder, **options)
    return Speaker(model.eval(), tokenizer, ends_of(model, tokenizer))


def _quantization(place: Place, asked: bool | None) -> tuple[Any, torch.dtype | None]:
    """How to quantise, and the dtype of what stays dense, where it follows from that."""
    if not (place.trained_in_4_bits if asked is None else asked) or place.stored_in_4_bits:
        return None, None  # files that hold 4-bit weights are read as they are
    return trained_quantization(place.settings) if place.trained_in_4_bits else (FOUR_BITS, None)


def trained_quantization(settings: dict[str, Any]) -> tuple[Any, torch.dtype | None]:
    """How a run quantised its base, by its settings, and the dtype it held the weights in before; None as in the
    files."""
    names = (
        "use_4bit_quantization", "use_nested_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage_dtype",
        "bnb_4bit_quant_type",
    )  # fmt: skip
    how = quantization_from_options(**{name: settings[name] for name in names if name in settings})
    asked = settings.get("torch_dtype", "auto")
    if how is None or asked != "auto":
        return how, getattr(torch, asked, None)
    return how, dense_dtype(how.scheme.storage)
