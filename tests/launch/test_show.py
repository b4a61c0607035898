"""`fullshard show`: plans of models, checkpoints, runs and files; wrong input is one line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from fullshard import CheckpointManager
from fullshard.distributed import runtime
from fullshard.fsdp.plan import ShardingPlan
from tests.browser import Browser, find_browser
from tests.fsdp.programs import sharded
from tests.pool import ROOT, ranks
from tests.report.plans import make_plan
from tests.report.small_results import command
from tests.screen import screen
from tests.test_terminal import environment, on_a_terminal

MACHINE = ("--machine", "rtx4090", "--num_processes", "4", "--gpus_per_node", "2")


def facts_of(*words: str) -> dict[str, Any]:
    code, out, error = command("show", *words, "--json")
    assert code == 0, error
    return json.loads(out)


def write_config(place: Path) -> Path:
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(place)  # fmt: skip
    return place / "config.json"


def write_plan(place: Path, *what: Any) -> Path:
    file = place / "layout.json"
    file.write_text(make_plan(*what).to_json())
    return file


def test_a_model_is_planned_as_by_fullshard_plan(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    settings = (*MACHINE, "--use_peft_lora", "--lora_target_modules", "q_proj,v_proj", "--bf16")
    shown = facts_of(config, *settings)
    _, out, error = command("plan", config, *settings, "--json")
    planned = json.loads(out)
    assert {name: size for unit in shown["units"] for name in unit["names"] for size in [unit["shard_bytes"]]} == {
        unit["name"]: unit["shard"] for unit in planned["units"]
    }, error
    assert shown["memory"]["moments"] == planned["memory"]["moments"]
    assert shown["memory"]["limit"] == planned["machine"]["device_memory"]
    assert shown["memory"]["host"] == planned["memory"]["host"]
    assert shown["mesh"]["axes"] == planned["mesh"] == {"fsdp": 4} and shown["mesh"]["ranks_per_node"] == 2


@ranks(2)
def test_a_checkpoint_holds_its_plan(tmp_path: Path) -> None:
    model = sharded("llama")
    run = tmp_path / "run"
    manager = CheckpointManager(run / "checkpoints", save_interval=1)
    manager.save(3, {"model": model})
    manager.save(7, {"model": model})
    if not runtime.is_main():
        return
    newest = run / "checkpoints" / "step-7"
    by_checkpoint = facts_of(str(newest))
    for place in (run, run / "checkpoints"):
        assert facts_of(str(place)) == by_checkpoint
    assert by_checkpoint["title"] == str(newest) and by_checkpoint["shard_bytes"] == model.plan.shard_bytes
    assert [n for unit in by_checkpoint["units"] for n in unit["names"]] == [unit.name for unit in model.plan.units]
    assert "checkpoint does not tell" in by_checkpoint["memory"]["notes"][0]
    assert facts_of(str(newest), "--gpus_per_node", "1")["mesh"]["ranks_per_node"] == 1

    (run / "settings.json").write_text(json.dumps({"settings": {}}))
    estimate = {
        "machine": {"gpus_per_node": 1, "device_memory": 10**9, "host_memory": 10**10},
        "memory": {"moments": {"load": {"shards": 5}}, "timeline": [["loss", 5]], "reserved": 1, "host": {"shards": 2}},
    }  # fmt: skip
    (run / "plan.json").write_text(json.dumps(estimate))
    known = facts_of(str(run))
    assert known["memory"]["moments"] == {"load": {"shards": 5}} and known["memory"]["limit"] == 10**9
    assert known["mesh"]["ranks_per_node"] == 1
    (run / "plan.json").write_text("{")
    assert facts_of(str(run))["memory"] == by_checkpoint["memory"]

    code, _, error = command("show", str(newest), "--out", str(newest / "layout.svg"))
    assert code == 2 and "inputs are never written to" in error and not (newest / "layout.svg").exists()
    shutil.rmtree(run / "checkpoints")
    code, _, error = command("show", str(run))
    assert code == 2 and "a run without checkpoints" in error


def test_files_are_written_whole(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "lora", {"fsdp": 2})
    for suffix, begins in ((".svg", "<svg "), (".HTML", "<!doctype html>")):
        out = tmp_path / f"layout{suffix}"
        code, said, error = command("show", str(plan), "--out", str(out))
        assert code == 0 and out.read_text().startswith(begins) and str(out) in said, error
    ET.fromstring((tmp_path / "layout.svg").read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layout.HTML", "layout.json", "layout.svg"]
    code, said, _ = command("show", str(plan), "--out", str(tmp_path / "layout.svg"), "--json")
    assert code == 0 and json.loads(said)["shard_bytes"] == ShardingPlan.from_json(plan.read_text()).shard_bytes


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    plan, config = str(write_plan(tmp_path)), str(write_config(tmp_path))
    files = {
        "broken.json": "{",
        "list.json": "[1]",
        "other.json": '{"a": 1}',
        "half.json": '{"units": [], "strategy": 3}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    there = {name: str(tmp_path / name) for name in files}
    cases = {
        (plan, "--out", f"{tmp_path}/x.pdf"): "expected a file that ends in .svg or .html",
        (plan, "--out", f"{tmp_path}/no/x.svg"): "does not exist",
        (plan, "--ranks", "9"): "from 0 to 3",
        (plan, "--units", "nothing"): "no unit is named 'nothing'",
        (plan, "--bf16"): "has a plan already",
        (plan, "--gpus_per_node", "0"): "expected 1 or more",
        (plan, "--unitz", "all"): "--unitz",
        (there["half.json"],): "no sharding plan that can be read",
        (there["broken.json"],): "broken.json",
        (there["list.json"],): "list.json",
        (there["other.json"],): "other.json",
        ("./nowhere", *MACHINE): "nowhere",
        (config, "--machine", "abacus"): "abacus",
        (config, *MACHINE, "--units", "layers"): "no unit is named 'layers'",
    }
    for words, part in cases.items():
        code, out, error = command("show", *words)
        assert (code, out) == (2, "") and part in error, (words, error)
        assert len(error.splitlines()) == 1 and error.startswith("fullshard: "), error
    (tmp_path / "x.svg").mkdir()
    code, _, error = command("show", plan, "--out", f"{tmp_path}/x.svg")
    assert code == 2 and "is a folder" in error
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        code, _, error = command("show", plan, "--out", f"{tmp_path}/closed/x.svg")
        assert code == 2 and "cannot be written" in error


def test_help_names_every_flag() -> None:
    code, out, _ = command("show", "--help")
    assert code == 0 and all(flag in out for flag in ("--out", "--units", "--ranks", "--json", "--gpus_per_node"))
    assert command("show")[1] == out


@pytest.mark.slow
def test_a_terminal_and_a_pipe(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fullshard", "show", str(write_plan(tmp_path, "full", {"fsdp": 2}))]
    code, written = on_a_terminal(words, tmp_path)
    lines = screen(written, 80)
    assert code == 0 and "\x1b[" in written and max(map(len, lines)) <= 80
    piped = subprocess.run(words, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout and piped.stderr == ""
    assert not [line for line in piped.stdout.splitlines() if line != line.rstrip()]
    for name in ("model.embed_tokens.weight", "model.layers.[0–2] × 3", "mlp.down_proj.weight"):
        assert name in piped.stdout and any(name in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="needs a browser")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    out = tmp_path / "layout.html"
    assert command("show", str(write_plan(tmp_path, "odd", {"fsdp": 2})), "--out", str(out))[0] == 0
    with Browser(str(find_browser())) as browser, contextlib.ExitStack() as open_pages:
        for width, dark in ((1280, False), (390, True)):
            page = open_pages.enter_context(browser.page(width, 900, dark=dark))
            page.open(out)
            page.wait("document.body.dataset.drawn === 'true'")
            assert not page.problems and not page.requests
            assert page.run("document.querySelectorAll('img').length") == 0
            assert page.run("document.querySelectorAll('.chart svg').length") == 2
            assert page.run("document.documentElement.scrollWidth") <= width
            # The rows of the picture are one stop of the keyboard; arrows move inside, and each says what it is.
            page.run("document.querySelector('.plan g[tabindex=\"0\"]').focus()")
            page.press("ArrowDown")
            assert page.run("document.activeElement.getAttribute('data-parameter')").startswith("<img")
            tip = page.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
            assert "5 × 3" in tip and "onerror=alert(1)" in tip
            page.press("Escape")
            assert page.run("document.getElementById('tip').hidden")
