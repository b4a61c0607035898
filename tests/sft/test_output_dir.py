"""Which folders a run writes to and empties: never one with something that it reads, and only what runs write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import ConfigError, WeightsError
from fullshard.config.paths import check_new_folder, replace_text, save_tokenizer, within
from fullshard.launch.sft_command import sft
from fullshard.sft.output_dir import (
    LOCK,
    OVERWRITE_MARK,
    FolderLock,
    changed_settings,
    check_output_dir,
    lock_output_dir,
    remove_earlier_run,
    resumes,
    write_settings,
)
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pairwise import crossed
from tests.pool import ranks
from tests.report.small_results import command
from tests.sft.runs import settings, train
from tests.sft.tiny import make_folder, make_model


def contents(place: Path) -> dict[str, int]:
    """Every file under a place, with a check sum of what it holds."""
    return {str(p.relative_to(place)): zlib.crc32(p.read_bytes()) for p in sorted(place.rglob("*")) if p.is_file()}


def an_earlier_run(out: Path, **changes: Any) -> None:
    """A run's folder with one of everything, and something that is not the run's."""
    out.mkdir(parents=True, exist_ok=True)
    write_settings(SFTConfig(output_dir=str(out), **changes), {})
    for name in ("checkpoints/step-5/manifest.json", "checkpoints/mine.txt", "runs/events.out.tfevents.1",
                 "wandb/run-1/log", "model.safetensors", "metrics.jsonl", "README.md", "notes.txt",
                 "data/train.jsonl", "model.fp16.safetensors"):  # fmt: skip
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)


FOREIGN = ["checkpoints/mine.txt", "data/train.jsonl", "model.fp16.safetensors", "notes.txt"]


# --- earlier runs ---------------------------------------------------------------------------------------------------


def test_a_folder_with_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = SFTConfig(output_dir=str(out), learning_rate=1e-3)
    check_output_dir(first, {})
    an_earlier_run(out, learning_rate=1e-3)
    second = SFTConfig(output_dir=str(out), learning_rate=2e-3, logging_steps=3, packing=True)
    differ = "packing False → True, learning_rate 0.001 → 0.002"
    said = rf"holds an earlier run. --resume .*, --overwrite .*Changed since: {differ}\."
    with pytest.raises(ConfigError, match=said):
        check_output_dir(second, {})
    with pytest.raises(ConfigError, match=r"The settings are the same"):
        check_output_dir(first, {})
    assert set(changed_settings(first.to_dict(), second)) == {"packing", "learning_rate"}
    check_output_dir(SFTConfig(output_dir=str(out), resume=True), {})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_output_dir(second, {})


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    an_earlier_run(out)
    config = SFTConfig(output_dir=str(out), overwrite=True)
    before = contents(out)
    check_output_dir(config, {})
    assert contents(out) == before, "a check changes nothing"
    lock_output_dir(config).release()
    assert contents(out) == {**before, OVERWRITE_MARK: 0}, "nor does holding the folder"
    said = remove_earlier_run(config)
    assert said is not None and "data, model.fp16.safetensors, notes.txt were not written by a run" in said
    assert sorted(contents(out)) == FOREIGN and not (out / "runs").exists()


def test_what_no_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    """Without an earlier run's settings, a model there is somebody's."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("another model")
    config = SFTConfig(output_dir=str(out), overwrite=True)
    with pytest.raises(ConfigError, match=r"holds model.safetensors, which a run would replace, but no earlier run"):
        check_output_dir(config, {})
    (out / "model.safetensors").rename(out / "other.safetensors")
    check_output_dir(config, {})
    with pytest.raises(ConfigError, match=r"is not empty .other.safetensors. and holds no earlier run"):
        check_output_dir(SFTConfig(output_dir=str(out)), {})


def test_links_are_removed_and_what_they_point_to_stays(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    an_earlier_run(out)
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("weights")
    shutil.rmtree(out / "checkpoints")
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").symlink_to(elsewhere / "precious")
    (out / "checkpoints").symlink_to(elsewhere)
    (elsewhere / "step-1").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "manifest.json").write_text("{}")
    remove_earlier_run(SFTConfig(output_dir=str(out), overwrite=True))
    assert (elsewhere / "precious").read_text() == "weights" and (tmp_path / "kept" / "manifest.json").exists()
    assert not (out / "model.safetensors").is_symlink() and (out / "checkpoints").is_symlink()


def test_restarted_before_the_earlier_run_was_removed_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    an_earlier_run(out)
    config = SFTConfig(output_dir=str(out), overwrite=True)
    lock_output_dir(config).release()  # and then something fails
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not resumes(config), "the checkpoint that is there is the earlier run's"
    check_output_dir(config, {})
    lock_output_dir(config).release()
    remove_earlier_run(config)
    assert resumes(config) and sorted(contents(out)) == FOREIGN, "what is there from now on is this job's"
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    an_earlier_run(out)
    lock_output_dir(config).release()  # fails for good; the user goes on with the earlier run after all
    going_on = SFTConfig(output_dir=str(out), resume=True)
    check_output_dir(going_on, {})
    lock_output_dir(going_on).release()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resumes(SFTConfig(output_dir=str(out))) and resumes(config), "nothing there is to be removed any more"


@pytest.mark.parametrize("name", ["cache_dir", "resume_from_checkpoint"])
def test_what_is_needed_is_not_removed(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    an_earlier_run(out)
    config = SFTConfig(output_dir=str(out), overwrite=True, **{name: str(out / "checkpoints" / "step-5")})
    with pytest.raises(ConfigError, match=rf"{name}: .*step-5\S* is in .*step-5, which --overwrite removes"):
        check_output_dir(config, {})
    with pytest.raises(ConfigError, match=r"resume and overwrite are both on"):
        SFTConfig(overwrite=True, resume_from_checkpoint="true")


def test_what_is_read_lies_behind_a_link_in_the_folder(tmp_path: Path) -> None:
    out, model = tmp_path / "out", tmp_path / "models" / "step-5"
    an_earlier_run(out)
    shutil.rmtree(out / "checkpoints")
    model.mkdir(parents=True)
    (out / "checkpoints").symlink_to(tmp_path / "models")
    with pytest.raises(ConfigError, match=r"model_name_or_path: .*models/step-5 is in .*checkpoints/step-5, which"):
        check_output_dir(SFTConfig(output_dir=str(out), overwrite=True), {"model_name_or_path": [model]})


def test_a_cache_inside_the_folder_is_the_run_s_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "deep" / "cache" / "tokens").mkdir(parents=True)
    (out / "deep" / "cache" / "tokens" / "a").write_text("tokens")
    config = SFTConfig(output_dir=str(out), cache_dir=str(out / "deep" / "cache"))
    check_output_dir(config, {})
    remove_earlier_run(SFTConfig(output_dir=str(out), cache_dir=config.cache_dir, overwrite=True))
    assert (out / "deep" / "cache" / "tokens" / "a").exists()


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_folder(tmp_path_factory.mktemp("made"), rows=8)
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{place / "model"}"}}')
    (place / "adapter" / "adapter_model.safetensors").write_text("an adapter")
    (place / "tokenizer").mkdir()
    shutil.copy(place / "model" / "tokenizer_config.json", place / "tokenizer")
    (place / "prompts.txt").write_text("Say something.\n")
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """Everything that a run reads; each folder of it also looks like an earlier run's, so that nothing else refuses."""
    place = tmp_path / "place"
    shutil.copytree(made, place)
    for name in ("model", "adapter", "tokenizer", "data", "."):
        write_settings(SFTConfig(output_dir=str(place / name)), {})
    config = place / "adapter" / "adapter_config.json"
    config.write_text(f'{{"base_model_name_or_path": "{place / "model"}"}}')
    return place


def link(place: Path, target: Path) -> Path:
    place.symlink_to(target, target_is_directory=target.is_dir())
    return place


EQUAL: dict[str, Callable[[Path], dict[str, Any]]] = {
    "the model": lambda p: {"output_dir": p / "model"},
    "the adapter": lambda p: {"output_dir": p / "adapter", "adapter_name_or_path": p / "adapter"},
    "the adapter named as the model": lambda p: {"output_dir": p / "adapter", "model_name_or_path": p / "adapter"},
    "the base that an adapter names": lambda p: {"output_dir": p / "model", "model_name_or_path": p / "adapter"},
    "the tokenizer": lambda p: {"output_dir": p / "tokenizer", "tokenizer_name_or_path": p / "tokenizer"},
    "the data's folder": lambda p: {"output_dir": p / "data"},
    "the folder of the data's file": lambda p: {"output_dir": p / "data", "dataset_name": p / "data" / "train.jsonl"},
    "the folder above all": lambda p: {"output_dir": p},
    "the folder of the prompts": lambda p: {
        "output_dir": p, "sample_prompts": p / "prompts.txt", "eval_strategy": "epoch"
    },
    "by another way": lambda p: {"output_dir": p / "data" / ".." / "model"},
    "by a link to the model": lambda p: {"output_dir": link(p.parent / "out", p / "model")},
    "by a link to the folder above": lambda p: {"output_dir": link(p.parent / "out", p) / "model"},
    "the model named by a link": lambda p: {
        "output_dir": p / "model", "model_name_or_path": link(p.parent / "named", p / "model")
    },
    "data that are a link to the folder": lambda p: {
        "output_dir": p / "data", "dataset_name": link(p.parent / "named.jsonl", p / "data" / "train.jsonl")
    },
    "data by a link inside the folder": lambda p: {
        "output_dir": p / "adapter",
        "dataset_name": link(p / "adapter" / "named.jsonl", p / "data" / "train.jsonl"),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
def test_a_folder_with_something_that_is_read_is_refused(case: str, place: Path) -> None:
    values = {"model_name_or_path": place / "model", "dataset_name": place / "data", "report_to": "none"}
    values |= EQUAL[case](place)
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    before = contents(place)
    for flags in (["--overwrite"], ["--resume"], []):
        with pytest.raises(ConfigError, match=r"output_dir: .* (is also|contains) .*; choose another directory"):
            sft([*words, *flags])
    assert contents(place) == before


def test_a_folder_inside_one_that_is_read_is_allowed(place: Path) -> None:
    """It takes nothing away from what is above it."""
    check_output_dir(SFTConfig(output_dir=str(place / "model" / "tuned")), {"model_name_or_path": [place / "model"]})


def test_two_spellings_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a bind mount: no link leads from one to the other, only the system knows that they are the same."""
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    usual = os.path.samefile

    def samefile(one: Any, other: Any) -> bool:
        return usual(*(tmp_path / "a" if Path(p) == tmp_path / "b" else p for p in (one, other)))

    assert not within(tmp_path / "a" / "data", tmp_path / "b")
    monkeypatch.setattr(os.path, "samefile", samefile)
    assert within(tmp_path / "a" / "data", tmp_path / "b") and not within(tmp_path / "a", tmp_path / "a" / "data")


@ranks(1)
def test_models_and_tokenizers_in_memory_and_data_sets_count_too(tmp_path: Path) -> None:
    """Where they came from is what would be lost."""
    place = make_folder(tmp_path, rows=8)
    write_settings(SFTConfig(output_dir=str(place / "model")), {})
    write_settings(SFTConfig(output_dir=str(place / "data")), {})
    before = contents(place)
    in_model = settings(tmp_path, output_dir=str(place / "model"), overwrite=True)
    for options in (
        {"model": type(make_model()).from_pretrained(place / "model"), "tokenizer": make_tokenizer()},
        {"model": make_model(), "tokenizer": type(make_tokenizer()).from_pretrained(place / "model")},
    ):
        with pytest.raises(ConfigError, match=r"output_dir: .* is also (model|tokenizer)_name_or_path"):
            SFTTrainer(args=in_model, train_dataset=text_rows(8), **options)
    in_data = settings(tmp_path, output_dir=str(place / "data"), overwrite=True)
    file = str(place / "data" / "train.jsonl")
    with pytest.raises(ConfigError, match=r"output_dir: .* contains .*train.jsonl, which dataset_name names"):
        SFTTrainer(model=make_model(), args=in_data, train_dataset=file, tokenizer=make_tokenizer())
    trainer = SFTTrainer(model=str(place / "model"), args=settings(tmp_path), train_dataset=file)
    with pytest.raises(ConfigError, match=r"save_model: .*model is also model_name_or_path"):
        trainer.save_model(str(place / "model"))
    del before["model/settings.json"], before["data/settings.json"]
    assert {name: held for name, held in contents(place).items() if name in before} == before


# --- when the earlier run goes --------------------------------------------------------------------------------------


@ranks(1)
def test_a_run_that_fails_to_load_leaves_the_earlier_one(tmp_path: Path) -> None:
    """Then a run that loads replaces it; what is not a run's stays, and that is said."""
    place = make_folder(tmp_path, rows=8)
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(make_model(), settings(tmp_path, **options)).save_model()
    out = tmp_path / "out"
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    assert "checkpoints/step-2/manifest.json" in before and "model.safetensors" in before
    damaged = place / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    again = settings(tmp_path, **{**options, "max_steps": 1, "overwrite": True})
    file = str(place / "data" / "train.jsonl")
    with pytest.raises(WeightsError):
        SFTTrainer(model=str(place / "model"), args=again, train_dataset=file).train()
    assert contents(out) == before

    def fail(*_: Any, **__: Any) -> None:
        raise WeightsError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.sft.loop.Loop.__init__", fail)  # the last thing before the run begins
        with pytest.raises(WeightsError, match="gone"):
            train(make_model(), again)
    assert contents(out) == {**before, OVERWRITE_MARK: 0}
    train(make_model(), again)
    after = contents(out)
    assert "checkpoints/step-2/manifest.json" not in after and "model.safetensors" not in after
    assert after["notes.txt"] == before["notes.txt"] and "checkpoints/step-1/manifest.json" in after


# --- two runs at once -----------------------------------------------------------------------------------------------


def test_a_folder_that_another_run_writes_to(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "import sys; from fullshard import SFTConfig; from fullshard.sft.output_dir import lock_output_dir\n"
        f"lock_output_dir(SFTConfig(output_dir={str(out)!r})); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    config = SFTConfig(output_dir=str(out), overwrite=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for attempt in (lambda: check_output_dir(config, {}), lambda: lock_output_dir(config)):
            with pytest.raises(ConfigError, match=rf"out is in use by another run \(process {other.pid} on "):
                attempt()
    finally:
        other.kill()
        other.communicate()
    check_output_dir(config, {})
    lock, again = lock_output_dir(config), lock_output_dir(config)  # what a killed process leaves behind does not count
    lock.release()
    lock.release()
    assert (out / LOCK).exists(), "held twice by this process, given free once"
    again.release()
    assert not (out / LOCK).exists()


def test_a_lock_s_file_that_is_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last owner removes the file after this one has opened it: another is made, which others see."""
    usual, opened = os.open, []

    def once(path: Any, *more: Any) -> int:
        file = usual(path, *more)
        if not opened:
            opened.append(path)
            os.unlink(path)
        return file

    monkeypatch.setattr(os, "open", once)
    lock = FolderLock(tmp_path)
    lock.take()
    assert (tmp_path / LOCK).exists()
    lock.release()


# --- replacing files ------------------------------------------------------------------------------------------------


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    """A file of the user's under a name that a run writes, hard or symbolic link."""
    (tmp_path / "precious").write_text("rows")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    os.link(tmp_path / "precious", tmp_path / "tokenizer.json")
    replace_text(tmp_path / "metrics.jsonl", "numbers")
    save_tokenizer(make_tokenizer(), tmp_path)
    assert (tmp_path / "precious").read_text() == "rows" and (tmp_path / "metrics.jsonl").read_text() == "numbers"
    assert len((tmp_path / "tokenizer.json").read_text()) > 4
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def test_results_do_not_go_where_checkpoints_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints"
    (run / "step-5").mkdir(parents=True)
    (run / "step-5" / "manifest.json").write_text("{}")
    for name in ("step-6", "step-5/whole", "step-7/deep/er"):
        with pytest.raises(ConfigError, match=r"is inside the checkpoints in"):
            check_new_folder(run / name)
    with pytest.raises(ConfigError, match=r"exists already and is not empty"):
        check_new_folder(run / "step-5")
    assert check_new_folder(tmp_path / "step-5") == tmp_path.resolve() / "step-5"
    (tmp_path / "real").mkdir()
    assert check_new_folder(link(tmp_path / "named", tmp_path / "real")) == tmp_path.resolve() / "real"


# --- said before anything is loaded ---------------------------------------------------------------------------------


def test_nothing_to_resume(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"there is no checkpoint in .*out.checkpoints to resume from"):
        check_output_dir(SFTConfig(output_dir=out, resume=True), {})
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: .*nowhere does not exist; expected a checkpoint's"):
        check_output_dir(SFTConfig(output_dir=out, resume_from_checkpoint=str(tmp_path / "nowhere")), {})
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: .* holds no checkpoint"):
        check_output_dir(SFTConfig(output_dir=out, resume_from_checkpoint=str(tmp_path)), {})


def test_an_unwritable_folder_is_said_when_the_trainer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text("a file")
    loaded: list[Any] = []
    monkeypatch.setattr("fullshard.sft.assemble.gather_parts", lambda *a: loaded.append(a))
    with pytest.raises(ConfigError, match=r"output_dir: .*out is a file"):
        SFTTrainer(model=make_model(), args=settings(tmp_path), train_dataset=text_rows(4), tokenizer=make_tokenizer())
    assert not loaded


@ranks(1)
@pytest.mark.parametrize(("kind", "umask"), crossed(("full", "lora", "pissa", "prompt"), (0o022, 0o007), pairs=False))
def test_every_file_of_a_result_has_the_mode_that_the_umask_gives(kind: str, umask: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "full": {},
        "lora": {"use_peft_lora": True, "lora_r": 2},
        "pissa": {"use_peft_lora": True, "lora_r": 2, "init_lora_weights": "pissa"},
        "prompt": {"peft_type": "prompt_tuning", "num_virtual_tokens": 3},
    }[kind]
    before = os.umask(umask)
    try:
        make_folder(tmp_path)
        config = settings(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps", **changes)
        trainer = SFTTrainer(
            model=str(tmp_path / "model"), args=config, train_dataset=str(tmp_path / "data" / "train.jsonl"),
            eval_dataset=str(tmp_path / "data" / "test.jsonl"),
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        again = tmp_path / "again"
        trainer.save_model(str(again))
        written = [Path(config.output_dir), again]
        for number, words in enumerate(EXPORTS["full" if kind == "full" else "prompt" if kind == "prompt" else "lora"]):
            written.append(tmp_path / f"exported-{number}")
            code, _, error = command(words[0], config.output_dir, str(written[-1]), *words[1:])
            assert code == 0, error
    finally:
        os.umask(before)
    files = [p for folder in written for p in folder.rglob("*") if p.is_file()]
    assert any(p.name.endswith(".safetensors") for p in files) and len(files) > 20
    modes = {str(p.relative_to(tmp_path)): oct(p.stat().st_mode & 0o777) for p in files}
    assert {name: mode for name, mode in modes.items() if mode != oct(0o666 & ~umask)} == {}


EXPORTS = {
    "full": [("export",), ("export", "--checkpoint", "1")],
    "lora": [("export",), ("export", "--merge"), ("export", "--checkpoint", "1"), ("export", "--dtype", "bfloat16")],
    "prompt": [("export",), ("export", "--checkpoint", "1")],
}
