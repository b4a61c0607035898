"""Adapter files: how PEFT's file keys map to parameters of a model, and readers for their values.

PEFT computes the keys, from empty tensors in place of the values, so nothing is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fullshard.config.errors import WeightsError
from fullshard.config.paths import list_contents
from fullshard.lora import virtual_tokens
from fullshard.lora.adapter_config import WEIGHTS, read_config
from fullshard.weights.config_limits import check_config
from fullshard.weights.locate import inside, open_source
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.slice_reader import Stored, TensorReader

TABLES = {"embed_tokens", "lm_head"}
"""The layers that PEFT adds to an adapter's files after a resize."""


def open_adapter(folder: str | Path) -> SafetensorsFiles:
    """Open the weights of an adapter."""
    path = Path(folder)
    if not (path / WEIGHTS).is_file():
        contents = list_contents(path) if path.is_dir() else "nothing"
        raise WeightsError(f"{path} contains no adapter: it has no {WEIGHTS} (it contains {contents})")
    return open_source(inside(path / WEIGHTS, path))


def names_in_files(model: Any, adapter: str = "default") -> tuple[dict[str, str], dict[str, str]]:
    """PEFT's file keys → names in the model: first of the tensors that an adapter's files must have, then of optional
    ones, which are a resized embedding and head.
    """
    from peft import get_peft_model_state_dict

    if adapter in virtual_tokens.encoders(model):
        return {virtual_tokens.FILE_KEY: f"prompt_encoder.{adapter}.embedding.weight"}, {}
    placeholders = {name: torch.empty(0) for name in model.state_dict(keep_vars=True)}
    names = {id(empty): name for name, empty in placeholders.items()}
    must, may = (
        {
            key: names[id(empty)]
            for key, empty in get_peft_model_state_dict(
                model, state_dict=dict(placeholders), adapter_name=adapter, save_embedding_layers=embeddings
            ).items()
        }
        for embeddings in (False, True)
    )
    return must, {key: name for key, name in may.items() if key not in must}


def adapter_readers(model: Any, source: SafetensorsFiles) -> dict[str, TensorReader]:
    """Readers for an adapter's values, by parameter name in the model. All differences are reported in one error."""
    if not hasattr(model, "peft_config"):
        raise WeightsError(f"loading an adapter needs a PeftModel; got {type(model).__name__}")
    must, may = names_in_files(model, next(iter(model.peft_config)))
    wrong = [f"{key} is missing" for key in must.keys() - source.entries.keys()]
    wrong += [f"{key} is not in the model" for key in source.entries.keys() - must.keys() - may.keys()]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
    wrong += [
        f"{key} has shape {source.entries[key].shape}, but {shapes[name]} in the model"
        for key, name in (must | may).items()
        if key in source.entries and source.entries[key].shape != shapes[name]
    ]
    if wrong:
        trained_on = read_config(Path(source.path).parent).get("base_model_name_or_path") or "an unknown model"
        raise WeightsError(
            f"{source.path}, trained on {trained_on}, does not match the model {_called(model)}: "
            f"{'; '.join(sorted(wrong)[:5])}"
        )
    return {name: Stored(source, source.entries[key]) for key, name in (must | may).items() if key in source.entries}


def other_rows(base: str | None, config: Any) -> bool:
    """Whether the vocabulary of a model was resized, so that its adapter must include the embeddings.

    As in PEFT (`save_embedding_layers="auto"`), `vocab_size` in the two configurations is compared. False if the base
    cannot be found.
    """
    from transformers import AutoConfig

    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not base or rows is None:
        return False
    check_config(base)
    try:
        base_config = AutoConfig.from_pretrained(base, local_files_only=True)
    except (OSError, ValueError):
        return False
    return rows != getattr(base_config.get_text_config(), "vocab_size", rows)


def _called(model: Any) -> str:
    return getattr(model.get_base_model(), "name_or_path", None) or type(model.get_base_model()).__name__


def embedding_rows(folder: str | Path) -> list[int]:
    """The number of rows of the embedding and the head in an adapter's files; empty if they are not there."""
    with open_adapter(folder) as source:
        return [
            entry.shape[0]
            for key, entry in source.entries.items()
            if key.endswith(".weight") and "lora_" not in key and set(key.split(".")) & TABLES
        ]


def stored_rows(folder: str | Path) -> int:
    """The vocabulary size an adapter needs: rows of its embeddings, or its highest trained token + 1; 0 if unknown."""
    rows = embedding_rows(folder)
    trained = read_config(folder).get("trainable_token_indices") or []
    groups = trained.values() if isinstance(trained, dict) else [trained]
    return max((*rows, *(index + 1 for group in groups for index in group)), default=0)
