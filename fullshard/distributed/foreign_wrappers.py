"""Finds modules that another library has already wrapped: DDP, torch's FSDP, DeepSpeed.

They cannot be combined with SPMD, so `fullshard.runtime.use_spmd` and `fullshard.spmd` refuse such modules. None of
those libraries is imported for the check.
"""

from __future__ import annotations

import gc
import sys

import torch

from fullshard.config.errors import RuntimeSetupError

_WRAPPERS = {  # class name -> (module that defines it, name in messages)
    "DistributedDataParallel": ("torch.nn.parallel.distributed", "DistributedDataParallel (DDP)"),
    "FullyShardedDataParallel": (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "torch's FullyShardedDataParallel (FSDP)",
    ),
    "FSDPModule": ("torch.distributed.fsdp._fully_shard._fully_shard", "torch's fully_shard (FSDP2)"),
    "DeepSpeedEngine": ("deepspeed.runtime.engine", "DeepSpeed"),
}


def refuse_foreign_wrappers(module: torch.nn.Module) -> None:
    """Raise if `module`, or one inside it, is wrapped by DDP, FSDP or DeepSpeed."""
    for name, part in module.named_modules():
        wrapper = _wrapper_of(part)
        if wrapper is not None:
            raise _refusal(part, wrapper, f" (at {name!r} in {type(module).__name__})" if name else "")


def _wrapper_of(module: object) -> str | None:
    for cls in type(module).__mro__:
        home, label = _WRAPPERS.get(cls.__name__, ("", None))
        if label is not None and cls.__module__.split(".")[0] == home.split(".")[0]:
            return label
    return None


def _refusal(module: torch.nn.Module, wrapper: str, where: str) -> RuntimeSetupError:
    inner = getattr(module, "module", module)  # DDP, FSDP and DeepSpeed keep the user's module here
    return RuntimeSetupError(
        f"{type(inner).__name__}{where} is wrapped by {wrapper}, which cannot be combined with SPMD: both manage the "
        "same parameters. Pass fullshard the module without its wrapper."
    )


def refuse_live_wrappers() -> None:
    """Raise if any wrapped module exists in this process; found quickly, through referrers of the wrapper classes."""
    classes: set[type] = set()
    for name, (home, _) in _WRAPPERS.items():
        if home in sys.modules and hasattr(sys.modules[home], name):
            classes |= _with_subclasses(getattr(sys.modules[home], name))
    for attempt in range(2):
        live = [m for m in gc.get_referrers(*classes) if type(m) in classes]
        if not live:
            return
        if attempt == 0:
            del live
            gc.collect()  # a deleted wrapper stays in reference cycles until then
    wrapper = _wrapper_of(live[0])
    assert wrapper is not None
    raise _refusal(live[0], wrapper, "")


def _with_subclasses(cls: type) -> set[type]:
    subclasses: list[type] = cls.__subclasses__()
    return {cls}.union(*map(_with_subclasses, subclasses))
