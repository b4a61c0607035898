"""The report of `fullshard env`: versions, engines, devices, backends, ranks and environment variables of this machine.

It is made for bug reports, so it must never fail: a fact that cannot be found is replaced by the reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

from fullshard.config.errors import RuntimeSetupError, first_line
from fullshard.device.device_kinds import KINDS
from fullshard.distributed import engines
from fullshard.version import __version__

TORCH_PACKAGES = ("torch_xla", "torch_tpu")
PACKAGES = ("transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "bitsandbytes", "triton")
VARIABLES = re.compile(
    r"(FULLSHARD|NCCL|GLOO|TORCH|XLA|PJRT|TPU)_\w+|HF_HUB_OFFLINE|CPU_NUM_DEVICES|OMP_NUM_THREADS|"
    + "|".join(kind.visible for kind in KINDS.values())
)
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|AUTH")
SECRET_VALUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+=-]{20,}|.*://[^/]*:[^/]*@.*")
"""A long token of letters and digits, or a URL with a password."""
LONGEST = 200


def describe_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that decides how a run behaves on this machine. Nothing is initialized."""
    return {
        "fullshard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "engine": _attempt(_engine),
        "torch_engine": _offer("torch"),
        "xla_engine": _offer("xla"),
        "torch": _attempt(_torch_version),
        **{name: _version(name) for name in TORCH_PACKAGES},
        "cuda": _attempt(_cuda_version),
        "nccl": _attempt(_nccl_version),
        **{name: _version(name) for name in PACKAGES},
        "accelerator": _attempt(_accelerator),
        "xla_devices": _attempt(_xla_devices),
        "device": _attempt(_device),
        "backend": _attempt(_backend),
        "backends": _attempt(_backends),
        "gpus": _attempt(_gpus),
        "cpus": os.cpu_count(),
        "rank": _attempt(lambda: _from_runtime("rank")),
        "world_size": _attempt(lambda: _from_runtime("world_size")),
        "local_world_size": _attempt(lambda: _from_runtime("local_world_size")),
        "nodes": _attempt(lambda: _from_runtime("node_count")),
        "config_file": _attempt(_config_file),
        "variables": variables(environment),
    }


def as_lines(facts: Mapping[str, Any]) -> list[str]:
    """The report as text, one fact per line."""
    named = {name: name if name in TORCH_PACKAGES else name.replace("_", " ") for name in facts}
    rows = {named[name]: value for name, value in facts.items() if name != "variables"}
    lines = [(name, (", ".join(value) or "none") if isinstance(value, list) else value) for name, value in rows.items()]
    lines += facts["variables"].items()
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {value}" for name, value in lines]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change a run. Values that look like secrets are hidden."""
    return {name: _shown(name, environment[name]) for name in sorted(environment) if VARIABLES.fullmatch(name)}


def _shown(name: str, value: str) -> str:
    if name == "FULLSHARD_RESOLVED":
        return "(set by fullshard launch)"  # it holds the user's whole command
    if SECRET_NAME.search(name) or SECRET_VALUE.fullmatch(value):
        return "(hidden)"
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}…"


def _attempt(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:
        return f"unavailable: {type(error).__name__}: {first_line(error)}"


def _version(package: str) -> str:
    return _installed(package) or "not installed"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except Exception:
        return None


def _engine() -> str:
    return engines.current().name


def _offer(name: str) -> str:
    """Whether an engine can be used here, or why not."""
    try:
        engines.choose({engines.ENGINE_VARIABLE: name}, _installed("torch"), _installed("torch_xla"))
    except RuntimeSetupError as error:
        return f"cannot be used: {str(error).partition('cannot run here: ')[2]}"
    return "can be used"


def _torch_version() -> str:
    import torch

    return torch.__version__


def _cuda_version() -> str:
    import torch

    return torch.version.cuda or "none (torch was built without CUDA)"


def _nccl_version() -> str:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "none (torch was built without NCCL)"
    import torch.cuda.nccl

    return ".".join(map(str, torch.cuda.nccl.version()))


def _accelerator() -> str:
    from fullshard.device import accelerator
    from fullshard.distributed import runtime

    return runtime.device_note() or (f"{accelerator.kind()}: supported" if accelerator.reported_kind() else "none")


def _xla_devices() -> str:
    if not engines.current().drives_machine:
        return "none (the XLA engine is not used)"
    from fullshard.distributed import runtime

    here, all_of_them = runtime.addressable_device_count(), runtime.global_runtime_device_count()
    return f"{all_of_them} {runtime.device_type()}, {here} of this process"


def _device() -> str:
    from fullshard.distributed import runtime

    return str(runtime.device())


def _backend() -> str:
    from fullshard.distributed import groups, rank_env, runtime

    if engines.current().drives_machine:
        return str(runtime.transport())
    kind = runtime.device().type
    own = groups.has_own(kind) and runtime.local_world_size() <= rank_env.gpu_count()
    return rank_env.choose_backend(kind, own=own)


def _backends() -> list[str]:
    """The backends of `torch.distributed` in this build of torch."""
    import torch.distributed as dist

    backends = ("gloo", *(kind.backend for kind in KINDS.values()), "mpi", "ucc")
    return [name for name in backends if dist.is_backend_available(name)]


def _gpus() -> list[str]:
    import torch

    from fullshard.device import accelerator

    properties = getattr(torch.get_device_module(accelerator.kind()), "get_device_properties", None)
    if properties is None:
        return accelerator.names()
    sizes = [properties(index).total_memory for index in range(accelerator.count())]
    return [f"{name} ({size / 2**30:.1f} GiB)" for name, size in zip(accelerator.names(), sizes, strict=True)]


def _from_runtime(name: str) -> int:
    from fullshard.distributed import runtime

    return int(getattr(runtime, name)())


def _config_file() -> str:
    from fullshard.launch.config import find_file

    file, reason = find_file(None)
    return f"{file} ({reason})" if file else reason
