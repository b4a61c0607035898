"""`ModelDirWriter`: writes the files of a model directory, on the one rank that writes.

Files are written to a temporary directory on the same disk and renamed only when all of them are complete and verified,
so a partially written file never has a name that others read.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import PreTrainedModel

from fullshard.config.byte_size import file_size
from fullshard.config.durable import sync, sync_tree
from fullshard.config.errors import WeightsError
from fullshard.config.paths import give_usual_modes
from fullshard.distributed import runtime
from fullshard.fsdp.strategy import dtype_name
from fullshard.weights.locate import INDEX, SINGLE, inside
from fullshard.weights.safetensors_files import FileWriter, total_bytes
from fullshard.weights.source_files import base_of

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "sentencepiece*", "chat_template*", "additional_chat_templates", "*.py",
)  # fmt: skip
"""Files copied with the weights: tokenizer, chat templates, and custom model code."""
PROCESSOR_FILES = ("*processor_config.json",)
"""Files copied with the weights whichever tokenizer is saved: how images and sound become inputs."""

OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weight files written by `save_pretrained`, here and in transformers; those of an earlier save are removed."""


class ModelDirWriter:
    """The files of one model while they are written. `form` has all tensors on meta; `packed` names the quantized
    ones."""

    def __init__(
        self, target: Path, form: dict[str, torch.Tensor], max_shard_size: int | str, packed: Collection[str] = ()
    ):
        self.target = target = target.resolve()  # a rename cannot replace a symlink to an empty folder
        self.dense = {name: t for name, t in form.items() if name not in packed}
        self.files: dict[str, FileWriter] = {}
        self.temporary: Path | None = None
        if target.exists() and not target.is_dir():
            raise WeightsError(f"{target} is a file; expected a directory to write the model to")
        self.split = split_torch_state_dict_into_shards(
            form, filename_pattern=SINGLE.replace(".", "{suffix}."), max_shard_size=max_shard_size
        )
        try:
            self.fresh = not target.exists() or not any(target.iterdir())
            home = target.parent if self.fresh else target
            home.mkdir(parents=True, exist_ok=True)
            free, needed = shutil.disk_usage(home).free, total_bytes(form)
            if free < needed:
                raise WeightsError(
                    f"{target} needs {file_size(needed)} and its disk has {file_size(free)} free; free some space, "
                    f"choose another directory, or a smaller dtype="
                )
            self.temporary = home / f".{target.name}-{uuid.uuid4().hex[:8]}.writing"
            self.temporary.mkdir()
            for file, names in self.split.filename_to_tensors.items():
                self.files[file] = FileWriter(self.temporary / file, {name: form[name] for name in names})
        except OSError as error:
            self.clean_up()
            raise _failed(target, error) from error

    def write(self, values: dict[str, torch.Tensor]) -> int:
        """Write tensors; returns their size in bytes."""
        try:
            for name, value in values.items():
                self.files[self.split.tensor_to_filename[name]].write(name, value)
        except OSError as error:
            raise _failed(self.target, error) from error
        return total_bytes(values)

    def finish(self, model: PreTrainedModel, tokenizer: Any, verify: bool) -> None:
        """Verify what was written, add configuration and tokenizer, and publish all files under their names."""
        assert self.temporary is not None
        try:
            for file in self.files.values():
                file.finish(verify)
            if self.split.is_sharded:
                parameters = sum(p.numel() for p in model.parameters())
                index = {
                    "metadata": {"total_parameters": parameters, **self.split.metadata},
                    "weight_map": dict(sorted(self.split.tensor_to_filename.items())),
                }
                (self.temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            _write_config(model, self.temporary, self.dense)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.temporary)
            copy_files(_base_folder(model), self.temporary, () if tokenizer is not None else TOKENIZER_FILES)
            self._publish()
        except OSError as error:
            raise _failed(self.target, error) from error

    def _publish(self) -> None:
        assert self.temporary is not None
        give_usual_modes(self.temporary)
        sync_tree(self.temporary)
        if self.fresh:
            os.replace(self.temporary, self.target)  # one rename: all or nothing
        else:
            new = {path.name for path in self.temporary.iterdir()}
            old = [p for p in self.target.glob("model*.safetensors*") if OWN.fullmatch(p.name) and p.name not in new]
            # The index comes last: until then the old one refers to its own files.
            for path in sorted(self.temporary.iterdir(), key=lambda p: p.name == INDEX):
                if path.is_dir() and (self.target / path.name).exists():
                    shutil.rmtree(self.target / path.name)
                os.replace(path, self.target / path.name)
            for path in old:
                path.unlink()
            self.temporary.rmdir()
            sync(self.target)
        sync(self.target.parent)
        self.temporary = None

    def clean_up(self) -> None:
        """Close the files and remove what was not published."""
        for file in self.files.values():
            file.close()
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _write_config(model: PreTrainedModel, directory: Path, form: dict[str, torch.Tensor]) -> None:
    config = copy.deepcopy(model.config)
    floating = [t for t in form.values() if t.is_floating_point() and t.dtype.itemsize > 1]
    if floating:  # the most common dtype, by number of elements
        sizes: dict[torch.dtype, int] = {}
        for t in floating:
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.numel()
        config.dtype = dtype_name(max(sizes, key=lambda dtype: sizes[dtype]))
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def _base_folder(model: PreTrainedModel) -> Path:
    base = base_of(model)
    path = Path(base.path if base is not None else getattr(model.config, "name_or_path", "") or "/nowhere")
    return path.parent if path.is_file() else path


def copy_files(source: Path, directory: Path, patterns: Sequence[str] = TOKENIZER_FILES) -> None:
    """Copy the files in `source` with these names, and those of its processor; does nothing if there is no such
    folder."""
    for pattern in (*patterns, *PROCESSOR_FILES) if source.is_dir() else ():
        for entry in source.glob(pattern):
            try:
                for file in (entry, *entry.rglob("*")):
                    inside(file, source)
            except WeightsError as error:  # a result may be published
                runtime.get_logger().warning("%s was not copied: %s", entry.name, error)
                continue
            copied = shutil.copytree if entry.is_dir() else shutil.copyfile
            copied(entry, directory / entry.name)


def _failed(target: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"the model could not be written to {target}: {error.strerror or error} "
        f"({error.filename or 'while writing'}). Partial files were removed; existing files are unchanged"
    )
