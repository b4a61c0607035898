"""The kinds of accelerators that the torch engine runs on: one entry per device type of torch.

An entry says what the engine may use on such a device beyond what it asks of every device (docs/devices.md); where an
ability is missing, the engine does the same in plain torch operations. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceKind:
    """What the devices of one type have."""

    backend: str
    """The torch.distributed backend that sends their tensors."""
    tested: bool = False
    """Whether fullshard was run on one."""
    pinned: bool = True
    """Copies from and to page-locked host memory run beside compute."""
    registers_memory: bool = False
    """Ordinary host memory can be page-locked in place, by the CUDA runtime."""
    gloo: bool = False
    """Gloo sends their tensors too, through host memory: ranks can share a device."""
    aborts: bool = False
    """The backend's communicators can be aborted when a rank is lost."""
    triton: bool = False
    """The kernels of this package run: they are written in Triton and tuned for this kind."""
    inductor: bool = False
    """torch's compiler and flex attention are used without being asked for."""
    wide_products: bool = False
    """A product of narrow matrices can be added to a wider one without rounding (`torch.addmm` with `out_dtype`)."""
    random_offsets: bool = False
    """The state of the random generator is a seed and an offset, so each shard can draw its part of one stream."""
    fp8_from: tuple[int, int] | None = None
    """The compute capability from which on matrices are multiplied in fp8."""
    rounding: int = 1
    """Bytes that the allocator rounds sizes up to."""
    files: tuple[str, ...] = ()
    """Patterns in /dev: without such a file a Linux machine has no such device, and torch is not imported to look."""
    visible: str = ""
    """The environment variable that selects devices by number."""


KINDS: dict[str, DeviceKind] = {
    "cuda": DeviceKind(
        "nccl", tested=True, registers_memory=True, gloo=True, aborts=True, triton=True, inductor=True,
        wide_products=True, random_offsets=True, fp8_from=(8, 9), rounding=512, files=("nvidia[0-9]*", "kfd"),
        visible="CUDA_VISIBLE_DEVICES",
    ),
    "xpu": DeviceKind("xccl", files=("dri/renderD*",), visible="ZE_AFFINITY_MASK"),
    "npu": DeviceKind("hccl", files=("davinci[0-9]*",), visible="ASCEND_RT_VISIBLE_DEVICES"),
    "tpu": DeviceKind("tpu_dist", pinned=False, files=("accel[0-9]*", "vfio/[0-9]*"), visible="TPU_VISIBLE_CHIPS"),
}  # fmt: skip
"""Device types with an entry. To support another one, add it here and run `make test-gpu` on it."""
