"""The device of `stand_in.cpp` under the name "standin", with its Python module and its backend "stand_in"."""

from __future__ import annotations

import os
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

from fullshard.device.device_kinds import KINDS, DeviceKind

SOURCE = os.path.join(os.path.dirname(__file__), "stand_in.cpp")
NAME, BACKEND = "standin", "stand_in"


def build(folder: str) -> Any:
    """Compile the device (about half a minute, once per folder) and load it."""
    return load("stand_in", [SOURCE], build_directory=folder, extra_cflags=["-O0"])


def register(folder: str) -> None:
    """Give this process the device, and fullshard its entry."""
    extension = build(folder)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module("torch.standin"))
    torch.utils.generate_methods_for_privateuse1_backend()

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return extension.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
    KINDS[NAME] = DeviceKind(BACKEND, tested=True)


class _Module(types.ModuleType):
    """What torch and fullshard ask of a device's module beyond `torch.accelerator`: whether it is ready (`DeviceMesh`),
    and its random state. Operators run on the CPU, so that is the CPU's."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]
