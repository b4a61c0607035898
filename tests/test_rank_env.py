"""What is read from the launcher's variables, and what is chosen from it. No process group, no GPU."""

from __future__ import annotations

import pytest
import torch

from fullshard.config.errors import RuntimeSetupError
from fullshard.distributed.rank_env import Launch, choose_backend, choose_device, choose_init_timeout, read_launcher

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def without(*names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in {**TORCHRUN, **changed}.items() if name not in names}


@pytest.mark.parametrize(
    "env", [{}, {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, {"RANK": "0", "WORLD_SIZE": "1"}]
)
def test_one_process_needs_no_variables(env: dict[str, str]) -> None:
    assert read_launcher(env) == Launch(rank=0, world_size=1, local_rank=0, local_world_size=1, node_count=1)


def test_torchrun_is_taken_at_its_word() -> None:
    launch = read_launcher(TORCHRUN)
    assert launch == Launch(5, 8, 1, 4, node_count=2, master="node0:29500")
    assert not launch.one_node
    assert read_launcher(without(LOCAL_WORLD_SIZE="8")).one_node
    assert read_launcher(without(GROUP_WORLD_SIZE="3")).node_count == 3


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK=0 is"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but WORLD_SIZE=2 is"),
        ({"LOCAL_RANK": "0"}, "RANK is not set, but LOCAL_RANK=0 is"),
        (without("LOCAL_RANK"), "LOCAL_RANK is not set"),
        (without("LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set"),
        (without("MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without("MASTER_PORT"), "MASTER_PORT is not set"),
        (without(RANK="8"), "RANK=8 with WORLD_SIZE=8"),
        (without(RANK="-1"), "RANK=-1: expected at least 0"),
        (without(WORLD_SIZE="0"), "WORLD_SIZE=0: expected at least 1"),
        (without(WORLD_SIZE="many"), "WORLD_SIZE='many' is not an integer"),
        (without(MASTER_PORT="http"), "MASTER_PORT='http' is not an integer"),
        (without(LOCAL_RANK="4"), "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        (without(LOCAL_WORLD_SIZE="9"), "LOCAL_WORLD_SIZE=9, WORLD_SIZE=8"),
    ],
)
def test_partial_or_wrong_variables_are_named(env: dict[str, str], said: str) -> None:
    with pytest.raises(RuntimeSetupError, match="torchrun") as error:
        read_launcher(env)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("wanted", "local_rank", "gpus", "device"),
    [
        (None, 3, 0, "cpu"),
        (None, 3, 8, "cuda:3"),
        (None, 3, 2, "cuda:1"),
        ("", 0, 1, "cuda:0"),
        ("cpu", 0, 8, "cpu"),
        ("cuda", 1, 8, "cuda:1"),
    ],
)
def test_device(wanted: str | None, local_rank: int, gpus: int, device: str) -> None:
    assert choose_device(wanted, local_rank, gpus, "cuda") == torch.device(device)


def test_device_that_cannot_be() -> None:
    with pytest.raises(RuntimeSetupError, match="'mps' is not supported: expected 'cpu' or 'cuda'"):
        choose_device("mps", 0, 0)
    with pytest.raises(RuntimeSetupError, match="torch sees no GPU"):
        choose_device("cuda", 0, 0)
    with pytest.raises(RuntimeSetupError, match="'xpu' was requested, but torch sees no GPU of that type, only 'cuda'"):
        choose_device("xpu", 0, 8, "cuda")


def test_backend() -> None:
    assert choose_backend("cpu", own=True) == choose_backend("cpu", own=False) == "gloo"
    assert choose_backend("cuda", own=True) == "cpu:gloo,cuda:nccl"
    assert choose_backend("cuda", own=False) == "cpu:gloo,cuda:gloo"
    assert choose_backend("tpu", own=True) == "cpu:gloo,tpu:tpu_dist"
    with pytest.raises(RuntimeSetupError, match="Tensors on tpu devices are sent by tpu_dist only"):
        choose_backend("tpu", own=False)


def test_init_timeout() -> None:
    assert choose_init_timeout(None, {}) == 300
    assert choose_init_timeout(None, {"FULLSHARD_INIT_TIMEOUT": "1.5"}) == 1.5
    assert choose_init_timeout(7, {"FULLSHARD_INIT_TIMEOUT": "1.5"}) == 7
    for bad in ("soon", "0", "-3", "nan", "inf"):
        with pytest.raises(RuntimeSetupError, match=f"FULLSHARD_INIT_TIMEOUT='?{bad}.*number of seconds"):
            choose_init_timeout(None, {"FULLSHARD_INIT_TIMEOUT": bad})
    with pytest.raises(RuntimeSetupError, match="init_timeout=0: expected a positive number"):
        choose_init_timeout(0, {})
