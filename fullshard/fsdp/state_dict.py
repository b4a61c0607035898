"""State dicts of a sharded model: whole or sharded values, and `save_pretrained`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import local_of, parameters_of, spec_of
from fullshard.distributed import runtime
from fullshard.fsdp.engine import Engine
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.spmd.redistribute import replicated
from fullshard.spmd.tensor import is_sharded, redistributed

streamed_save: Callable[[nn.Module, Any, dict[str, Any]], Any] | None = None
"""Writes a model's files without gathering all of it first. `fullshard.weights` sets it on import; it returns
NotImplemented for models and options that it leaves to transformers."""


def whole_value(sharded: ShardedParameter) -> torch.Tensor:
    """The whole stored value on this rank's device. Collective: all ranks of the mesh must call it."""
    shard = sharded.shard
    assert is_sharded(shard)
    value = shard.detach()
    if local_of(value).device != runtime.device():
        value = DTensor(local_of(value).to(runtime.device()), spec_of(value), requires_grad=False)
    return local_of(redistributed(value, value.device_mesh, replicated(value.device_mesh)))


@contextlib.contextmanager
def summon_full_params(engine: Engine, writeback: bool, offload_to_cpu: bool) -> Iterator[None]:
    """Let modules hold whole parameters inside."""
    if engine.summoned:
        yield  # already inside another one
        return
    engine.reshard(engine.unsharded)
    if any(unit.shown for unit in engine.units):
        raise FSDPError(
            "summon_full_params inside a forward or backward pass: modules already hold whole parameters there"
        )
    whole: list[tuple[ShardedParameter, nn.Parameter]] = []
    for unit in engine.units:
        for p in unit.parameters:
            value = whole_value(p)
            value = value.cpu() if offload_to_cpu else value
            value = value.clone() if value.data_ptr() == p.local.data_ptr() else value
            parameter = nn.Parameter(value, requires_grad=p.shard.requires_grad)
            for module, name in p.sites:
                parameters_of(module)[name] = parameter
            whole.append((p, parameter))
    engine.summoned = True
    try:
        yield
        if writeback:
            with torch.no_grad():
                for p, parameter in whole:
                    # Read the module's current parameter: an initializer may have replaced it.
                    module, name = p.sites[0]
                    current = parameters_of(module)[name]
                    source = parameter if current is None else current
                    piece = source.detach()[p.layout.slices(p.plan.shape, runtime.rank())].to(p.local)
                    if not torch.equal(piece, p.local):  # a write invalidates what autograd saved
                        p.local.copy_(piece)
    finally:
        engine.summoned = False
        for p, _ in whole:
            p.show_shard()


def full_state_dict(model: nn.Module, rank0_only: bool, cpu: bool) -> dict[str, torch.Tensor]:
    """Whole values, gathered one parameter at a time."""
    keeps = not rank0_only or runtime.is_main()
    engine: Engine = model._fullshard_engine
    by_shard = {id(p.shard): p for unit in engine.units for p in unit.parameters}
    copies: dict[int, torch.Tensor | None] = {}  # tied values stay one tensor
    out: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            if keeps:
                out[name] = value
            continue
        if id(value) not in copies:
            p = by_shard.get(id(value))
            whole = whole_value(p) if p is not None else value.detach()
            whole = whole.cpu() if cpu and keeps else whole
            shared = p is not None and whole.data_ptr() == p.local.data_ptr()
            copies[id(value)] = None if not keeps else whole.clone() if shared else whole
        kept = copies[id(value)]
        if kept is not None:
            out[name] = kept
    return out


def with_prefix(
    values: dict[str, Any], destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> dict[str, Any]:
    """The values as `nn.Module.state_dict` returns them for its arguments, which come from a module around this one."""
    if destination is None:
        return {prefix + name: value for name, value in values.items()}
    destination.update({prefix + name: value for name, value in values.items()})
    return destination


def as_shards(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with whole values replaced by this rank's shards; no communication for plain tensors."""
    engine: Engine = model._fullshard_engine
    prefix = _prefix(model, engine)
    by_name = {name: p for unit in engine.units for p in unit.parameters for name in p.plan.names}
    out: dict[str, Any] = {}
    for name, value in values.items():
        p = by_name.get(prefix + name)
        out[name] = value if p is None or not isinstance(value, torch.Tensor) else as_shard(value, p)
    return out


def _prefix(model: nn.Module, engine: Engine) -> str:
    names = {module: name for name, module in engine.units[0].module.named_modules()}
    return f"{names[model]}." if names[model] else ""


def as_shard(value: torch.Tensor, p: ShardedParameter) -> torch.Tensor:
    """This rank's piece of a whole or sharded value that belongs to a parameter; the value if its shape differs."""
    p.give_memory()
    shard = p.shard
    assert is_sharded(shard)
    if tuple(value.shape) != p.plan.shape:
        return value  # torch reports the shape together with all other mismatches
    if is_sharded(value):
        local = local_of(redistributed(value.detach(), shard.device_mesh, shard.placements))
        return type(shard)(local, spec_of(shard), requires_grad=False)
    piece = value.detach()[p.layout.slices(p.plan.shape, runtime.rank())].to(p.local.device)
    return type(shard)(piece, spec_of(shard), requires_grad=False)


def save_pretrained(model: Any, plain: Any, directory: Any, options: dict[str, Any]) -> Any:
    """Write tensor by tensor if `streamed_save` supports the model; otherwise gather all, and rank 0 writes.

    With a `state_dict` nothing is left to gather: rank 0 may call it alone, as transformers' Trainer does.
    """
    if options.get("state_dict") is not None:
        writes = options.setdefault("is_main_process", runtime.is_main())
        return plain.save_pretrained(directory, **options) if writes else None
    if streamed_save is not None and (result := streamed_save(model, directory, options)) is not NotImplemented:
        return result
    options["state_dict"] = model.full_state_dict(rank0_only=True, cpu=True)
    options.setdefault("is_main_process", runtime.is_main())
    result = plain.save_pretrained(directory, **options) if runtime.is_main() else None
    runtime.barrier()
    return result
