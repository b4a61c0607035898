"""`save_pretrained`: writes a sharded model as files that transformers reads, one tensor at a time.

All ranks send their shards of a tensor to rank 0, which writes it (`model_dir_writer.py`, `safetensors_files.py`).
Conversions done at load are reversed (`key_mapping.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from fullshard.config.byte_size import file_size
from fullshard.config.errors import WeightsError
from fullshard.config.paths import refuse_inputs
from fullshard.device.torch_private import local_of
from fullshard.distributed import engines, runtime
from fullshard.distributed.progress import Bar
from fullshard.distributed.ranks import agree, any_of, host_group
from fullshard.fsdp import state_dict
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_name, dtype_of
from fullshard.spmd.tensor import is_sharded
from fullshard.weights.dtypes import dtypes_kept
from fullshard.weights.key_mapping import ReverseMapping, TensorGroup
from fullshard.weights.locate import open_source
from fullshard.weights.model_dir_writer import ModelDirWriter
from fullshard.weights.safetensors_files import total_bytes
from fullshard.weights.slice_reader import Stored, TensorReader, lengths
from fullshard.weights.source_files import base_of
from fullshard.weights.transforms import KeepsFiles, WritesFiles, own_readers
from fullshard.weights.wrapped import wrapped


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "10GB",
    tokenizer: Any = None,
    verify: bool = True,
    progress: bool = True,
) -> Path:
    """Write a wrapped transformers model so that `from_pretrained` reads it. All ranks must call it.

    - `dtype`: of floating-point weights in the files; None keeps the dtype of each parameter, and logs it.
    - `max_shard_size`: larger models are written as several files with an index.
    - `tokenizer`: saved with the weights; by default the tokenizer files of the model's base are copied.
    - `verify`: read everything back and compare checksums, not only sizes and headers.

    Besides its shards, rank 0 holds one whole tensor at a time, or two while one is converted.
    """
    plain, tensors = _check(model)
    kept = dtypes_kept(plain, file_dtype, tensors) if (file_dtype := dtype_of(dtype)) is not None else {}

    def dtype_in_file(name: str) -> torch.dtype:
        stored = tensors[name].dtype
        return kept.get(name, file_dtype) if file_dtype is not None and stored.is_floating_point else stored

    groups = _groups(plain, tensors)
    outputs = [
        group.convert({n: torch.empty(tensors[n].shape, dtype=dtype_in_file(n), device="meta") for n in group.members})
        for group in groups
    ]
    form = {
        name: torch.empty_like(t) for converted in outputs for name, t in converted.items()
    }  # without shared storage
    runtime.get_logger().info("writing %s to %s", _described(form, file_dtype), directory)
    target = Path(directory)
    writing: list[ModelDirWriter] = []
    copied: dict[str, TensorReader] = {}
    opened = contextlib.ExitStack()

    def begin() -> None:
        if runtime.is_main():
            copied.update(opened.enter_context(_left_out(plain)))
            form.update({name: torch.empty(r.shape, dtype=r.dtype, device="meta") for name, r in copied.items()})
            if (base := base_of(plain)) is not None:
                refuse_inputs(target, "save_pretrained", {"the model's base": [Path(base.path)]})
            packed = {
                n for g, converted in zip(groups, outputs, strict=True) if isinstance(g, _Packed) for n in converted
            }
            writing.append(ModelDirWriter(target, form, max_shard_size, packed))

    try:
        agree(begin, "export", error=WeightsError)
        _stream(model, groups, tensors, dtype_in_file, writing, Bar("writing", total_bytes(form), progress))

        def finish() -> None:
            for w in writing:
                for name, reader in copied.items():
                    w.write({name: reader[()]})
                w.finish(plain, tokenizer, verify)

        agree(finish, "export", error=WeightsError)
    finally:
        opened.close()
        for w in writing:
            w.clean_up()
    return target


@contextlib.contextmanager
def _left_out(model: nn.Module) -> Iterator[dict[str, TensorReader]]:
    """Readers for the parts that are left out of a model, by name in the files it was loaded from."""
    base = base_of(model)
    if base is None or not base.left_out:
        yield {}
        return
    with open_source(base.path) as source:
        yield {name: Stored(source, source.entries[name]) for name in base.left_out}


def _check(model: nn.Module) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model and its tensors to write, tied ones once. Raises `WeightsError` if the model cannot be written."""
    if wrapped(model) is None:
        raise WeightsError(f"save_pretrained needs a wrapped model, FSDPv2(module, mesh); got {type(model).__name__}")
    if not isinstance(model, PreTrainedModel):
        raise WeightsError(
            f"save_pretrained needs a transformers model; got {type(model).__name__}. Save an adapter with its own "
            f"model.save_pretrained(directory), other modules with model.full_state_dict()"
        )
    if packed := {name: module for name, module in own_readers(model).items() if not isinstance(module, WritesFiles)}:
        raise WeightsError(
            f"{len(packed)} modules ({next(iter(packed))}, …) have packed weights that transformers cannot read; "
            f"export the model's adapter, or load the model without quantization"
        )
    tensors: dict[str, torch.Tensor] = {}
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    everything = model.state_dict(keep_vars=True)
    seen = {id(everything[source]) for source in ties.values() if source in everything}
    for name, value in everything.items():
        tied = name in ties and id(value) in seen or id(value) in {id(t) for t in tensors.values()}
        if not tied and name not in (model._keys_to_ignore_on_save or ()):
            tensors[name] = value
    empty = [name for name, value in tensors.items() if (local_of(value) if is_sharded(value) else value).is_meta]
    if empty or not tensors:
        raise WeightsError(
            f"{len(empty)} parameters have no values yet ({', '.join(empty[:3])}); load them before saving"
            if empty
            else f"{type(model).__name__} has no parameters to save"
        )
    return model, tensors


class _Packed(TensorGroup):
    """The parameters of a module that are stored in another form in files, such as 4-bit weights."""

    def __init__(self, reverse: ReverseMapping, name: str, module: WritesFiles):
        super().__init__(reverse, name)
        self.module = module
        self.members = {f"{name}.{part}": None for part in module.made_parameters()}

    def convert(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = {member.removeprefix(f"{self.first}."): values[member] for member in self.members}
        files = self.module.as_files(parts)
        if not isinstance(self.module, KeepsFiles):
            return {self.reverse.renamed(f"{self.first}.{name}"): t for name, t in files.items()}
        converted: dict[str, torch.Tensor] = {}
        for weight, part, name in self.module.part_files().values():
            suffix = weight.format.suffixes[part]
            (dense,) = self.reverse.groups([f"{self.first}.{name.removesuffix(suffix)}"])
            own = dense.convert(dict.fromkeys(dense.members, files[name]))
            converted |= {key + suffix: value for key, value in own.items()}
        return converted


def _groups(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> list[TensorGroup]:
    """The tensors that are converted together: one group per packed module, the rest as converted at load."""
    reverse = ReverseMapping(model)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, WritesFiles)}
    packed = [_Packed(reverse, name, module) for name, module in modules.items()]
    in_groups = {member for group in packed for member in group.members}
    return [*reverse.groups(name for name in tensors if name not in in_groups), *packed]


def _described(form: dict[str, torch.Tensor], file_dtype: torch.dtype | None) -> str:
    names = sorted({dtype_name(t.dtype) for t in form.values()})
    how = "as requested" if file_dtype is not None else "as stored; change with dtype="
    return f"{file_size(total_bytes(form))} of {', '.join(names)} ({how})"


def _stream(
    model: nn.Module,
    groups: list[TensorGroup],
    tensors: dict[str, torch.Tensor],
    dtype_in_file: Callable[[str], torch.dtype],
    writing: list[ModelDirWriter],
    bar: Bar,
) -> None:
    """Gather one group after another on rank 0, which writes it."""
    whole_model = wrapped(model)
    assert whole_model is not None
    by_shard = {id(p.shard): p for p in whole_model.parameters}
    failure: Exception | None = None
    done = 0
    with bar:
        for group in groups:
            values = {}
            for name in group.members:
                p, dtype = by_shard.get(id(tensors[name])), dtype_in_file(name)
                whole = _whole(p, dtype) if p is not None else tensors[name].detach().to("cpu", dtype)
                values[name] = torch.empty(0) if whole is None else whole
                del whole
            for w in writing:
                try:
                    converted = group.convert(values)
                    del values
                    done += w.write(converted)
                    del converted
                    bar.at(done)
                except Exception as error:
                    failure = error
            if any_of(failure is not None, "export"):
                break

    def raise_failure() -> None:
        if failure is not None:
            raise failure

    agree(raise_failure, "export", error=WeightsError)


def _whole(p: ShardedParameter, dtype: torch.dtype) -> torch.Tensor | None:
    """Gather a parameter in rank 0's host memory; other ranks send their shards and get None."""
    if (on_host := engines.current().host_shards) is not None:
        value = on_host.whole(p.shard)  # all processes take part
        return value.to(dtype) if runtime.is_main() else None
    mine = p.local.detach().to("cpu", dtype).contiguous()
    shape, group, layout = p.plan.shape, host_group(), p.layout
    if lengths(layout.slices(shape, 0)) == shape:
        return mine if runtime.is_main() else None  # rank 0 already has all of it
    senders = [int(rank) for rank in layout.mesh.device_ids if layout.replica_id(int(rank)) == 0]
    if not runtime.is_main():
        if runtime.rank() in senders and mine.numel():
            dist.send(mine, 0, group=group)
        return None
    whole = torch.empty(shape, dtype=dtype)
    for rank in senders:
        target = whole[layout.slices(shape, rank)]
        if rank == 0:
            target.copy_(mine)
        elif target.numel():
            into = target if target.is_contiguous() else torch.empty(target.shape, dtype=dtype)
            dist.recv(into, rank, group=group)
            if into is not target:
                target.copy_(into)
    return whole


def _save_for(model: nn.Module, directory: Any, options: dict[str, Any]) -> Any:
    """`model.save_pretrained` of a wrapped model; NotImplemented if the model or an option is not supported here."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        return NotImplemented
    if not set(options) <= {"max_shard_size", "dtype", "tokenizer", "verify", "progress"}:
        return NotImplemented
    return save_pretrained(model, directory, **options)


state_dict.streamed_save = _save_for
