"""An adapter's files: where PEFT puts which parameter, and how they are read slice by slice.

PEFT itself is asked for the names, with stand-ins instead of values, so that nothing has to be in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fullshard.errors import WeightsError
from fullshard.lora import virtual_tokens
from fullshard.lora.adapter_config import WEIGHTS, read_config
from fullshard.paths import held
from fullshard.weights.locate import open_source
from fullshard.weights.safetensors_index import SafetensorsFiles
from fullshard.weights.slice_reader import Stored, TensorReader

TABLES = {"embed_tokens", "lm_head"}
"""The layers that PEFT writes into an adapter's files when they were resized."""


def open_adapter(folder: str | Path) -> SafetensorsFiles:
    place = Path(folder)
    if not (place / WEIGHTS).is_file():
        there = held(place) if place.is_dir() else "nothing"
        raise WeightsError(f"{place} holds no adapter: it has no {WEIGHTS} (it holds {there})")
    return open_source(place / WEIGHTS)


def names_in_files(model: Any, adapter: str = "default") -> tuple[dict[str, str], dict[str, str]]:
    """PEFT's names in files → names in the model: of what an adapter's files hold, and of what they may hold besides.

    The latter are an embedding and a head that were resized beside the adapter.
    """
    from peft import get_peft_model_state_dict

    if adapter in virtual_tokens.encoders(model):
        return {virtual_tokens.FILE_KEY: f"prompt_encoder.{adapter}.embedding.weight"}, {}
    marks = {name: torch.empty(0) for name in model.state_dict(keep_vars=True)}
    known = {id(mark): name for name, mark in marks.items()}
    must, may = (
        {
            key: known[id(mark)]
            for key, mark in get_peft_model_state_dict(
                model, state_dict=dict(marks), adapter_name=adapter, save_embedding_layers=embeddings
            ).items()
        }
        for embeddings in (False, True)
    )
    return must, {key: name for key, name in may.items() if key not in must}


def adapter_readers(model: Any, source: SafetensorsFiles) -> dict[str, TensorReader]:
    """Readers of an adapter's values by the names that they have in the model."""
    if not hasattr(model, "peft_config"):
        raise WeightsError(f"an adapter's values need a PeftModel; got {type(model).__name__}")
    must, may = names_in_files(model, next(iter(model.peft_config)))
    wrong = [f"{key} is missing" for key in must.keys() - source.entries.keys()]
    wrong += [f"{key} has no place in the model" for key in source.entries.keys() - must.keys() - may.keys()]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
    wrong += [
        f"{key} has shape {source.entries[key].shape}, {shapes[name]} in the model"
        for key, name in (must | may).items()
        if key in source.entries and source.entries[key].shape != shapes[name]
    ]
    if wrong:
        trained_on = read_config(Path(source.path).parent).get("base_model_name_or_path") or "an unknown model"
        raise WeightsError(
            f"{source.path}, trained on {trained_on}, does not fit the model {_called(model)}: "
            f"{'; '.join(sorted(wrong)[:5])}"
        )
    return {name: Stored(source, source.entries[key]) for key, name in (must | may).items() if key in source.entries}


def other_rows(base: str | None, config: Any) -> bool:
    """Whether a model has another number of token rows than its base, so that its adapter must bring them.

    PEFT's test (`save_embedding_layers="auto"`): by the configurations alone. A base that cannot be found is none.
    """
    from transformers import AutoConfig

    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not base or rows is None:
        return False
    try:
        found = AutoConfig.from_pretrained(base, local_files_only=True)
    except (OSError, ValueError):
        return False
    return rows != getattr(found.get_text_config(), "vocab_size", rows)


def _called(model: Any) -> str:
    return getattr(model.get_base_model(), "name_or_path", None) or type(model.get_base_model()).__name__


def brought_tables(folder: str | Path) -> list[int]:
    """The numbers of rows of the embedding and the head, where an adapter's files hold them."""
    with open_adapter(folder) as source:
        return [
            entry.shape[0]
            for key, entry in source.entries.items()
            if key.endswith(".weight") and "lora_" not in key and set(key.split(".")) & TABLES
        ]


def stored_rows(folder: str | Path) -> int:
    """How many token rows an adapter counts on: those it brings, or the highest that it trains; 0: it does not say."""
    brought = brought_tables(folder)
    trained = read_config(folder).get("trainable_token_indices") or []
    groups = trained.values() if isinstance(trained, dict) else [trained]
    return max((*brought, *(index + 1 for group in groups for index in group)), default=0)
