"""Consolidation of a sharded checkpoint into full weights that `from_pretrained` reads, in one process.

Tensors are assembled and written one at a time (one group at a time where the model's files store them in another
form), so that memory holds no more than that. The output directory appears by one rename, once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.manifest import (
    Manifest,
    TensorEntry,
    check_files,
    read_manifest,
    unpublished_name,
)
from fullshard.config.errors import CheckpointError, first_line
from fullshard.config.paths import check_new_folder, give_usual_modes

if TYPE_CHECKING:
    import torch

    from fullshard.weights.safetensors_files import SafetensorsFiles

MAX_SHARD_SIZE = "10GB"
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class FullTensor:
    """A full tensor of the output, read when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def merge_weights(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | int = MAX_SHARD_SIZE,
    model: str | None = None,
    tokenizer: str | Path | None = None,
    verify: bool = True,
    progress: bool = False,
) -> list[Path]:
    """Write the full weights of a checkpoint's model to `out`; returns the paths of the files.

    `out` must be new or empty. `dtype` casts floating-point tensors. `model` selects one of several models in the
    checkpoint. `tokenizer` is a folder whose tokenizer is copied instead of the base model's. `progress` shows a
    progress bar on a terminal.
    """
    directory = Path(checkpoint)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    manifest = read_manifest(directory)
    name, entry = find_model(manifest, directory, model)
    if entry.get("adapters"):
        base = entry["base"]["path"] if entry["base"] else "BASE"
        raise CheckpointError(
            f"{directory} is a checkpoint of an adapter ({', '.join(entry['adapters'])}): it holds the trained "
            f"parameters, not full weights. fullshard export {directory} OUT --merge --base {base} merges it"
        )
    place = check_new_folder(out)
    check_files(directory, manifest, verify)

    base = _open_base(entry)
    tensors = dict([*stored_tensors(manifest, directory, name), *_from_base(entry, base)])
    from fullshard.checkpoint.publish import discard, new_token, publish
    from fullshard.config.durable import sync_tree

    hidden = place.with_name(unpublished_name(place.name, new_token()))
    try:
        hidden.mkdir(parents=True)
        _write_weights(hidden, tensors, entry, dtype, max_shard_size, progress)
        if base is not None:
            _check_base(entry["base"], {**entry["base"], "checksums": base.checksums()})
        _write_rest(hidden, entry, dtype, tokenizer)
        give_usual_modes(hidden)
        sync_tree(hidden)
        publish(hidden, place)
    except OSError as error:
        raise CheckpointError(f"{place} could not be written: {error.strerror or error}") from error
    finally:
        discard(hidden)
        if base is not None:
            base.close()
    return sorted(place.iterdir())


def find_model(manifest: Manifest, directory: Path, requested: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the manifest entry of the checkpoint's model; `requested` selects one of several."""
    models = {name: entry for name, entry in manifest.states.items() if entry["kind"] == "model"}
    if not models:
        raise CheckpointError(f"{directory} holds no model; it holds {', '.join(manifest.states)}")
    if requested is None and len(models) > 1:
        raise CheckpointError(f"{directory} holds several models: {', '.join(models)}; name one with --model")
    if requested is not None and requested not in models:
        raise CheckpointError(f"{directory} holds no model called {requested!r}; it holds {', '.join(models)}")
    name = requested or next(iter(models))
    return name, models[name]


# --- reading --------------------------------------------------------------------------------------------------------


def stored_tensors(manifest: Manifest, directory: Path, model: str) -> Iterator[tuple[str, FullTensor]]:
    """The model's tensors in the checkpoint; rank 0's value of those that differed between ranks."""
    from fullshard.checkpoint import json_tree
    from fullshard.weights.safetensors_files import DTYPES as FILE_DTYPES

    extra = {ref["name"] for ref in json_tree.tensor_refs(manifest.states[model]["extra"])}
    for key, tensor in manifest.tensors.items():
        if not key.startswith(f"{model}/") or key in extra:
            continue
        name = key.removeprefix(f"{model}/")
        plain, mark, rank = name.rpartition("@rank-")
        if mark and f"{model}/{plain}" in manifest.per_rank:
            if rank != "0":
                continue
            name = plain

        def read(tensor: TensorEntry = tensor) -> torch.Tensor:
            return _assembled(manifest, directory, tensor)

        yield name, FullTensor(FILE_DTYPES[tensor.dtype], tensor.shape, read)


def _assembled(manifest: Manifest, directory: Path, tensor: TensorEntry) -> torch.Tensor:
    import torch

    from fullshard.weights.safetensors_files import DTYPES as FILE_DTYPES

    out = torch.empty(tensor.shape, dtype=FILE_DTYPES[tensor.dtype])
    for piece in tensor.pieces:
        part = torch.empty(piece.sizes, dtype=out.dtype) if piece.sizes != tensor.shape else out
        if part.numel():
            with open(directory / manifest.files[piece.file].name, "rb", buffering=0) as stream:
                stream.seek(piece.begin)
                memory = memoryview(part.reshape(-1).view(torch.uint8).numpy())
                while len(memory):
                    count = stream.readinto(memory)
                    if not count:
                        raise CheckpointError(f"{stream.name} is truncated")
                    memory = memory[count:]
        if part is not out:
            out[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))] = part
    return out


def _open_base(entry: dict[str, Any]) -> SafetensorsFiles | None:
    """The base model's files, if the checkpoint leaves out frozen tensors that they hold."""
    if not entry["left_out"]:
        return None
    from fullshard.weights.locate import open_source
    from fullshard.weights.source_files import quick_identity

    path = entry["base"]["path"]
    _check_base(entry["base"], quick_identity(path))
    return open_source(path)


def _check_base(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    from fullshard.weights.source_files import difference

    if wrong := difference(saved, identity):
        raise CheckpointError(
            f"the checkpoint was trained from the base {saved['path']}, whose files have changed since ({wrong}); "
            f"restore the original files"
        )


def _from_base(entry: dict[str, Any], base: SafetensorsFiles | None) -> Iterator[tuple[str, FullTensor]]:
    """The frozen tensors that the checkpoint leaves out, read from the base model's files."""
    if base is None:
        return
    from fullshard.weights.key_mapping import find_readers

    path = entry["base"]["path"]
    model = _empty_model(entry)
    if model is None:
        raise CheckpointError(f"the frozen values are in {path}, but the checkpoint has no model config")
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    readers = find_readers(model, shapes, base).readers
    absent = [name for name in entry["left_out"] if name not in readers and name not in entry["tied"]]
    if absent:
        raise CheckpointError(f"{path} does not hold {', '.join(absent[:5])}, which the checkpoint leaves out")
    for name in entry["left_out"]:
        if (reader := readers.get(name)) is not None:
            yield name, FullTensor(reader.dtype, tuple(reader.shape), lambda reader=reader: reader[()])  # type: ignore[misc]


def _empty_model(entry: dict[str, Any]) -> Any:
    """The model on the meta device, built from the saved config; None if transformers does not have its class."""
    import torch
    import transformers

    from fullshard.weights.config_limits import check_limits

    config = entry.get("config") or {}
    check_limits(config, "the checkpoint")
    kind = getattr(transformers, next(iter(config.get("architectures", ())), ""), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return None
    model_class: Any = kind
    try:
        with torch.device("meta"):
            return model_class(model_class.config_class.from_dict(config))
    except Exception as error:  # whatever transformers makes of a config that is none
        raise CheckpointError(
            f"no model can be built from the config in the checkpoint ({first_line(error)})"
        ) from error


# --- writing --------------------------------------------------------------------------------------------------------


def _write_weights(
    directory: Path,
    tensors: dict[str, FullTensor],
    entry: dict[str, Any],
    dtype: str | None,
    max_shard_size: str | int,
    progress: bool,
) -> None:
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    from fullshard.distributed.progress import Bar
    from fullshard.weights.dtypes import dtypes_kept
    from fullshard.weights.key_mapping import ReverseMapping
    from fullshard.weights.safetensors_files import FileWriter, total_bytes

    model = _empty_model(entry)
    file_dtype = getattr(torch, dtype) if dtype is not None else None
    kept = dtypes_kept(model, file_dtype, tensors) if model is not None and file_dtype is not None else {}

    def final(name: str) -> torch.dtype:
        stored = tensors[name].dtype
        return kept.get(name, file_dtype) if file_dtype is not None and stored.is_floating_point else stored

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names = [name for name in tensors if name not in ignored]
    # As in `save_pretrained`: the form of the model's files, which may differ from that of its modules.
    groups = ReverseMapping(model).groups(names) if model is not None else None
    jobs: list[tuple[list[str], Any]] = [([name], dict) for name in names]
    if groups is not None:
        jobs = [(list(group.members), group.convert) for group in groups]
    form: dict[str, torch.Tensor] = {}
    for members, convert in jobs:
        empty = {n: torch.empty(tensors[n].shape, dtype=final(n), device="meta") for n in members}
        form |= {name: torch.empty_like(t) for name, t in convert(empty).items()}  # no shared storage
    try:
        pattern = "model{suffix}.safetensors"
        split = split_torch_state_dict_into_shards(form, filename_pattern=pattern, max_shard_size=max_shard_size)
    except ValueError as error:
        raise CheckpointError(f"max_shard_size {max_shard_size!r}: {error}") from error
    writers = {
        file: FileWriter(directory / file, {name: form[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }
    done = 0
    try:
        with Bar("writing", total_bytes(form), progress) as bar:
            for members, convert in jobs:
                outputs = convert({n: tensors[n].read().to(final(n)) for n in members})
                done += total_bytes(outputs)
                for name in list(outputs):
                    writers[split.tensor_to_filename[name]].write(name, outputs.pop(name))  # and free it
                bar.at(done)
        for writer in writers.values():
            writer.finish(verify=False)
    finally:
        for writer in writers.values():
            writer.close()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_rest(directory: Path, entry: dict[str, Any], dtype: str | None, tokenizer: str | Path | None) -> None:
    """Write the config, the generation config, and the tokenizer's files if they are known."""
    from fullshard.weights.model_dir_writer import TOKENIZER_FILES, copy_files

    if "config" in entry:
        config = {**entry["config"], **({"dtype": dtype} if dtype is not None else {})}
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if "generation_config" in entry:
        text = json.dumps(entry["generation_config"], indent=2, sort_keys=True)
        (directory / "generation_config.json").write_text(text + "\n")
    if entry["base"]:
        copy_files(Path(entry["base"]["path"]), directory, () if tokenizer is not None else TOKENIZER_FILES)
    if tokenizer is not None:
        copy_files(Path(tokenizer), directory)
