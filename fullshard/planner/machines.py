"""Machines to plan for: what a device holds, and how fast it computes and communicates.

Plain numbers; torch is imported only to look at the devices that are here. docs/planning.md has the sources.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.config.byte_size import parse_size
from fullshard.config.errors import ConfigError
from fullshard.config.options import nearest, option

GIB = 1024**3
HERE = "here"
"""The name of the machine that this process runs on."""


@dataclass(frozen=True)
class Machine:
    """The devices of a run, in nodes of equal size. Rates are per device and second."""

    name: str
    kind: str
    """The type of device that the model runs on: "cuda" or "cpu"."""
    num_processes: int
    """Devices, and so ranks, in all nodes."""
    gpus_per_node: int
    """Devices in one node."""
    device_memory: int
    """Bytes of one device that its driver leaves to processes."""
    host_memory: int
    """Bytes of host memory of one node."""
    flops: Mapping[str, float]
    """Dense matrix products by dtype: "bfloat16", "float16", "float32", "tf32", "float8". A dtype that is missing is
    not supported by the hardware."""
    memory_bandwidth: float
    """Bytes that a device reads and writes in its own memory."""
    node_link: float
    """Bytes that a device sends to others in its node, in one direction."""
    network: float
    """Bytes that a device sends to other nodes, in one direction: the node's network divided by its devices."""
    host_link: float
    """Bytes between a device and the host's memory, in one direction."""
    node_devices: int = 0
    """Devices that such a node has, of which a run may use fewer; 0: as many as it uses."""

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.num_processes // self.gpus_per_node

    @property
    def shares_host_memory(self) -> bool:
        """Whether what a device allocates is host memory."""
        return self.kind == "cpu"

    def with_more_devices(self, most: int) -> Iterator[Machine]:
        """The machines with more devices than this one, up to `most`: the rest of its node, then more nodes."""
        node = max(self.node_devices, self.gpus_per_node)
        if self.nodes == 1:
            for count in range(self.num_processes + 1, min(node, most) + 1):
                yield replace(self, num_processes=count, gpus_per_node=count)
        else:
            node = self.gpus_per_node
        for nodes in range(self.nodes + 1, most // node + 1):
            yield replace(self, num_processes=nodes * node, gpus_per_node=node)

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes of {self.gpus_per_node}" if self.nodes > 1 else ""
        return f"{self.num_processes} × {self.name}{nodes}"


@dataclass(frozen=True)
class MachineOptions:
    """The machine that a run is planned for."""

    machine: str = option(HERE, metavar="here, or a name such as h100-80gb")
    """The device to plan for; here is the machine that the command runs on. docs/planning.md lists the names."""
    num_processes: int | None = None
    """Number of devices in all nodes. If not set: one device, or those that are here."""
    gpus_per_node: int | None = None
    """Devices in a node. If not set: what such machines usually have."""
    device_memory: str | None = option(None, metavar="a size such as 80GiB")
    """Memory of one device that processes can use. Without a machine and a GPU here, the nearest named GPU is meant."""
    host_memory: str | None = option(None, metavar="a size such as 512GiB")
    """Host memory of one node."""
    network_bandwidth: str | None = option(None, metavar="a size per second such as 50GB")
    """What one device sends to other nodes in a second: the node's network divided by its devices."""


# --- named machines -----------------------------------------------------------------------------------------------


def _gpu(
    name: str, memory: float, tera: tuple[float, float, float, float], bandwidth: float, node_link: float,
    network: float, host_link: float, per_node: int = 8, host: int = 1024, bf16: bool = True,
) -> Machine:  # fmt: skip
    """A machine of one GPU: memory in GiB, TFLOP/s (16-bit, fp8, TF32, fp32; 0 if it has none), GB/s, host GiB."""
    half, fp8, tf32, fp32 = tera
    rates = {"bfloat16": half if bf16 else 0, "float16": half, "float8": fp8, "tf32": tf32, "float32": fp32}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate}
    return Machine(
        name, "cuda", 1, per_node, int(memory * GIB), host * GIB, flops, bandwidth * 1e9, node_link * 1e9,
        network * 1e9, host_link * 1e9, per_node,
    )  # fmt: skip


# Memory is what torch sees of it (`torch.cuda.mem_get_info`, and the "total capacity" in out-of-memory errors), the
# least that was seen where drivers differ. Links are those of the datasheets in one direction: NVLink, Infinity Fabric
# or PCIe; half of it for GeForce cards, which have no peer access and send through host memory.
PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0
_GPUS = (
    #     name          GiB    16-bit fp8    TF32   fp32   memory  node   network host link
    _gpu("b200",        178.3, (2250, 4500, 1100, 80.0),   8000, 900.0, 50.0, PCIE5, host=2048),
    _gpu("h200",        139.8, (989.4, 1978.9, 494.7, 66.9), 4800, 450.0, 50.0, PCIE5, host=2048),
    _gpu("h100-80gb",   79.1,  (989.4, 1978.9, 494.7, 66.9), 3350, 450.0, 50.0, PCIE5, host=2048),
    _gpu("h100-pcie",   79.1,  (756, 1513, 378, 51.0),     2000, PCIE5, 12.5, PCIE5),
    _gpu("h100-nvl",    93.0,  (835, 1671, 417, 60.0),     3938, 300.0, 12.5, PCIE5, per_node=2),
    _gpu("a100-80gb",   79.1,  (312, 0, 156, 19.5),        2039, 300.0, 25.0, PCIE4),
    _gpu("a100-40gb",   39.4,  (312, 0, 156, 19.5),        1555, 300.0, 25.0, PCIE4),
    _gpu("l40s",        44.3,  (362.05, 733, 183, 91.6),   864, PCIE4, 6.25, PCIE4, host=768),
    _gpu("l4",          22.0,  (121, 242.5, 60, 30.3),     300, PCIE4, 3.1, PCIE4, host=384),
    _gpu("a10g",        22.0,  (70, 0, 35, 31.2),          600, PCIE4, 1.5, PCIE4, host=384),
    _gpu("rtx-a6000",   47.4,  (154.8, 0, 77.4, 38.7),     768, PCIE4, 1.25, PCIE4, host=256),
    _gpu("rtx6000-ada", 47.4,  (364.2, 728.5, 182.1, 91.1), 960, PCIE4, 1.25, PCIE4, host=256),
    _gpu("rtx5090",     31.3,  (209.5, 419, 104.8, 104.8), 1792, PCIE5 / 2, 1.25, PCIE5, host=256),
    _gpu("rtx4090",     23.5,  (165.2, 330.3, 82.6, 82.6), 1008, PCIE4 / 2, 1.25, PCIE4, host=256),
    _gpu("rtx3090",     23.5,  (71, 0, 35.6, 35.6),        936, PCIE4 / 2, 1.25, PCIE4, host=256),
    _gpu("v100-32gb",   31.7,  (125, 0, 0, 15.7),          900, 150.0, 1.5, PCIE3, host=768, bf16=False),
    _gpu("v100-16gb",   15.7,  (125, 0, 0, 15.7),          900, 150.0, 1.5, PCIE3, host=768, bf16=False),
    _gpu("t4",          14.5,  (65, 0, 0, 8.1),            320, PCIE3, 1.5, PCIE3, host=192, per_node=4, bf16=False),
    _gpu("mi300x",      191.6, (1307.4, 2614.9, 653.7, 163.4), 5300, 448.0, 50.0, PCIE5, host=2048),
)  # fmt: skip
_CPU = Machine(
    "cpu", "cpu", 1, 1, 64 * GIB, 64 * GIB,
    flops={"float32": 1e12, "bfloat16": 1e12},
    memory_bandwidth=1e11, node_link=2e9, network=1.25e9, host_link=1e11,
)  # fmt: skip
MACHINES = {machine.name: machine for machine in (*_GPUS, _CPU)}
"""Machines of one device by name, with the number of devices that such a node usually has."""
OTHER_NAMES = {"h100": "h100-80gb", "h100-sxm": "h100-80gb", "a100": "a100-80gb", "v100": "v100-32gb", "a10": "a10g",
               "a6000": "rtx-a6000", "rtxa6000": "rtx-a6000", "4090": "rtx4090", "3090": "rtx3090",
               "5090": "rtx5090"}  # fmt: skip


def find_machine(options: MachineOptions) -> Machine:
    """The machine that the options describe; `ConfigError` for unknown names and impossible numbers."""
    machine = named_machine(options.machine) if names_one(options) else stand_in(options) or this_machine()
    count, per_node = _counts(machine, options.num_processes, options.gpus_per_node)
    node = per_node if options.gpus_per_node or machine.shares_host_memory else machine.gpus_per_node
    changed: dict[str, Any] = {"num_processes": count, "gpus_per_node": per_node, "node_devices": node}
    for field, name in (("device_memory", "device_memory"), ("host_memory", "host_memory"),
                        ("network", "network_bandwidth")):  # fmt: skip
        if (value := getattr(options, name)) is not None:
            changed[field] = _size(name, value)
    return _divided(replace(machine, **changed), options) if machine.shares_host_memory else replace(machine, **changed)


def names_one(options: MachineOptions) -> bool:
    """Whether the options have a machine's name."""
    return options.machine.strip().lower() != HERE


def stand_in(options: MachineOptions) -> Machine | None:
    """The named GPU that a device of this memory is taken for, if neither a name is given nor a GPU is here: the one
    with the closest memory, the slowest where several have it."""
    from fullshard.device import accelerator

    if names_one(options) or options.device_memory is None or accelerator.count():
        return None
    memory = _size("device_memory", options.device_memory)
    return min(_GPUS, key=lambda gpu: (abs(math.log(gpu.device_memory / memory)), gpu.flops["float16"]))


def _divided(machine: Machine, options: MachineOptions) -> Machine:
    """The ranks of a node without GPUs share its memory and its cores."""
    ranks = machine.gpus_per_node
    return replace(
        machine,
        device_memory=machine.device_memory if options.device_memory else machine.host_memory // ranks,
        flops={dtype: rate / ranks for dtype, rate in machine.flops.items()},
        memory_bandwidth=machine.memory_bandwidth / ranks,
    )


def named_machine(name: str) -> Machine:
    """One device of a named machine."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = OTHER_NAMES.get(key, key)
    joined = {known.replace("-", ""): known for known in MACHINES}
    machine = MACHINES.get(key) or MACHINES.get(joined.get(key.replace("-", ""), ""))
    if machine is None:
        hint = nearest(key, (*MACHINES, *OTHER_NAMES)) or f"; the names are {HERE}, {', '.join(MACHINES)}."
        raise ConfigError(
            f"machine is {name!r}{hint} For another device, give the name of one with the same speed, and its memory "
            f"with device_memory."
        )
    return machine


def _counts(machine: Machine, num_processes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """The number of devices in all nodes, and in one."""
    for name, value in (("num_processes", num_processes), ("gpus_per_node", gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected 1 or more.")
    count = num_processes or gpus_per_node or machine.num_processes
    per_node = gpus_per_node or (count if machine.shares_host_memory else min(count, machine.gpus_per_node))
    if count % per_node:
        raise ConfigError(
            f"num_processes is {count}, which is no multiple of {per_node} devices in a node (gpus_per_node); give "
            f"numbers that fill every node."
        )
    return count, per_node


def _size(name: str, value: str | int) -> int:
    try:
        return parse_size(str(value))
    except ValueError:
        example = "50GB" if name == "network_bandwidth" else "80GiB"
        raise ConfigError(f"{name} is {value!r}; expected a size with its unit, such as {example}.") from None


# --- the machine that is here --------------------------------------------------------------------------------------


def this_machine() -> Machine:
    """The devices of this machine. GPUs whose name is known have the rates of their table row; others, and CPUs, are
    measured."""
    import torch

    from fullshard.device import accelerator

    host = total_host_memory()
    if not (count := accelerator.count()):
        return replace(_CPU, device_memory=host, host_memory=host, **_measured(torch.device("cpu")))
    device, name = accelerator.current(), accelerator.names()[0]
    memory = accelerator.total_memory(device)
    known = recognize(name, memory)
    machine = known or replace(MACHINES["rtx3090"], name=name, **_measured(device))
    return replace(machine, num_processes=count, gpus_per_node=count, device_memory=memory, host_memory=host)


def recognize(device_name: str, memory: int) -> Machine | None:
    """The named machine of a device's own name, such as `NVIDIA A100-SXM4-80GB`; the one with the closest memory where
    several fit."""
    words = re.sub(r"[^a-z0-9]", "", device_name.lower())
    models = {known: known.replace("-", "") if known.startswith("rtx") else known.split("-")[0] for known in MACHINES}
    fitting = [known for known, model in models.items() if known != "cpu" and model in words]
    longest = max((len(models[known]) for known in fitting), default=0)
    fitting = [known for known in fitting if len(models[known]) == longest]
    if "pcie" in words and "h100-pcie" in fitting:
        return MACHINES["h100-pcie"]
    off = {known: abs(math.log(MACHINES[known].device_memory / memory)) for known in fitting}
    return MACHINES[min(off, key=lambda known: off[known])] if off else None


def total_host_memory() -> int:
    """Bytes of memory that this machine, or the container around this process, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue  # no such file, or `max`
    return total


def _measured(device: Any) -> dict[str, Any]:
    """Rates of a device that has no row in the table, measured in a fraction of a second."""
    import torch

    from fullshard.device import accelerator

    size = 4096 if accelerator.is_accelerator(device) else 512
    flops = {}
    for dtype in (torch.float32, torch.bfloat16, *([torch.float16] if size == 4096 else [])):
        a = torch.ones(size, size, dtype=dtype, device=device)
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / _seconds(lambda a=a: a @ a, device)
    values = torch.ones(2**24 if size == 4096 else 2**22, device=device)
    moved = 2 * values.nbytes / _seconds(values.clone, device)
    return {"flops": flops, "memory_bandwidth": moved}


def _seconds(work: Any, device: Any) -> float:
    """The time of one call, the best of three after one to warm up."""
    import time

    from fullshard.device import accelerator

    times = []
    for _ in range(4):
        accelerator.synchronize(device)
        began = time.perf_counter()
        work()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return max(min(times[1:]), 1e-7)
