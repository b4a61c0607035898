"""Checkpoints that Accelerate and Trainer wrote, read into a sharded model and its optimizer.

The format of new checkpoints is Accelerate's own. Which form an existing one has is found on disk: sharded, whole
values of an FSDP run, or the plain files of a run without FSDP (one device, DDP). The type that the plugin is set to
only decides what is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.state_dict import as_shard

MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"
INDEX = ".metadata"
"""The file of a sharded folder that is written last."""
PLAIN_MODELS = ("model{}.safetensors", "pytorch_model{}.bin")
PLAIN_OPTIMIZERS = ("optimizer{}.bin", "optimizer.pt")


def save_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `accelerate.utils.fsdp_utils.save_fsdp_model`."""

    def save(
        fsdp_plugin: Any, accelerator: Any, model: nn.Module, output_dir: Any, model_index: int = 0, **options: Any
    ) -> Any:
        _mark_incomplete(Path(output_dir), MODEL, model_index)
        _mark_incomplete(Path(output_dir), OPTIMIZER, 0)
        return original(fsdp_plugin, accelerator, model, output_dir, model_index, **options)

    return save


def save_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `accelerate.utils.fsdp_utils.save_fsdp_optimizer`."""

    def save(
        fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: nn.Module, output_dir: Any, optimizer_index: int = 0,
        **options: Any,
    ) -> Any:  # fmt: skip
        _mark_incomplete(Path(output_dir), OPTIMIZER, optimizer_index)
        return original(fsdp_plugin, accelerator, optimizer, model, output_dir, optimizer_index, **options)

    return save


def _mark_incomplete(folder: Path, name: str, first: int) -> None:
    """Take away what makes the parts of an older save look complete, from one on: they are written in this order.

    Other ranks write only after the first one has come to it, so they need not wait.
    """
    if runtime.is_main():
        for index in folder.glob(f"{name}_*/{INDEX}"):
            if int(index.parent.name.rpartition("_")[2]) >= first:
                index.unlink()


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `accelerate.utils.fsdp_utils.load_fsdp_model`."""

    def load(
        fsdp_plugin: Any, accelerator: Any, model: nn.Module, input_dir: Any, model_index: int = 0, **options: Any
    ) -> Any:
        folder = Path(input_dir)
        if hasattr(fsdp_plugin, "fullshard") and _fsdp_form(folder, MODEL, model_index) is None:
            if (file := _plain(folder, PLAIN_MODELS, model_index)) is not None:
                return model.load_state_dict(_read(file), strict=not options.get("adapter_only"))
        with _as_stored(fsdp_plugin, folder, MODEL, model_index):
            return original(fsdp_plugin, accelerator, model, input_dir, model_index, **options)

    return load


def load_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `accelerate.utils.fsdp_utils.load_fsdp_optimizer`."""

    def load(
        fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: nn.Module, input_dir: Any, optimizer_index: int = 0,
        **options: Any,
    ) -> Any:  # fmt: skip
        folder = Path(input_dir)
        file = _plain(folder, PLAIN_OPTIMIZERS, optimizer_index)
        if hasattr(fsdp_plugin, "fullshard") and file is not None:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            by_position = any(isinstance(key, int) for key in values["state"])  # FSDP's are by name
            if by_position or not any(values["state"].values()):  # torch cannot load an optimizer without state (SGD)
                return optimizer.load_state_dict(_cut(values, optimizer, model))
        with _as_stored(fsdp_plugin, folder, OPTIMIZER, optimizer_index):
            return original(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, **options)

    return load


def _fsdp_form(folder: Path, name: str, index: int) -> str | None:
    """The type of state dict that an FSDP run left in a folder."""
    sharded = folder if folder.name == f"{name}_{index}" else folder / f"{name}_{index}"
    if sharded.is_dir():
        if not (sharded / INDEX).is_file():
            raise CheckpointError(f"{sharded} has no {INDEX}: its save was interrupted. Load an earlier checkpoint")
        return "SHARDED_STATE_DICT"
    whole = folder / (f"{name}_{index}.bin" if index else f"{name}.bin")
    return "FULL_STATE_DICT" if whole.is_file() else None


@contextlib.contextmanager
def _as_stored(plugin: Any, folder: Path, name: str, index: int) -> Iterator[None]:
    """The plugin is set to the type that the folder holds, for a while."""
    if not hasattr(plugin, "fullshard"):
        yield
        return
    form, before = _fsdp_form(folder, name, index), plugin.state_dict_type.name
    if form is None:
        raise CheckpointError(
            f"{folder} has neither {name}_{index}/ nor {name}.bin, nor the file of a run without FSDP: expected a "
            "folder that save_state or Trainer wrote"
        )
    plugin.set_state_dict_type(form)
    try:
        yield
    finally:
        plugin.set_state_dict_type(before)


def _plain(folder: Path, names: tuple[str, ...], index: int) -> Path | None:
    files = (folder / name.format(f"_{index}" if index else "") for name in names)
    return next((file for file in files if file.is_file()), None)


def _read(file: Path) -> dict[str, torch.Tensor]:
    """Whole values, mapped from the file: only what a rank keeps is read."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _cut(values: dict[str, Any], optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """A plain optimizer state dict with this rank's pieces in the place of whole tensors."""
    sharded = {id(p.shard): p for unit in model._fullshard_engine.units for p in unit.parameters}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in values["param_groups"] for number in group["params"]]
    if len(numbers) != len(params):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(numbers)} parameters and this one has {len(params)}; resume with the "
            "model and optimizer that wrote it"
        )
    state = {}
    for number, parameter in zip(numbers, params, strict=True):
        if number in values["state"]:
            p = sharded.get(id(parameter))
            state[number] = {name: _piece(one, p) for name, one in values["state"][number].items()}
    return {"state": state, "param_groups": values["param_groups"]}


def _piece(value: Any, p: ShardedParameter | None) -> Any:
    whole = isinstance(value, torch.Tensor) and p is not None
    return as_shard(value, p).clone() if whole else value  # type: ignore[arg-type]
