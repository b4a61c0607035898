"""Every check of a run happens once: in the launcher, in a process that starts alone, or in a script's trainer."""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import ConfigError
from fullshard.data import find_dataset
from fullshard.launch import command, sft_command
from fullshard.sft import __main__ as rank_program
from fullshard.sft import checked_run, cli_args, output_dir, run_data
from fullshard.sft.checked_run import RUN_VARIABLE
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import make_folder

PARSED: list[Callable[..., Any]] = [cli_args.parse, SFTConfig.__post_init__, checked_run.sharding_settings]
PATHS: list[Callable[..., Any]] = [
    checked_run.check_paths, checked_run.starting_point, checked_run.check_model_folder, checked_run.check_report_to,
    find_dataset.check_first_rows,
]  # fmt: skip
FOLDER: list[Callable[..., Any]] = [output_dir.check_output_path, output_dir.check_contents]
FOUND: list[Callable[..., Any]] = [run_data.find_run_data, output_dir.input_paths]
"""What is local to a node, so that ranks look for it too."""


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Count the calls of everything above, however it was imported."""
    codes = {one.__code__: one.__qualname__ for one in (*PARSED, *PATHS, *FOLDER, *FOUND)}
    calls: collections.Counter[str] = collections.Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls[codes[frame.f_code]] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def once(*checks: list[Callable[..., Any]]) -> dict[str, int]:
    return {one.__qualname__: 1 for group in checks for one in group}


def words(place: Path, out: Path) -> list[str]:
    return [
        "--model_name_or_path", str(place / "model"), "--dataset_name", str(place / "data"), "--output_dir", str(out),
        "--cache_dir", str(place / "cache"), "--report_to", "none", "--progress", "quiet", "--max_steps", "1",
        "--save_strategy", "no", "--lora_target_modules", "q_proj", "--use_peft_lora", "--fsdp", "full_shard auto_wrap",
    ]  # fmt: skip


@ranks(1)
def test_a_launched_run_is_checked_by_the_launcher_and_only_received_by_the_rank(tmp_path: Path) -> None:
    place, out = make_folder(tmp_path, rows=8), tmp_path / "out"
    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr(command, "start", lambda launch: started.append(launch) or 0)
        with counted() as launcher:
            assert sft_command.sft(["--num_processes", "2", *words(place, out)]) == 0
    assert launcher == once(PARSED, PATHS, FOLDER, FOUND)
    handed = started[0].variables[RUN_VARIABLE]
    assert started[0].environment({})[RUN_VARIABLE] == handed
    assert json.loads(handed)["engine"]["use_cpu"] is started[0].engine.use_cpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, handed)
        patch.setattr(sys, "argv", ["fullshard.sft"])
        with counted() as rank:
            rank_program.main()
    assert rank == once(FOUND)
    written = json.loads((out / "settings.json").read_text())["settings"]
    assert written == cli_args.parse(words(place, out)).config.to_dict()
    assert (out / "adapter_model.safetensors").exists()


@ranks(1)
def test_a_rank_that_starts_alone_checks_once(tmp_path: Path) -> None:
    place, out = make_folder(tmp_path, rows=8), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(RUN_VARIABLE, raising=False)
        patch.setattr(sys, "argv", ["fullshard.sft", *words(place, out)])
        with counted() as calls:
            rank_program.main()
    assert calls == once(PARSED, PATHS, FOLDER, FOUND)


@ranks(1)
def test_a_trainer_checks_when_it_is_made_and_the_folder_when_it_trains(tmp_path: Path) -> None:
    place = make_folder(tmp_path, rows=8)
    args = settings(tmp_path, max_steps=1)
    with counted() as made:
        trainer = SFTTrainer(str(place / "model"), args, train_dataset=str(place / "data" / "train.jsonl"))
    expected = {one.__qualname__: 1 for one in (
        SFTConfig.__post_init__, checked_run.sharding_settings, checked_run.starting_point, checked_run.check_report_to,
        checked_run.check_model_folder, output_dir.check_output_path, output_dir.input_paths,
    )}  # fmt: skip
    assert made == expected
    with counted() as trained:
        trainer.train()
    assert trained == once([output_dir.check_contents])


def test_a_path_that_this_node_lacks_is_named(tmp_path: Path) -> None:
    place = make_folder(tmp_path, rows=8)
    run = checked_run.check_command(cli_args.parse(words(place, tmp_path / "out")))
    handed = run.to_json()
    assert checked_run.receive_run(handed).config.to_dict() == run.config.to_dict()
    assert checked_run.receive_run(handed).engine == run.engine
    (place / "model").rename(place / "elsewhere")
    with pytest.raises(ConfigError, match=r"model_name_or_path: .*model does not exist"):
        checked_run.receive_run(handed)
