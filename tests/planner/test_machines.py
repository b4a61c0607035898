"""Machines to plan for: names, numbers, and what cannot be one."""

import math
from pathlib import Path

import pytest

from fullshard.config.byte_size import parse_size
from fullshard.config.errors import ConfigError
from fullshard.planner.machines import GIB, MACHINES, MachineOptions, find_machine, recognize, stand_in, this_machine


@pytest.mark.parametrize("name", MACHINES)
def test_every_named_machine_has_all_its_numbers(name):
    machine = find_machine(MachineOptions(machine=name))
    speeds = (machine.memory_bandwidth, machine.node_link, machine.network, machine.host_link, *machine.flops.values())
    assert all(math.isfinite(speed) and speed > 1e8 for speed in speeds)
    assert machine.flops["float32"] <= machine.flops.get("tf32", math.inf)
    assert machine.flops.get("bfloat16", 0) <= machine.flops.get("float8", math.inf)
    assert machine.num_processes == machine.nodes == 1
    assert GIB < machine.device_memory <= machine.host_memory


@pytest.mark.parametrize(
    ("name", "marketed"), [(name, name.rsplit("-", 1)[-1]) for name in MACHINES if name.endswith("gb")]
)
def test_drivers_leave_less_than_what_is_sold(name, marketed):
    sold = int(marketed.removesuffix("gb")) * GIB
    assert 0.97 * sold < MACHINES[name].device_memory < sold


@pytest.mark.parametrize(
    ("given", "devices", "per_node", "nodes"),
    [
        ({}, 1, 1, 1),
        ({"num_processes": 4}, 4, 4, 1),
        ({"num_processes": 8}, 8, 8, 1),
        ({"num_processes": 64}, 64, 8, 8),
        ({"num_processes": 8, "gpus_per_node": 2}, 8, 2, 4),
        ({"gpus_per_node": 4}, 4, 4, 1),
    ],
)
def test_devices_and_nodes(given, devices, per_node, nodes):
    machine = find_machine(MachineOptions(machine="h100-80gb", **given))
    assert (machine.num_processes, machine.gpus_per_node, machine.nodes) == (devices, per_node, nodes)


def test_numbers_that_are_given_replace_those_of_the_name():
    options = MachineOptions("RTX 4090", 2, None, "16 GiB", "40GB", "3GB")
    machine = find_machine(options)
    assert (machine.name, machine.device_memory, machine.host_memory) == ("rtx4090", 16 * GIB, 40 * 1000**3)
    assert machine.network == 3e9


@pytest.mark.parametrize(
    ("memory", "name"), [("80GiB", "a100-80gb"), ("40GB", "a100-40gb"), ("24GiB", "rtx3090"), ("1TiB", "mi300x")]
)
def test_memory_alone_describes_a_gpu_where_there_is_none(monkeypatch, memory, name):
    monkeypatch.setattr("fullshard.device.accelerator.count", lambda: 0)
    options = MachineOptions(device_memory=memory, num_processes=8)
    machine, like = find_machine(options), MACHINES[name]
    assert stand_in(options) == like
    assert (machine.kind, machine.flops, machine.host_memory) == ("cuda", like.flops, like.host_memory)
    assert (machine.num_processes, machine.device_memory) == (8, parse_size(memory))
    assert find_machine(MachineOptions("cpu", device_memory=memory)).kind == "cpu"
    assert find_machine(MachineOptions(num_processes=2)).kind == "cpu"
    monkeypatch.setattr("fullshard.device.accelerator.count", lambda: 1)
    assert stand_in(options) is None


def test_ranks_without_gpus_share_a_node():
    one, four = (find_machine(MachineOptions("cpu", count, host_memory="64GiB")) for count in (1, 4))
    assert (four.nodes, four.device_memory, four.host_memory) == (1, 16 * GIB, 64 * GIB)
    assert four.flops["float32"] == one.flops["float32"] / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MachineOptions("h1000"), "machine is 'h1000'; did you mean h100"),
        (MachineOptions("abacus"), "the names are here, b200, h200"),
        (MachineOptions("h200", num_processes=0), "num_processes is 0; expected 1 or more"),
        (MachineOptions("h200", num_processes=-8), "num_processes is -8; expected 1 or more"),
        (MachineOptions("h200", gpus_per_node=0), "gpus_per_node is 0; expected 1 or more"),
        (MachineOptions("h200", num_processes=8, gpus_per_node=3), "8, which is no multiple of 3 devices in a node"),
        (MachineOptions("h200", num_processes=12), "12, which is no multiple of 8 devices in a node"),
        (MachineOptions("h200", device_memory="80"), "device_memory is '80'; expected a size with its unit"),
        (MachineOptions("h200", device_memory="-80GiB"), "device_memory is '-80GiB'; expected a size"),
        (MachineOptions("h200", host_memory="0GiB"), "host_memory is '0GiB'; expected a size"),
        (MachineOptions("h200", host_memory="much"), "host_memory is 'much'; expected a size"),
        (MachineOptions("h200", network_bandwidth="fast"), "such as 50GB"),
    ],
)
def test_what_cannot_be_a_machine_is_one_clear_error(options, message):
    with pytest.raises(ConfigError) as error:
        find_machine(options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79, "h100-pcie"),
        ("NVIDIA H100 NVL", 93, "h100-nvl"),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA L40S", 44, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA RTX A6000", 48, "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "rtx6000-ada"),
        ("Tesla V100-SXM2-16GB", 16, "v100-16gb"),
        ("Tesla T4", 15, "t4"),
        ("AMD Instinct MI300X", 192, "mi300x"),
    ],
)
def test_devices_are_recognized_by_their_own_name(device, gib, name):
    found = recognize(device, gib * GIB)
    assert found is not None and found.name == name


def test_an_unknown_device_is_not_mistaken_for_another():
    assert recognize("NVIDIA A2", 16 * GIB) is None


def test_the_documentation_has_the_same_numbers():
    text = (Path(__file__).parents[2] / "docs/planning.md").read_text()
    lines = text[text.index("## Machines") :].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    found = {row[0].strip("`"): row[1:] for row in rows[: len(MACHINES) - 1]}
    assert found.keys() == MACHINES.keys() - {"cpu"}
    for name, (memory, half, fp8, bandwidth, inside, across, to_host, devices, host) in found.items():
        machine = MACHINES[name]
        assert memory == f"{machine.device_memory / GIB:.1f} GiB"
        assert float(half.split()[0].replace(",", "")) == pytest.approx(machine.flops["float16"] / 1e12, abs=0.5)
        assert ("(no bf16)" in half) == ("bfloat16" not in machine.flops)
        assert (fp8 == "–") == ("float8" not in machine.flops)
        speeds = (machine.memory_bandwidth, machine.node_link, machine.network, machine.host_link)
        shown = [float(text.replace(",", "")) for text in (bandwidth, inside, across, to_host)]
        assert shown == pytest.approx([speed / 1e9 for speed in speeds], rel=1e-3)
        assert (int(devices), host) == (machine.gpus_per_node, f"{machine.host_memory // GIB:,} GiB")


def test_this_machine():
    machine = this_machine()
    assert machine.device_memory > GIB / 2
    assert machine.flops["float32"] > 1e8
    assert machine.memory_bandwidth > 1e7
