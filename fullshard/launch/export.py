"""`fullshard export`: writes a result in the formats of transformers and PEFT.

An adapter is merged into its base model or copied; a model is copied or converted to another dtype; a training
checkpoint of either is converted to files first. Tensors are read and written one at a time. The output folder appears
when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.checkpoint.consolidate import merge_weights
from fullshard.config.byte_size import file_size
from fullshard.config.durable import sync_tree
from fullshard.config.errors import ConfigError, WeightsError
from fullshard.config.paths import check_new_folder, give_usual_modes
from fullshard.distributed.progress import Bar
from fullshard.distributed.temporary_folders import temporary_folder
from fullshard.fsdp.strategy import dtype_of
from fullshard.launch.chat import trained_quantization
from fullshard.launch.find_result import TOKENIZER, Result
from fullshard.lora.adapter_config import CONFIG, WEIGHTS
from fullshard.quant import bnb_format
from fullshard.quant.shipped import is_shipped, quant_method
from fullshard.report.run_summary import model_class
from fullshard.weights.adapter_base import RECORD, check_base, lasting_name
from fullshard.weights.dtypes import choose_dtype, dtypes_kept
from fullshard.weights.load import class_of, on_meta, read_config
from fullshard.weights.locate import open_source, resolve
from fullshard.weights.merge_adapter import merge_adapter
from fullshard.weights.model_dir_writer import ModelDirWriter, copy_files
from fullshard.weights.requantize import RoundingError
from fullshard.weights.safetensors_files import total_bytes
from fullshard.weights.slice_reader import Stored


@dataclass(frozen=True)
class Choices:
    """Options of an export."""

    merge: bool = False
    dtype: str | None = None
    dequantized: bool = False
    requantize: bool = False
    max_shard_size: str = "10GB"
    verify: bool = True
    progress: bool = True


def export(result: Result, out: str | Path, choices: Choices) -> dict[str, Any]:
    """Write a result to `out`, a folder that does not exist or is empty; returns what was written."""
    target = Path(out).expanduser()
    check_new_folder(target)
    if result.kind == "adapter":
        with temporary_folder() as temporary:
            folder = Path(result.folder)
            if result.checkpoint:
                write_adapter(folder, temporary, verify=choices.verify)
                folder = temporary
            if choices.merge:
                errors = _merge(result, folder, target, choices)
                return describe(target) | ({"rounding": errors} if choices.requantize else {})
            _copy_adapter(result, folder, target, choices)
    elif result.checkpoint:
        merge_weights(
            result.folder, target, dtype=choices.dtype, max_shard_size=choices.max_shard_size, verify=choices.verify,
            tokenizer=result.tokenizer if result.tokenizer != result.folder else None, progress=choices.progress,
        )  # fmt: skip
    else:
        _convert(result, target, choices)
    return describe(target)


def describe(target: Path) -> dict[str, Any]:
    """Describe a folder: kind, files and their sizes, dtypes, and how to load it."""
    files = {p.name: p.stat().st_size for p in sorted(target.iterdir()) if p.is_file()}
    adapter = CONFIG in files
    dtypes: set[str] = set()
    for name in (name for name in files if name.endswith(".safetensors")):
        with safe_open(target / name, "pt") as opened:
            dtypes |= {str(opened.get_slice(key).get_dtype()) for key in list(opened.keys())[:2000]}
    if adapter:
        load = f'peft.AutoPeftModelForCausalLM.from_pretrained("{target}")'
    else:
        load = f'transformers.{model_class(target)}.from_pretrained("{target}", dtype="auto")'
    return {"kind": "adapter" if adapter else "model", "folder": str(target), "files": files,
            "bytes": sum(files.values()), "dtypes": sorted(dtypes), "load": load,
            "chat": f"fullshard chat {target}"}  # fmt: skip


# --- an adapter -----------------------------------------------------------------------------------------------------


def _merge(result: Result, folder: Path, target: Path, choices: Choices) -> list[dict[str, Any]]:
    """Merge an adapter into its base. Returns the errors of quantizing the weights again, if they are."""
    quantization: Any = None
    errors: list[RoundingError] = []
    dtype: torch.dtype | None = None
    if choices.dequantized:
        quantization, dtype = (True, None) if result.stored_in_4_bits else trained_quantization(result.settings)
        if quantization is None:
            raise ConfigError(
                f"--dequantized: according to its settings, the run in {result.run or result.folder} did not train in "
                f"4 bits; remove the option."
            )
    merge_adapter(
        _with_tokenizer(result, folder), target, base=resolve(str(result.base)), dtype=choices.dtype,
        dequantized=quantization, requantize=errors.extend if choices.requantize else None, stored_as=dtype,
        max_shard_size=choices.max_shard_size, verify=choices.verify, progress=choices.progress,
    )  # fmt: skip
    return [error._asdict() for error in errors]


def _with_tokenizer(result: Result, folder: Path) -> Path:
    """The adapter's folder. One that was written from a checkpoint gets the tokenizer of the run."""
    if result.checkpoint and (Path(result.tokenizer) / TOKENIZER).is_file():
        copy_files(Path(result.tokenizer), folder)
    return folder


def _copy_adapter(result: Result, folder: Path, target: Path, choices: Choices) -> None:
    """Copy the adapter: its files, its tokenizer, and the name of its base model."""
    check_base(folder, str(result.base))
    target = check_new_folder(target)
    aside = target.parent / f".{target.name}-{uuid.uuid4().hex[:8]}.writing"
    dtype = dtype_of(choices.dtype)
    try:
        aside.mkdir(parents=True)
        tensors = load_file(folder / WEIGHTS)
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        config = json.loads((folder / CONFIG).read_text())
        config["base_model_name_or_path"] = lasting_name(str(result.base))
        (aside / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if (folder / RECORD).is_file():
            shutil.copyfile(folder / RECORD, aside / RECORD)
        copy_files(Path(result.tokenizer), aside)
        give_usual_modes(aside)
        sync_tree(aside)
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()  # an empty folder may exist
        aside.rename(target)
    except OSError as error:
        raise WeightsError(f"{target} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# --- a model --------------------------------------------------------------------------------------------------------


def _convert(result: Result, target: Path, choices: Choices) -> None:
    """Copy the model's files tensor by tensor, in another dtype or with other file sizes."""
    where = resolve(result.folder)
    config = read_config(where, None, False)
    if choices.dtype is not None and (packed := getattr(config, "quantization_config", None)) is not None:
        kind = quant_method(packed) if is_shipped(packed) else "4-bit"
        raise ConfigError(
            f"--dtype: {result.folder} contains {kind} weights, which cannot be converted; remove the option."
        )
    with contextlib.closing(open_source(where)) as source, contextlib.ExitStack() as stack:
        dtype = dtype_of(choices.dtype)
        model = on_meta(class_of(None, config), config, choose_dtype(dtype, config, source), where, False)
        model.config.name_or_path = str(where)  # the tokenizer is copied from there
        own_dtypes = dtypes_kept(model, dtype, source.entries) if dtype is not None else {}
        form = {
            name: torch.empty(
                entry.shape,
                dtype=own_dtypes.get(name, dtype)
                if dtype is not None and entry.dtype.is_floating_point
                else entry.dtype,
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


def summary(facts: dict[str, Any]) -> list[str]:
    """What was written, as lines of text."""
    width = max(map(len, facts["files"]))
    lines = []
    if rounding := facts.get("rounding"):
        longest = max(len(error["name"]) for error in rounding)
        lines = ["Quantized again; what that changes in each weight:"]
        lines += [f"{e['name']:<{longest}}  largest {e['largest']:.3g}, mean {e['mean']:.3g}" for e in rounding] + [""]
    lines += [f"{name:<{width}}  {file_size(size)}" for name, size in facts["files"].items()]
    lines += ["", f"{facts['folder']}: {'an' if facts['kind'] == 'adapter' else 'a'} {facts['kind']}, "
              f"{file_size(facts['bytes'])}, {', '.join(facts['dtypes'])}"]  # fmt: skip
    return [*lines, f"load it with  {facts['load']}", f"chat with it  {facts['chat']}"]
