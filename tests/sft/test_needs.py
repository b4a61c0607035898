"""Settings without what they need: each turns it on, is refused, or is reported. All settings are walked through."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import UserError
from fullshard.config.options import Option
from fullshard.launch.plan_command import read_request
from fullshard.launch.sft_command import sft
from fullshard.sft.checked_run import check_command
from fullshard.sft.cli_args import CommandConfig, command_options, config_of, parse
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.unused_options import LORA, NEEDS
from tests.pool import ranks
from tests.sft.test_options import CHANGES
from tests.sft.tiny import make_folder

OPTIONS = {one.name: one for one in command_options() if not (one.no_op or one.refused)}
NOT_A_USE = ("__post_init__", "to_dict", "values", "changed", "without_effect")
"""Functions that read every setting, whatever it does."""
ON_GPUS = {"dataloader_pin_memory"}
"""Settings that nothing reads on CPUs, which this run cannot show."""


def other_value(one: Option) -> str:
    """A value besides the default, as a flag takes it."""
    if one.name in CHANGES:
        value = CHANGES[one.name][1]
        pairs = value.items() if isinstance(value, dict) else ()
        return ",".join(f"{name}={each}" for name, each in pairs) if pairs else str(value)
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    number = str(int(one.default or 1) + 1) if one.kind in (int, float) else "x"
    return str(not one.default).lower() if one.kind is bool else number


def notes_on(one: Option) -> str | None:
    """What the run says of a setting that is given alone; None if it has changed other settings, or is refused."""
    try:
        arguments = parse([f"--{one.key}", other_value(one)])
    except UserError:
        return None
    config, plain = arguments.config, CommandConfig()
    derived = ("precision", "evaluates_every", "keeps_apart", "adapter_kind", "activation_budget")
    others = [name for name in (*OPTIONS, *derived) if name != one.name]
    changed = [name for name in others if getattr(config, name) != getattr(plain, name)]
    return None if changed else "; ".join(arguments.notes)


# --- all settings -----------------------------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The settings that code reads in order to act on them."""
    read: set[str] = set()

    def get(config: SFTConfig, name: str) -> Any:
        if name in OPTIONS and name not in read:
            frame: Any = sys._getframe(1)
            used = "dataclasses.py" not in frame.f_code.co_filename
            while used and frame is not None:
                used, frame = frame.f_code.co_name not in NOT_A_USE, frame.f_back
            if used:
                read.add(name)
        return object.__getattribute__(config, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFTConfig, "__getattribute__", get)
        yield read


@ranks(1)
def test_a_setting_that_a_plain_run_never_reads_says_so_when_it_is_given(tmp_path: Path) -> None:
    make_folder(tmp_path, rows=8)
    words = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    words += ["--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path / "cache"), "--progress", "quiet"]
    with recorded() as read:
        assert sft(["--num_train_epochs", "1", *words]) == 0
    unread = OPTIONS.keys() - read - ON_GPUS
    assert {"lora_alpha", "preview_rows", "hub_token", "early_stopping_threshold"} <= unread and len(unread) > 20
    silent = [name for name in unread if (notes := notes_on(OPTIONS[name])) is not None and name not in notes]
    assert not silent, "name what they need in sft/unused_options.py"


def test_every_need_can_be_met_and_its_names_are_settings() -> None:
    assert {name for need in NEEDS for name in need.names} <= OPTIONS.keys() and set(LORA) <= OPTIONS.keys()
    for need in NEEDS:
        for name in need.names:
            also = dict(CHANGES[name][0]) if name in CHANGES else {}
            words = [f"--{also_name}={value}" for also_name, value in also.items() if not isinstance(value, dict)]
            try:
                notes = parse([*words, f"--{name}", other_value(OPTIONS[name])]).notes
            except UserError:
                continue
            if also:
                assert not [note for note in notes if f" {name}" in note], "it has an effect with what it needs"


# --- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LORA)
def test_a_setting_of_lora_turns_it_on(name: str) -> None:
    values = {"lora_r": "64", "peft_type": "lora", "init_lora_weights": "true", "trainable_token_indices": "5"}
    flag = (
        [f"--{name}", values.get(name) or other_value(OPTIONS[name])]
        if name not in ("peft_type",)
        else ["--peft_type", "lora"]
    )
    arguments = parse(flag)
    assert arguments.config.adapter_kind is not None
    assert arguments.notes == [f"use_peft_lora is on, for {name}; set it to false to train all weights"], (
        "at its default too"
    )


def test_what_was_chosen_about_adapters_stays(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("use_peft_lora: false\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.1\n")
    arguments = parse([str(run)])
    assert arguments.config.adapter_kind is None
    assert arguments.notes == [
        "no effect: lora_r, lora_dropout: only LoRA and VeRA adapters have it; set use_peft_lora",
        "no effect: lora_alpha: only LoRA adapters have it; set use_peft_lora",
    ]
    vera = parse(["--peft_type", "vera", "--lora_r", "8", "--lora_alpha", "16"])
    assert vera.config.adapter_kind == "vera" and vera.notes == [
        "no effect: lora_alpha: only LoRA adapters have it; set use_peft_lora"
    ]
    assert parse(["--lora_dropout", "0"]).config.adapter_kind == "lora", "0 is a value"
    assert parse(["--use_peft_lora", "--lora_r", "8"]).notes == parse(["--use_peft_lora", "false"]).notes == []


def test_plan_and_scripts_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    make_folder(tmp_path, rows=2)
    request, _ = read_request([str(tmp_path / "model"), "--lora_r", "8", "--save_strategy", "no", "--save_steps", "5"])
    assert request.config.adapter_kind == "lora"
    assert [note for note in request.notes if "lora_r" in note] and "no effect: save_steps" in " ".join(request.notes)
    _, notes = config_of(SFTConfig(lora_r=8, eval_delay=2, do_train=True, use_cache=True))
    assert notes == [
        "no effect: lora_r: only LoRA and VeRA adapters have it; set use_peft_lora",
        "no effect here (see docs/options.md): use_cache",
    ], "a script may evaluate by itself"


def test_how_texts_are_split_is_for_text_files(tmp_path: Path) -> None:
    make_folder(tmp_path, rows=2)
    (tmp_path / "notes.txt").write_text("one\n\ntwo\n")
    words = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    words += ["--sample_by", "paragraph", "--dataset_name"]
    assert check_command(parse([*words, str(tmp_path / "notes.txt")])).notes == ()
    assert check_command(parse([*words, str(tmp_path / "data")])).notes == (
        "no effect: sample_by: no file of the data is a .txt file",
    )
