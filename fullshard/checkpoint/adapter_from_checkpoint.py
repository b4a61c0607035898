"""PEFT's adapter files from a training checkpoint, in one process.

A checkpoint holds the trained parameters under the model's own names, and the adapter's config. The files written here
can be loaded by `peft` and merged by `merge_adapter`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from fullshard.checkpoint.consolidate import find_model, stored_tensors
from fullshard.checkpoint.manifest import find_damage, find_header_mismatches, read_manifest
from fullshard.errors import CheckpointError
from fullshard.lora import virtual_tokens
from fullshard.lora.adapter_config import CONFIG, FIRST, WEIGHTS, taken_from_weights
from fullshard.lora.peft_model import get_peft_model_on_meta
from fullshard.lora.plain_lora import first_of, make_plain
from fullshard.weights.adapter_base import write_record
from fullshard.weights.adapter_files import names_in_files, other_rows
from fullshard.weights.load import class_of, on_meta


def write_adapter(checkpoint: str | Path, out: Path, *, verify: bool = True) -> None:
    """Write the adapter of a checkpoint to `out`, an existing folder."""
    from peft import PeftConfig

    directory = Path(checkpoint)
    manifest = read_manifest(directory)
    name, entry = find_model(manifest, directory)
    wrong = find_damage(directory, manifest.files) if verify else []
    if wrong := wrong or find_header_mismatches(directory, manifest, range(len(manifest.files))):
        raise CheckpointError(f"the checkpoint {directory} is damaged: " + "\n".join(wrong))
    configs, shape = entry.get("adapter_configs") or {}, dict(entry.get("config") or {})
    if len(configs) != 1 or not shape:
        raise CheckpointError(
            f"{directory} does not describe its adapter ({len(configs)} adapter configurations, "
            f"{'a' if shape else 'no'} model configuration); resume the run from it and let it finish"
        )
    files = (entry["base"]["path"], entry["base"]["fingerprint"]) if entry["base"] else None
    start = next(iter(configs.values())).get("init_lora_weights")
    first = first_of(directory) if taken_from_weights(start) else None
    if taken_from_weights(start) and first is None:
        raise CheckpointError(
            f"the adapter of {directory} was initialized with {start} from the base weights, and its initial values "
            f"are missing; put the run's folder {FIRST} into {directory.absolute().parent.parent}"
        )
    (config,) = configs.values()
    base = config.get("base_model_name_or_path") or (files[0] if files else None)
    (out / CONFIG).write_text(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")
    if base is not None:
        write_record(out, base, files)
    shape.pop("quantization_config", None)
    empty = AutoConfig.for_model(**shape)
    plain = on_meta(class_of(None, empty), empty, torch.float32, directory, False)
    plain.name_or_path = base
    found: Any = PeftConfig.from_pretrained(str(out))
    found.inference_mode = False  # with the trainable parameters
    with torch.device("meta"):
        model = get_peft_model_on_meta(plain, found)
    tensors = dict(stored_tensors(manifest, directory, name))
    tensors |= {key: tensors[source] for key, source in entry["tied"].items() if source in tensors}
    for adapter, encoder in virtual_tokens.encoders(model).items():
        values = {key: tensors[f"prompt_encoder.{adapter}.{key}"].read() for key in encoder.state_dict()}
        save_file(virtual_tokens.as_file(encoder, values), out / WEIGHTS, metadata={"format": "pt"})
        return
    must, may = names_in_files(model, next(iter(model.peft_config)))
    if absent := [key for key in must.values() if key not in tensors]:
        raise CheckpointError(f"{directory} does not hold {', '.join(absent[:5])}, which its adapter has")
    # With a base, a checkpoint leaves out what the base provides, so an embedding that it holds was changed or resized.
    # Without one (the user passed a model object), it holds everything.
    grown = entry["base"] or other_rows(config["base_model_name_or_path"], empty)
    wanted = must | {file_key: key for file_key, key in may.items() if key in tensors and grown}
    save_file(
        {file_key: tensors[key].read() for file_key, key in wanted.items()}, out / WEIGHTS, metadata={"format": "pt"}
    )
    if first is not None:
        make_plain(out, first)
