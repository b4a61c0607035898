"""Devices other than CUDA and the CPU: the notes about them, what they may use, and training on one that is real to
torch (`stand_in.cpp`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullshard.device import accelerator
from fullshard.device.device_kinds import KINDS, DeviceKind
from fullshard.distributed import runtime

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("found", "kind", "note"),
    [
        ("", "cpu", ""),
        ("cuda", "cuda", ""),
        ("xpu", "xpu", "Devices of type 'xpu' have not been tried"),
        ("mps", "cpu", "of type 'mps', which fullshard does not support, so the CPU is used. Supported types: cuda, "),
    ],
)
def test_an_accelerator_without_an_entry_or_a_run_is_noted(
    found: str, kind: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "reported_kind", lambda: found)
    assert accelerator.kind() == kind
    assert note in runtime.device_note() and bool(note) == bool(runtime.device_note())


def test_the_note_is_logged_once_when_the_run_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accelerator, "reported_kind", lambda: "mps")
    monkeypatch.setattr(runtime.get_logger(), "propagate", True)
    runtime.forget_warnings()
    try:
        for asked in ("cpu", None, None):
            runtime.use_spmd(device=asked)
            assert runtime.device().type == "cpu"
            assert sum("'mps'" in record.message for record in caplog.records) == (asked is None)
            runtime.shutdown()
    finally:
        runtime.forget_warnings()


def test_a_plain_entry_asks_for_nothing_that_only_cuda_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("xpu", 0)
    monkeypatch.setitem(KINDS, "xpu", DeviceKind("xccl"))
    assert accelerator.is_accelerator(device) and accelerator.pins(device)
    for ability in ("runs_triton", "runs_inductor", "adds_wide_products", "draws_by_offset", "computes_fp8"):
        assert not getattr(accelerator, ability)(device), ability
        with accelerator.meta_stands_for(torch.device("cuda")):
            assert getattr(accelerator, ability)(torch.device("meta")), ability


CUDA_ONLY = {
    "device/accelerator.py",  # locks host memory in place by the CUDA runtime
    "device/device_kinds.py",
    "distributed/groups.py",  # the variables of NCCL's own watchdog
    "launch/environment_report.py",  # versions
    "distributed/guide_names.py",  # an error names torch.cuda's function
}


def test_cuda_is_named_in_the_table_only() -> None:
    pattern = re.compile(r"""torch\.cuda\.\w|["']nccl["']|\.type == ["']cuda""")
    found = {
        str(file.relative_to(ROOT / "fullshard"))
        for file in (ROOT / "fullshard").rglob("*.py")
        for line in file.read_text().splitlines()
        if pattern.search(line) and not line.lstrip().startswith("#") and '"""' not in line
    }
    assert found <= CUDA_ONLY


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler")
def test_training_on_a_device_of_its_own(tmp_path: Path) -> None:
    """Two ranks, each on a device that torch knows through PrivateUse1, with its own backend: the losses of one CPU,
    with parameters on the device and on the host; saved and restored."""
    build = f"from tests.devices import stand_in; stand_in.build({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, timeout=600)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*launch, "-m", "tests.devices.program", str(tmp_path), str(tmp_path / "saved")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert said["device"] == "standin:0" and said["transport"] == "STAND_IN"
    assert said["plain"] == said["offload"] == pytest.approx(said["one CPU"], rel=1e-6)
    assert (said["plain lives on"], said["offload lives on"]) == (["standin"], ["cpu"])
    assert said["restored"] and said["x"] == [0, 1, 2, 3, 4, 5]
    assert 0 < said["allocated"] < said["peak"]
