"""The commands of README.md and docs/getting-started.md, in their order, as a newcomer would type them.

Only what the pages leave to the reader is supplied: a model at `path/to/model`, a file `chats.jsonl`, `run.yaml` as
printed, and an end after a few steps.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, Block, blocks

SHORT = "--max_steps 3 --save_steps 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --progress plain"
WITHIN = 240  # seconds for one command on a busy machine


def commands(page: str) -> list[str]:
    """The `fullshard` commands of a page, in order."""
    found = []
    for block in blocks("console"):
        if block.page.name == page:
            lines = block.text.replace("\\\n", " ").splitlines()
            found += [line.removeprefix("$ ") for line in lines if line.startswith("$ fullshard ")]
    return found


def yaml_of(page: str) -> Block:
    (found,) = [block for block in blocks("yaml") if block.page.name == page]
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(ROOT / "quickstart" / "model")
    (tmp_path / "quickstart").mkdir()
    for name in ("model", "data", "lora.yaml"):
        (tmp_path / "quickstart" / name).symlink_to(ROOT / "quickstart" / name)
    with (ROOT / "quickstart" / "data" / "train.jsonl").open() as rows:
        (tmp_path / "chats.jsonl").write_text("".join(itertools.islice(rows, 60)))
    (tmp_path / "run.yaml").write_text(yaml_of("getting-started.md").text)
    return tmp_path


def do(command: str, place: Path) -> str:
    words = shlex.split(command)
    if words[1] == "sft":
        words += shlex.split(SHORT) if "--resume" not in words else [*shlex.split(SHORT)[2:], "--max_steps", "5"]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FULLSHARD_DEVICE": "cpu",
        "FULLSHARD_CACHE": str(place / "cache"), "XDG_CONFIG_HOME": str(place / "config"), "HF_HOME": str(place / "hf"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", *words[1:]],
        cwd=place, env=environment, capture_output=True, text=True, timeout=WITHIN, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "gemm_4bit_forward" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "getting-started.md"])
def test_the_commands_of_a_page_work_one_after_the_other(page, place):
    outputs = {command: do(command, place) for command in commands(page)}
    names = [command.split()[1] for command in outputs]
    assert names.count("sft") >= 2 and "chat" in names
    for folder in ("run", "run-4bit"):
        assert (place / folder / "adapter_model.safetensors").is_file()
    if page == "README.md":
        assert json.loads((place / "merged" / "config.json").read_text())["model_type"]
        assert list((place / "merged").glob("*.safetensors"))
    else:
        previews = [text for command, text in outputs.items() if "--preview" in command]
        assert previews and "of them trained" in previews[0]
        steps = [json.loads(line).get("step", 0) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        assert max(steps) == 5  # resumed after 3
