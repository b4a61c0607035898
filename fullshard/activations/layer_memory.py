"""Measures what the calls of a layer keep for backward, and the memory of the device.

On an accelerator that is what torch has allocated: it includes what custom operators and compiled layers keep. On the
CPU, where torch does not count, it is the tensors that autograd saves.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.device import accelerator
from fullshard.device.torch_private import compiled_call, plain_call, replace_compiled_call
from fullshard.spmd.tensor import is_sharded
from fullshard.spmd.tensor_tree import tensors_in


class LayerMeter:
    """The most bytes that a call of a layer has kept; its calls run unchanged, compiled ones too."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.kept = 0
        """Bytes allocated in a call that are still in use after it, its output included."""
        self.input = 0
        """Bytes of the input that a recomputed layer keeps."""
        self._compiled = compiled_call(layer)
        replace_compiled_call(layer, self._measure)  # a forward hook would be compiled with the layer

    def stop(self) -> None:
        """Let calls run unmeasured again."""
        replace_compiled_call(self.layer, self._compiled)

    def _measure(self, *args: Any, **kwargs: Any) -> Any:
        call = self._compiled or plain_call(self.layer)
        tensors = [t for t in tensors_in(args) if t.is_floating_point()]
        if not torch.is_grad_enabled() or not tensors:
            return call(*args, **kwargs)
        with kept_bytes(tensors[0].device, [p for p in self.layer.parameters() if not is_sharded(p)]) as kept:
            output = call(*args, **kwargs)
        self.kept = max(self.kept, sum(kept))
        self.input = max(self.input, tensors[0].numel() * tensors[0].element_size())
        return output


@contextlib.contextmanager
def kept_bytes(device: torch.device, parameters: Iterable[torch.Tensor] = ()) -> Iterator[list[int]]:
    """Inside, what is kept for backward besides these parameters is added up in a list."""
    sizes: list[int] = []
    if accelerator.is_accelerator(device):
        before = accelerator.allocated_memory(device)
        yield sizes
        sizes.append(accelerator.allocated_memory(device) - before)
        return
    seen = {p.untyped_storage().data_ptr() for p in parameters}

    def count(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        yield sizes


class DeviceMemory:
    """The memory of this rank's device, as a budget counts it: allocated bytes. On the CPU, those of the process."""

    def __init__(self, device: torch.device, processes: int = 1) -> None:
        self.device, self.processes = device, processes
        self.has_streams = accelerator.is_accelerator(device)

    @property
    def counts_tensors(self) -> bool:
        """Whether it counts what torch allocates, as plans do, and not all of the process."""
        return self.has_streams

    def in_use(self) -> int:
        """Bytes in use now."""
        if self.has_streams:
            return accelerator.allocated_memory(self.device)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def mark(self) -> None:
        """Begin a new peak."""
        if self.has_streams:
            accelerator.mark_peak(self.device)

    def peak(self) -> int:
        """The most bytes in use since `mark`; on the CPU, since the process began."""
        if self.has_streams:
            return accelerator.peak_since_mark(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def total(self) -> int:
        """Bytes of memory on the device."""
        if self.has_streams:
            return accelerator.total_memory(self.device)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def limit(self) -> int:
        """The most bytes that this process can have."""
        if self.has_streams:
            return accelerator.usable_memory(self.device)
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return self.in_use() + int(fields["MemAvailable"].split()[0]) * 1024 // self.processes
