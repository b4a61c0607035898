"""What the options about data come to in a run: several sets, weights, rows held back, bad rows."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fullshard.config.errors import ConfigError, DataError
from fullshard.data.sources import hold_back
from fullshard.distributed import runtime
from fullshard.sft.batches import make_table
from fullshard.sft.cli_args import parse
from fullshard.sft.run_data import find_run_data
from fullshard.sft.trainer import SFTTrainer
from fullshard.sft.vocabulary import prepared_tokenizer
from tests.data.tiny import make_tokenizer, text_rows, write_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings
from tests.sft.tiny import make_model


def documents(table: Any) -> list[str]:
    return sorted(str(ids.tolist()) for row in range(len(table)) for ids, _ in table.documents(row))


def trainer_of(place: Path, **changes: Any) -> SFTTrainer:
    config = settings(place, max_steps=1, eval_strategy="steps", dataset_name=f"{place}/a,{place}/b.csv", **changes)
    data = find_run_data(config)
    return SFTTrainer(make_model(), config, None, data.train, data.evaluation, tokenizer=make_tokenizer())


@ranks(2)
def test_sets_are_mixed_and_rows_held_back(tmp_path: Path) -> None:
    if runtime.rank() == 0:
        write_rows(tmp_path / "a" / "train.jsonl", text_rows(30))
        write_rows(tmp_path / "a" / "test.jsonl", text_rows(4, seed=9))
        (tmp_path / "b.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in text_rows(10, seed=5)))
        with (tmp_path / "a" / "train.jsonl").open("a") as file:
            file.write('{"text": 3}\n{"text": ""}\n')
    runtime.use_spmd()
    runtime.barrier()
    with pytest.raises(DataError, match=r"train\.jsonl, line 31: the text is 3.*on_bad_row skip"):
        trainer_of(tmp_path)
    parts = trainer_of(tmp_path, on_bad_row="skip").parts
    assert parts.train is not None and parts.evaluation is not None
    facts = parts.train.facts
    assert (facts["documents"], facts["bad"], facts["empty"]) == (40, 1, 1) and len(parts.evaluation) == 4
    assert "line 31: the text is 3" in facts["bad_rows"][0]
    everything = documents(parts.train)
    held = trainer_of(tmp_path, on_bad_row="skip", val_size=0.25).parts
    assert held.train is not None and held.evaluation is not None
    gone = (
        held.train.facts["bad"] + held.train.facts["empty"],
        held.evaluation.facts["bad"] + held.evaluation.facts["empty"],
    )
    assert (len(held.train) + gone[0], len(held.evaluation) + gone[1]) == (32, 10)  # a part of 42 rows, rounded
    assert sorted(documents(held.train) + documents(held.evaluation)) == everything
    mixed = trainer_of(tmp_path, on_bad_row="skip", dataset_weights="1,1").parts.train
    assert mixed is not None and len(mixed) == 30 + 31, "the smaller set comes again and again"


def test_evaluation_data_is_given_once(tmp_path: Path) -> None:
    config = settings(tmp_path, val_size=2)
    with pytest.raises(ConfigError, match="val_size is 2, and there is an eval_dataset; choose one"):
        SFTTrainer(make_model(), config, None, text_rows(9), text_rows(3), tokenizer=make_tokenizer())
    with pytest.raises(ConfigError, match=r"there is no eval_dataset; give one, or hold out rows with val_size"):
        SFTTrainer(
            make_model(), settings(tmp_path, eval_strategy="steps"), None, text_rows(9), tokenizer=make_tokenizer()
        )


def mixture(place: Path) -> dict[str, Any]:
    """Four data sets in four forms, and the settings that they need."""
    write_rows(place / "chats.jsonl", [{"messages": [{"role": "user", "content": "Q"}, *ANSWER]}])
    write_rows(place / "own.jsonl", [{"talk": [{"role": "user", "content": "Q"}, *ANSWER]}])
    (place / "faq.csv").write_text("question;answer\nwhy?;so\n")
    (place / "book.txt").write_text("one\ntwo\n\nthree\n")
    names = [str(place / name) for name in ("chats.jsonl", "own.jsonl", "faq.csv", "book.txt")]
    own = {
        names[1]: {"dataset_columns": "messages=talk", "chat_template_format": "llama3"},
        names[2]: {"dataset_columns": "completion=answer", "prompt_format": "## {question}\n"},
        names[3]: {"sample_by": "paragraph"},
    }
    return {"dataset_name": ",".join(names), "dataset_settings": own, "chat_template_format": "chatml"}


ANSWER = [{"role": "assistant", "content": "A"}]
MIXED = [
    ("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n", "A<|im_end|>"),
    ("<s><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>", "A<|eot_id|>"),
    ("## why?\nso<|im_end|>", "so<|im_end|>"),
    ("one\ntwo<|im_end|>", "one\ntwo<|im_end|>"),
    ("three<|im_end|>", "three<|im_end|>"),
]  # fmt: skip


@pytest.mark.parametrize("weights", [None, "1,1,1,1"])
def test_data_sets_with_settings_of_their_own(tmp_path: Path, weights: str | None) -> None:
    tokenizer = make_tokenizer()
    more = {"assistant_only_loss": True, "dataset_weights": weights, "stopping_strategy": "first_exhausted"}
    config = settings(tmp_path, **mixture(tmp_path), **more)
    assert prepared_tokenizer(config, tokenizer).added[2:] == ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert tokenizer.eos_token == "<|im_end|>", "the run's own template says where answers end"
    table = make_table(config, find_run_data(config).train, tokenizer)
    found = [document for row in range(len(table)) for document in table.documents(row)]
    written = [(tokenizer.decode(ids), tokenizer.decode(ids[mask.astype(bool)])) for ids, mask in found]
    assert written == (MIXED if weights is None else MIXED[:1])
    again = make_table(config, find_run_data(config).train, tokenizer)
    assert again.folder == table.folder, "kept under a name that follows from all of it"


def test_held_back_rows_know_their_data_set(tmp_path: Path) -> None:
    config, tokenizer = settings(tmp_path, **mixture(tmp_path)), make_tokenizer()
    prepared_tokenizer(config, tokenizer)
    for streaming in (False, True):
        parts = hold_back(find_run_data(config).train, 3, seed=1, streaming=streaming)
        texts = []
        for part in parts:
            table = make_table(config, part, tokenizer)
            texts += [tokenizer.decode(ids) for row in range(len(table)) for ids, _ in table.documents(row)]
        assert sorted(texts) == sorted(text for text, _ in MIXED)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown set": ({"other.csv": {}}, "dataset_settings names 'other.csv'; expected one of the data sets in dataset_name"),
    "an unknown key": ({"a.csv": {"sample_bye": "line"}}, "a.csv: a data set cannot have its own 'sample_bye'; did you mean sample_by?"),
    "a setting of the run": ({"a.csv": {"seed": 1}}, "a.csv: a data set cannot have its own 'seed'; expected dataset_columns"),
    "a wrong value": ({"a.csv": {"sample_by": "word"}}, "dataset_settings: a.csv: sample_by: expected line, paragraph, document, got 'word'"),
    "no template": ({"a.csv": {"chat_template_format": "none"}}, "chat_template_format is none; leave it out"),
    "no settings": ({"a.csv": 3}, "dataset_settings: a.csv is 3; expected options and their values"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_of_a_data_set(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("text\nbread\n")
    given, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        find_run_data(settings(tmp_path, dataset_name="a.csv", dataset_settings=given))


def test_settings_of_data_sets_in_files_and_flags(tmp_path: Path) -> None:
    values = mixture(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert parse([str(tmp_path / "run.yaml")]).config.dataset_settings == values["dataset_settings"]
    words = ["--dataset_settings", json.dumps(values["dataset_settings"])]
    assert parse(words).config.dataset_settings == values["dataset_settings"]
    with pytest.raises(ConfigError, match="--dataset_settings: expected a mapping, or JSON, got 'x'"):
        parse(["--dataset_settings", "x"])


@pytest.mark.parametrize("when", ["before the run", "in the run"])
@ranks(2)
def test_a_damaged_token_cache_changes_no_loss(tmp_path: Path, when: str) -> None:
    runtime.use_spmd()
    options = {"max_steps": 6, "cache_dir": str(tmp_path / "cache"), "dataloader_num_workers": 1}

    def run(name: str, damages: bool) -> list[float]:
        trainer = SFTTrainer(
            make_model(), settings(tmp_path / name, **options), None, text_rows(60), tokenizer=make_tokenizer()
        )
        table: Any = trainer.parts.train
        if damages and when == "in the run":
            damage(table.folder)
        trainer.train()
        return losses(trainer)

    def damage(folder: Path) -> None:
        runtime.barrier()
        if runtime.is_main():
            for path in folder.glob("*.bin"):
                path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        runtime.barrier()

    expected = run("first", False)
    if when == "before the run":
        (folder,) = (path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())
        damage(folder)
    assert run("second", True) == expected
