"""A model's files on their way out, on the rank that writes them.

They are written aside, in a directory of their own on the same disk, and take their names only when all of them are
whole and checked, so nothing half-written is ever found under a name that others read.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import PreTrainedModel

from fullshard.durable import sync
from fullshard.errors import WeightsError
from fullshard.fsdp.strategy import dtype_name
from fullshard.weights.locate import INDEX, SINGLE
from fullshard.weights.safetensors_writer import FileWriter, total_bytes
from fullshard.weights.source_files import base_of

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "sentencepiece*", "chat_template*", "additional_chat_templates", "*processor_config.json", "*.py",
)  # fmt: skip
"""What is copied beside the weights: tokenizer, templates, and the code of models that bring their own."""

OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of weights that `save_pretrained` writes, here and in transformers: those of an earlier one are removed."""


class ModelDirWriter:
    """The files on their way, on the first rank."""

    def __init__(
        self, target: Path, form: dict[str, torch.Tensor], max_shard_size: int | str, packed: Collection[str] = ()
    ):
        self.target = target = target.resolve()  # a link to an empty folder cannot be replaced by a rename
        self.dense = {name: t for name, t in form.items() if name not in packed}
        self.files: dict[str, FileWriter] = {}
        self.aside: Path | None = None
        if target.exists() and not target.is_dir():
            raise WeightsError(f"{target} is a file; name a directory to write the model to")
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
                    f"{target} needs {needed / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB left; make room, "
                    f"choose another directory, or a narrower dtype="
                )
            self.aside = home / f".{target.name}-{uuid.uuid4().hex[:8]}.writing"
            self.aside.mkdir()
            for file, names in self.split.filename_to_tensors.items():
                self.files[file] = FileWriter(self.aside / file, {name: form[name] for name in names})
        except OSError as error:
            self.clean_up()
            raise _failed(target, error) from error

    def write(self, values: dict[str, torch.Tensor]) -> int:
        try:
            for name, value in values.items():
                self.files[self.split.tensor_to_filename[name]].write(name, value)
        except OSError as error:
            raise _failed(self.target, error) from error
        return total_bytes(values)

    def finish(self, model: PreTrainedModel, tokenizer: Any, verify: bool) -> None:
        """Check what was written, put configuration and tokenizer beside it, and give all of it its name."""
        assert self.aside is not None
        try:
            for file in self.files.values():
                file.finish(verify)
            if self.split.is_sharded:
                parameters = sum(p.numel() for p in model.parameters())
                index = {
                    "metadata": {"total_parameters": parameters, **self.split.metadata},
                    "weight_map": dict(sorted(self.split.tensor_to_filename.items())),
                }
                (self.aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            _write_config(model, self.aside, self.dense)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.aside)
            else:
                _copy_tokenizer(model, self.aside)
            self._publish()
        except OSError as error:
            raise _failed(self.target, error) from error

    def _publish(self) -> None:
        assert self.aside is not None
        for path in [*self.aside.rglob("*"), self.aside]:
            sync(path)
        if self.fresh:
            os.replace(self.aside, self.target)  # one rename: all or nothing
        else:
            new = {path.name for path in self.aside.iterdir()}
            old = [p for p in self.target.glob("model*.safetensors*") if OWN.fullmatch(p.name) and p.name not in new]
            # The index goes last: until then it points at what it described.
            for path in sorted(self.aside.iterdir(), key=lambda p: p.name == INDEX):
                if path.is_dir() and (self.target / path.name).exists():
                    shutil.rmtree(self.target / path.name)
                os.replace(path, self.target / path.name)
            for path in old:
                path.unlink()
            self.aside.rmdir()
            sync(self.target)
        sync(self.target.parent)
        self.aside = None

    def clean_up(self) -> None:
        for file in self.files.values():
            file.close()
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)


def _write_config(model: PreTrainedModel, directory: Path, form: dict[str, torch.Tensor]) -> None:
    config = copy.deepcopy(model.config)
    floating = [t for t in form.values() if t.is_floating_point()]
    if floating:  # the dtype that most of the weights have
        sizes: dict[torch.dtype, int] = {}
        for t in floating:
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.numel()
        config.dtype = dtype_name(max(sizes, key=lambda dtype: sizes[dtype]))
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def _copy_tokenizer(model: PreTrainedModel, directory: Path) -> None:
    base = base_of(model)
    path = Path(base.path if base is not None else getattr(model.config, "name_or_path", "") or "/nowhere")
    copy_tokenizer_files(path.parent if path.is_file() else path, directory)


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    """Copy what is there of them; nothing if there is no such folder."""
    for pattern in TOKENIZER_FILES if source.is_dir() else ():
        for found in source.glob(pattern):
            copied = shutil.copytree if found.is_dir() else shutil.copyfile
            copied(found, directory / found.name)


def _failed(target: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"the model could not be written to {target}: {error.strerror or error} "
        f"({error.filename or 'while writing'}). Nothing was left there; what was there before is untouched"
    )
