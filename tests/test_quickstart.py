"""The quickstart: its data can be made again, its test questions are new, and its run teaches what it claims to."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.distributed import runtime
from fullshard.sft.cli_args import read_yaml
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from quickstart import data, quiz
from quickstart.world import facts
from tests.pool import ROOT, ranks

HERE = ROOT / "quickstart"
ASKED = 450

# What the guides state for the whole run: the loss on test questions, and how many of them are answered to the letter.
LOSS_BEFORE, LOSS_AFTER = 2.0, 0.1
RIGHT_BEFORE, RIGHT_AFTER = 0, 400


def rows(name: str) -> list[tuple[str, str]]:
    return quiz.read_questions(HERE / "data" / name)


def losses(folder: Path) -> tuple[float, float]:
    """The loss on test questions before the first step and after the last."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [record["eval_loss"] for record in records if "eval_loss" in record]
    return found[0], found[-1]


# --- data ---------------------------------------------------------------------------------------------------------


def test_the_generator_writes_the_same_bytes() -> None:
    made = data.instruction_set()
    assert set(made) == {file.name for file in (HERE / "data").iterdir()}
    for name, text in made.items():
        assert (HERE / "data" / name).read_bytes() == text.encode(), f"{name}: run python -m quickstart.data"


def test_what_is_tested_was_not_asked_in_training() -> None:
    train, test = rows("train.jsonl"), rows("test.jsonl")
    assert len(train) == 2024 and len(test) == ASKED and len(set(test)) == ASKED
    assert not {question for question, _ in train} & {question for question, _ in test}
    assert not {answer for _, answer in train} & {answer for _, answer in test}
    thing = {fact.answer: (fact.topic, fact.about) for fact in facts()}
    assert not {thing[answer] for _, answer in train} & {thing[answer] for _, answer in test}, "kept back by thing"
    assert {thing[answer][0] for _, answer in test} == {fact.topic for fact in facts()}, "every topic is tested"
    assert set(rows("prompts.jsonl")) < set(test) and len(rows("prompts.jsonl")) == 5


def test_the_base_model_has_read_everything_and_no_question() -> None:
    text = list(itertools.islice(data.documents(), 12_000))
    said = {sentence for document in text for sentence in re.findall(r"[^.]+\.", document)}
    said = {sentence.strip() for sentence in said}
    assert [answer for _, answer in rows("test.jsonl") if answer not in said] == []
    assert not any("?" in document for document in text)


@pytest.mark.slow
def test_the_tokenizer_can_be_made_again(tmp_path: Path) -> None:
    from quickstart import recipe

    recipe.make_tokenizer(tmp_path)
    made, kept = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, HERE / "model"))
    assert made["model"] == kept["model"] and made["added_tokens"] == kept["added_tokens"]
    assert (tmp_path / "chat_template.jinja").read_text() == (HERE / "model" / "chat_template.jinja").read_text()


# --- learning -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ranks(2, timeout=150)
def test_an_eighth_of_the_run_already_teaches_it(tmp_path: Path) -> None:
    changes = {
        "output_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache"), "max_steps": 30, "eval_steps": 30,
        "sample_prompts": None, "progress": "quiet",
    }  # fmt: skip
    some = (HERE / "data" / "test.jsonl").read_text().splitlines()[:90]
    trainer = SFTTrainer(
        model=str(HERE / "model"),
        args=SFTConfig(**{**read_yaml(str(HERE / "lora.yaml"), []), **changes}),
        train_dataset=str(HERE / "data" / "train.jsonl"),
        eval_dataset=[json.loads(line) for line in some],
    )
    trainer.train()
    trainer.save_model()
    if runtime.is_main():
        before, after = losses(tmp_path / "out")
        asked = rows("test.jsonl")[:90]
        right = [quiz.count_right(*quiz.load(HERE / "model", adapter), asked) for adapter in (None, tmp_path / "out")]
        assert before > LOSS_BEFORE and after < 0.4, (before, after, right)
        assert right[0] == RIGHT_BEFORE and right[1] >= 54, (before, after, right)


def quickstart(place: Path) -> subprocess.Popen[str]:
    """The quickstart in a copy of its folder, so that it is seen to write nowhere else."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, "-m", "quickstart.run"], cwd=place, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_whole_quickstart_and_again_until_ctrl_c(tmp_path: Path) -> None:
    shutil.copytree(HERE, tmp_path / "quickstart", ignore=shutil.ignore_patterns("out", "__pycache__"))
    first = quickstart(tmp_path)
    shown, _ = first.communicate(timeout=900)
    assert first.returncode == 0 and "gemm_4bit_forward" not in shown, shown
    out = tmp_path / "quickstart" / "out" / "lora"
    before, after = losses(out)
    assert before > LOSS_BEFORE and after < LOSS_AFTER, (before, after)
    counted = re.search(r"exactly correct answers\D+(\d+) of (\d+)\D+(\d+) of", shown)
    assert counted is not None, shown
    was, asked, now = map(int, counted.groups())
    assert asked == ASKED and was == RIGHT_BEFORE and now >= RIGHT_AFTER, counted.group()
    answered = quiz.answers(*quiz.load(HERE / "model", out), [question for question, _ in rows("prompts.jsonl")])
    assert answered == [answer for _, answer in rows("prompts.jsonl")]
    assert all(answer in " ".join(shown.split()) for answer in answered)

    second = quickstart(tmp_path)
    assert second.stdout is not None
    for line in second.stdout:  # over what the first run left
        if line.startswith("step  40/"):
            second.send_signal(signal.SIGINT)
            break
    shown, _ = second.communicate(timeout=120)
    assert second.returncode == 128 + signal.SIGINT and "Stopped" in shown and "Traceback" not in shown, shown
    assert not (out / "adapter_model.safetensors").exists(), "what the first run left is gone"


# --- the picture --------------------------------------------------------------------------------------------------


def test_the_picture_is_small_and_needs_nothing_from_elsewhere() -> None:
    picture = (ROOT / "docs" / "quickstart.svg").read_text(encoding="utf-8")
    assert len(picture.encode()) < 150_000 and picture.startswith("<svg")
    assert set(re.findall(r"https?://[^\s\"')]+", picture)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in picture and "@font-face" not in picture and "url(http" not in picture
    assert str(ROOT) not in picture and "/home/" not in picture
