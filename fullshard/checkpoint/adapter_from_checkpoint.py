"""PEFT's adapter files from a training checkpoint, in one process.

A checkpoint holds the trained parameters under the model's own names, and the adapter's config. The files written here
can be loaded by `peft` and merged by `merge_adapter`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from fullshard.checkpoint.consolidate import find_model, stored_tensors
from fullshard.checkpoint.manifest import check_files, read_manifest
from fullshard.config.errors import CheckpointError
from fullshard.lora import virtual_tokens
from fullshard.lora.adapter_config import CONFIG, FIRST, WEIGHTS, taken_from_weights
from fullshard.lora.peft_model import get_peft_model_on_meta
from fullshard.lora.plain_lora import first_of, make_plain
from fullshard.weights.adapter_base import write_record
from fullshard.weights.adapter_files import names_in_files, other_rows
from fullshard.weights.config_limits import check_limits
from fullshard.weights.load import class_of, on_meta


def write_adapter(checkpoint: str | Path, out: Path, *, verify: bool = True) -> None:
    """Write the adapter of a checkpoint to `out`, an existing folder."""
    directory = Path(checkpoint)
    manifest = read_manifest(directory)
    name, entry = find_model(manifest, directory)
    check_files(directory, manifest, verify)
    config, initial = _adapter_config(directory, entry), None
    if taken_from_weights(config.get("init_lora_weights")):
        initial = _initial_adapter(directory, config)
    base = _write_config(out, entry, config)
    model = _adapter_model(directory, entry, out, base)
    tensors = dict(stored_tensors(manifest, directory, name))
    tensors |= {key: tensors[source] for key, source in entry["tied"].items() if source in tensors}
    for adapter, encoder in virtual_tokens.encoders(model).items():
        values = {key: tensors[f"prompt_encoder.{adapter}.{key}"].read() for key in encoder.state_dict()}
        save_file(virtual_tokens.export_tensors(encoder, values), out / WEIGHTS, metadata={"format": "pt"})
        return
    keys = _file_keys(directory, entry, config, model, tensors)
    values = {file_key: tensors[key].read() for file_key, key in keys.items()}
    save_file(values, out / WEIGHTS, metadata={"format": "pt"})
    if initial is not None:
        make_plain(out, initial)


def _adapter_config(directory: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """The PEFT config of the checkpoint's one adapter."""
    configs, shape = entry.get("adapter_configs") or {}, entry.get("config")
    if len(configs) != 1 or not shape:
        raise CheckpointError(
            f"{directory} does not describe its adapter ({len(configs)} adapter configurations, "
            f"{'a' if shape else 'no'} model configuration); resume the run from it and let it finish"
        )
    (config,) = configs.values()
    return config


def _initial_adapter(directory: Path, config: dict[str, Any]) -> Path:
    """The folder with the adapter's initial values, which were computed from the base weights."""
    initial = first_of(directory)
    if initial is None:
        raise CheckpointError(
            f"the adapter of {directory} was initialized with {config['init_lora_weights']} from the base weights, and "
            f"its initial values are missing; put the run's folder {FIRST} into {directory.absolute().parent.parent}"
        )
    return initial


def _write_config(out: Path, entry: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Write adapter_config.json and the record of the base model; returns the base model's name."""
    files = None
    if entry["base"]:
        files = entry["base"]["path"], {key: value for key, value in entry["base"].items() if key != "path"}
    base = config.get("base_model_name_or_path") or (files[0] if files else None)
    (out / CONFIG).write_text(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")
    if base is not None:
        write_record(out, base, files)
    return base


def _model_config(entry: dict[str, Any]) -> Any:
    check_limits(entry["config"], "the checkpoint")
    return AutoConfig.for_model(
        **{key: value for key, value in entry["config"].items() if key != "quantization_config"}
    )


def _adapter_model(directory: Path, entry: dict[str, Any], out: Path, base: str | None) -> Any:
    """The model with the adapter in `out`, on the meta device."""
    from peft import PeftConfig

    config = _model_config(entry)
    plain = on_meta(class_of(None, config), config, torch.float32, directory, False)
    plain.name_or_path = base
    peft_config: Any = PeftConfig.from_pretrained(str(out))
    peft_config.inference_mode = False  # with the trainable parameters
    with torch.device("meta"):
        return get_peft_model_on_meta(plain, peft_config)


def _file_keys(
    directory: Path, entry: dict[str, Any], config: dict[str, Any], model: Any, tensors: Mapping[str, Any]
) -> dict[str, str]:
    """The name of each tensor in the adapter's file, and its name in the checkpoint."""
    must, may = names_in_files(model, next(iter(model.peft_config)))
    if absent := [key for key in must.values() if key not in tensors]:
        raise CheckpointError(f"{directory} does not hold {', '.join(absent[:5])}, which its adapter has")
    # With a base, a checkpoint leaves out what the base provides, so an embedding that it holds was changed or resized.
    # Without one (the user passed a model object), it holds everything.
    resized = entry["base"] or other_rows(config["base_model_name_or_path"], _model_config(entry))
    return must | {file_key: key for file_key, key in may.items() if key in tensors and resized}
