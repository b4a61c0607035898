"""`fullshard export`: a result as others read it, in a folder of its own that appears whole or not at all.

An adapter is added to its base (`merge`) or written out alone, a model is converted, a training checkpoint of either
becomes files first. Values are read and written one tensor at a time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fullshard.byte_size import file_size
from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.checkpoint.consolidate import merge_weights
from fullshard.durable import sync
from fullshard.errors import ConfigError, WeightsError
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora.adapter_config import CONFIG, WEIGHTS
from fullshard.paths import check_new_folder
from fullshard.progress import Bar
from fullshard.quant import bnb_format
from fullshard.results.chat_model import trained_quantization
from fullshard.results.find_result import TOKENIZER, Place
from fullshard.weights.adapter_base import RECORD, check_base, lasting_name
from fullshard.weights.dtypes import choose_dtype, dtypes_kept
from fullshard.weights.load import class_of, on_meta, read_config
from fullshard.weights.locate import open_source, resolve
from fullshard.weights.merge_adapter import merge_adapter
from fullshard.weights.model_dir_writer import ModelDirWriter, copy_tokenizer_files
from fullshard.weights.safetensors_writer import total_bytes
from fullshard.weights.slice_reader import Stored


@dataclass(frozen=True)
class Choices:
    """How to export."""

    merge: bool = False
    dtype: str | None = None
    dequantized: bool = False
    max_shard_size: str = "10GB"
    verify: bool = True
    progress: bool = True


def export(place: Place, out: str | Path, choices: Choices) -> dict[str, Any]:
    """Write what lies at `place` to `out`, a folder that does not exist or is empty; what was written."""
    target = Path(out).expanduser()
    check_new_folder(target)
    if place.kind == "adapter":
        with tempfile.TemporaryDirectory(prefix="fullshard-adapter-") as made:
            folder = Path(place.folder)
            if place.checkpoint:
                write_adapter(folder, Path(made), verify=choices.verify)
                folder = Path(made)
            (_merge if choices.merge else _copy_adapter)(place, folder, target, choices)
    elif place.checkpoint:
        merge_weights(
            place.folder, target, dtype=choices.dtype, max_shard_size=choices.max_shard_size, verify=choices.verify,
            tokenizer=place.tokenizer if place.tokenizer != place.folder else None, progress=choices.progress,
        )  # fmt: skip
    else:
        _convert(place, target, choices)
    return describe(target)


def describe(target: Path) -> dict[str, Any]:
    """What a folder holds: its kind, its files and their sizes, its dtypes, and how it is loaded."""
    files = {p.name: p.stat().st_size for p in sorted(target.iterdir()) if p.is_file()}
    adapter = CONFIG in files
    dtypes: set[str] = set()
    for name in (name for name in files if name.endswith(".safetensors")):
        with safe_open(target / name, "pt") as opened:
            dtypes |= {str(opened.get_slice(key).get_dtype()) for key in list(opened.keys())[:2000]}
    if adapter:
        load = f'peft.AutoPeftModelForCausalLM.from_pretrained("{target}")'
    else:
        load = f'transformers.AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")'
    return {"kind": "adapter" if adapter else "model", "folder": str(target), "files": files,
            "bytes": sum(files.values()), "dtypes": sorted(dtypes), "load": load,
            "chat": f"fullshard chat {target}"}  # fmt: skip


# --- an adapter -----------------------------------------------------------------------------------------------------


def _merge(place: Place, folder: Path, target: Path, choices: Choices) -> None:
    how: Any = None
    held: torch.dtype | None = None
    if choices.dequantized:
        how, held = (True, None) if place.stored_in_4_bits else trained_quantization(place.settings)
        if how is None:
            raise ConfigError(
                f"--dequantized: the settings of the run in {place.run or place.folder} do not say that it trained in "
                f"4 bits."
            )
    merge_adapter(
        _with_tokenizer(place, folder), target, base=resolve(str(place.base)), dtype=choices.dtype, dequantized=how,
        held_as=held, max_shard_size=choices.max_shard_size, verify=choices.verify, progress=choices.progress,
    )  # fmt: skip


def _with_tokenizer(place: Place, folder: Path) -> Path:
    """The adapter's folder; one that was made from a checkpoint gets the run's tokenizer."""
    if place.checkpoint and (Path(place.tokenizer) / TOKENIZER).is_file():
        copy_tokenizer_files(Path(place.tokenizer), folder)
    return folder


def _copy_adapter(place: Place, folder: Path, target: Path, choices: Choices) -> None:
    """The adapter alone: its files, its tokenizer, and where its base lies."""
    check_base(folder, str(place.base))
    target = check_new_folder(target)
    aside = target.parent / f".{target.name}-{uuid.uuid4().hex[:8]}.writing"
    wanted = dtype_of(choices.dtype)
    try:
        aside.mkdir(parents=True)
        tensors = load_file(folder / WEIGHTS)
        if wanted is not None:
            tensors = {name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        config = json.loads((folder / CONFIG).read_text())
        config["base_model_name_or_path"] = lasting_name(str(place.base))
        (aside / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if (folder / RECORD).is_file():
            shutil.copyfile(folder / RECORD, aside / RECORD)
        copy_tokenizer_files(Path(place.tokenizer), aside)
        for path in [*aside.rglob("*"), aside]:
            sync(path)
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()  # an empty one may be there
        aside.rename(target)
    except OSError as error:
        raise WeightsError(f"{target} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# --- a model --------------------------------------------------------------------------------------------------------


def _convert(place: Place, target: Path, choices: Choices) -> None:
    """The model's files, tensor by tensor, in another dtype or in other pieces."""
    where = resolve(place.folder)
    config = read_config(where, None, False)
    if choices.dtype is not None and getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"--dtype: {place.folder} holds 4-bit weights, which have no other dtype; leave it out.")
    with contextlib.closing(open_source(where)) as source, contextlib.ExitStack() as stack:
        wanted = dtype_of(choices.dtype)
        model = on_meta(class_of(None, config), config, choose_dtype(wanted, config, source), where, False)
        model.config.name_or_path = str(where)  # its tokenizer is copied from there
        kept = dtypes_kept(model, wanted, source.entries) if wanted is not None else {}
        form = {
            name: torch.empty(
                entry.shape,
                dtype=kept.get(name, wanted) if wanted is not None and entry.dtype.is_floating_point else entry.dtype,
                device="meta",
            )
            for name, entry in source.entries.items()
        }
        packed = {name for name in form if bnb_format.STATE in name or bnb_format.is_quantized(form, name)}
        outgoing = ModelDirWriter(target, form, choices.max_shard_size, packed)
        stack.callback(outgoing.clean_up)
        done = 0
        with Bar("writing", total_bytes(form), choices.progress) as bar:
            for name, entry in source.entries.items():
                done += outgoing.write({name: Stored(source, entry)[()].to(form[name].dtype)})
                bar.at(done)
        outgoing.finish(model, None, choices.verify)


def summary(found: dict[str, Any]) -> list[str]:
    """What was written, in lines."""
    width = max(map(len, found["files"]))
    lines = [f"{name:<{width}}  {file_size(size)}" for name, size in found["files"].items()]
    lines += ["", f"{found['folder']}: {'an' if found['kind'] == 'adapter' else 'a'} {found['kind']}, "
              f"{file_size(found['bytes'])}, {', '.join(found['dtypes'])}"]  # fmt: skip
    return [*lines, f"load it with  {found['load']}", f"talk to it    {found['chat']}"]
