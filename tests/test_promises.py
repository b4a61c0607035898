"""The promises listed in docs/testing.md: each names tests that exist, and those that no other file holds are here."""

from __future__ import annotations

import ast
import gc
import hashlib
import io
import os
import re
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import fullshard
from fullshard.distributed import progress, runtime
from fullshard.fsdp import FSDPv2, always_wrap_policy
from tests.fsdp.programs import mesh_for
from tests.pool import ranks
from tools import run_tests
from tools.run_tests import check_list, parts

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "testing.md"


# --- the map ----------------------------------------------------------------------------------------------------------


def promises() -> dict[int, list[str]]:
    """The tests that hold each promise, by its number."""
    section = PAGE.read_text().partition("## Promises\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", section, re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in rows}


def exists(name: str) -> bool:
    file, _, test = name.partition("::")
    path = ROOT / "tests" / file.removeprefix("tests/")
    if not path.is_file():
        return False
    functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    return not test or test.partition("[")[0] in functions


def test_every_promise_names_a_test_that_exists():
    found = promises()
    assert sorted(found) == list(range(1, len(found) + 1)) and len(found) >= 27
    assert all(found.values()), [number for number, tests in found.items() if not tests]
    absent = [f"{number}: {name}" for number, tests in found.items() for name in tests if not exists(name)]
    assert not absent, absent
    assert not exists("fsdp/test_parity.py::test_nothing") and not exists("nowhere.py")


def test_what_make_check_runs_exists():
    listed = check_list()
    assert [name for name in listed if not exists(name)] == []
    rooms = {Path(name.partition("::")[0]).parent.name for name in listed}
    assert rooms >= {"checkpoint", "data", "fsdp", "launch", "parallel", "quant", "spmd", "sft", "weights"}


def test_parts_of_the_whole_run_are_all_tests():
    files = set((ROOT / "tests").rglob("test_*.py"))
    covered = [path for targets in parts().values() for target in targets for path in _files(ROOT / target)]
    assert sorted(covered) == sorted(files), "a file in no part, or in two"


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    ran = []

    def run(name, targets, options):
        ran.append((name, options))
        return name != "data", f"{name} was run"

    monkeypatch.setattr(run_tests, "run", run)
    assert run_tests.main(["", "-x"]) == 1
    assert [name for name, _ in ran] == list(parts()) and all(options == ["-x"] for _, options in ran)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "failed: data" and printed[-1 - len(ran) : -1] == [f"{name} was run" for name, _ in ran]
    assert run_tests.main(["fsdp,rest"]) == 0 and [name for name, _ in ran[-2:]] == ["fsdp", "rest"]
    assert run_tests.main(["fdsp"]) == 2
    assert "there is no part fdsp; there are activations, checkpoint, data" in capsys.readouterr().out


def _files(target: Path) -> list[Path]:
    return [target] if target.is_file() else list(target.glob("test_*.py"))


# --- resuming ---------------------------------------------------------------------------------------------------------


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_memory() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs a kernel that lets a process reset its peak memory")


@ranks(2)
def test_resuming_reads_a_rank_s_own_slices_and_takes_no_more_memory_than_training(tmp_path):
    """Parameters and both moments: a rank reads its shards, and never has more in memory than a step has."""
    model = FSDPv2(Wide(), mesh_for("FULL_SHARD"), auto_wrap_policy=always_wrap_policy)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    fullshard.save_state(tmp_path / "earlier", model=model, optimizer=optimizer)  # imports, threads and their arenas:
    fullshard.load_state(tmp_path / "earlier", model=model, optimizer=optimizer)  # once for the process, not per state
    forget_peak()
    for _ in range(2):
        train(model, optimizer)
    in_training = peak_memory()
    fullshard.save_state(tmp_path / "saved", model=model, optimizer=optimizer)
    expected = moments(optimizer)
    own = 3 * sum(p.to_local().numel() * 4 for p in model.parameters())
    whole = 3 * 12 * 1024 * 1024 * 4
    optimizer.state.clear()
    forget_peak()
    read, plain = 0, os.preadv

    def counting(handle, buffers, offset, *more):
        nonlocal read
        count = plain(handle, buffers, offset, *more)
        read += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        fullshard.load_state(tmp_path / "saved", model=model, optimizer=optimizer)
    in_restoring = peak_memory()
    assert moments(optimizer) == expected and len(expected) == 24
    assert own == whole // 2 and own <= read < 1.02 * own, (own, read)
    assert in_restoring < in_training + 2**24, (in_training, in_restoring)  # the whole state: 9 × 2**24


def moments(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of this rank's part of every moment: copies would count as memory of the restoring."""
    return {
        f"{i}.{key}": hashlib.sha256(value.to_local().numpy()).hexdigest()
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if key != "step"
    }


# --- loading ----------------------------------------------------------------------------------------------------------


@ranks(1)
def test_loading_shows_how_far_it_is_and_how_fast(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        console = Console(file=shown, force_terminal=True, width=120)
        patch.setattr(progress, "Terminal", lambda **options: console)
        fullshard.load_pretrained(tmp_path / "model")
        assert "loading" in shown.getvalue() and re.search(r"\d+(\.\d+)?/\d+(\.\d+)? [kM]B", shown.getvalue())
        with progress.Bar("loading", 8 * 10**9) as bar:
            for done in (10**9, 2 * 10**9, 4 * 10**9):
                bar.at(done)
                time.sleep(0.01)
            bar._bar.refresh()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.getvalue())
    assert re.search(r"4\.0/8\.0 GB +[\d.]+ [GT]B/s", plain), plain


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(1, 2)
def test_clipping_with_offloaded_shards(strategy):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).double()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8, dtype=torch.float64)
    plain(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    model = FSDPv2(model, mesh_for(strategy), strategy=strategy, cpu_offload=True)
    size, rank = 4 // runtime.world_size(), runtime.rank()
    model(x[rank * size : rank * size + size]).square().mean().backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.01).cpu(), expected, rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-15)
