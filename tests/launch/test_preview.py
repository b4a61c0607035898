"""`--preview`: what is shown is what is trained on, and nothing else happens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fullshard.data.chat_template import prepare_tokenizer
from fullshard.data.loader import load_table
from fullshard.data.sources import row_source
from fullshard.launch import preview, sft_command
from fullshard.sft.batches import text_settings
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import chat_rows, make_tokenizer
from tests.sft.tiny import make_folder


def test_brackets_and_colours_stand_around_what_is_learnt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    prepare_tokenizer(tokenizer, "chatml")
    config = SFTConfig(assistant_only_loss=True, max_seq_len=400)
    rows = chat_rows(6)
    table = load_table(row_source(rows, "rows"), tokenizer, text_settings(config, tokenizer), str(tmp_path))
    for number, row in enumerate(rows):
        ((ids, mask),) = table.documents(number)
        text = preview.colored(ids, mask, tokenizer, marks=True).plain
        answers = [m["content"].strip() + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert re.findall(r"⟦([^⟦⟧]*)⟧", text) == answers
        plain = tokenizer.decode(ids.tolist())
        assert text.replace("⟦", "").replace("⟧", "") == plain
        shown = preview.colored(ids, mask, tokenizer)
        assert shown.plain == plain
        bold = "".join(shown.plain[s.start : s.end] for s in shown.spans if "bold" in str(s.style))
        assert bold == "".join(answers)


def test_the_first_token_is_never_learnt() -> None:
    tokenizer = make_tokenizer()
    ids = np.asarray(tokenizer("winter bread", add_special_tokens=False)["input_ids"], dtype=np.int32)
    text = preview.colored(ids, np.ones(len(ids), np.uint8), tokenizer, marks=True).plain
    assert not text.startswith("⟦") and text.endswith("⟧")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setenv("FULLSHARD_CACHE", str(tmp_path / "cache"))
    make_folder(tmp_path, rows=20)
    out = tmp_path / "out"
    path = tmp_path / "chats" / "train.jsonl"
    with path.open("a") as file:
        file.write('{"messages": [{"role": "robot", "content": "x"}]}\n')
    words = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(path), "--output_dir", str(out)]
    words += ["--chat_template_format", "chatml", "--assistant_only_loss", "--packing", "--max_seq_len", "50"]
    words += ["--on_bad_row", "skip", "--preview", "--preview_rows", "2", "--num_processes", "2", "--val_size", "4"]
    words += ["--streaming", "--max_steps", "3", "--shuffle_buffer_size", "10"] if streaming else []
    assert sft_command.sft(words) == 0
    said = capsys.readouterr().out
    assert not out.exists()
    assert said.count("<|im_start|>assistant") > 1 and "⟦" in said
    assert re.findall(r"^row (\d):", said, re.M) == ["1", "2"]
    documents = [int(n) for n in re.findall(r"documents +(\d+)", said)]
    total, (skipped,) = (
        len(path.read_text().splitlines()),
        re.findall(r"left out +(\d+) rows: 1 unknown role", said) or (0,),
    )
    assert documents == [10, 4] if streaming else sum(documents) + int(skipped) == total and int(skipped) == 1
    assert streaming or f"train.jsonl, line {total}: messages[0] has the role 'robot'" in "".join(said.split("\n"))
    assert re.search(r"longer than max_length +\d+ documents, \d+ tokens lost", said)
    assert re.search(r"rows +\d+ of at most 50 tokens, \d+\.\d% full", said)


def test_bars() -> None:
    shown = preview.histogram(np.asarray([3, 3, 3, 9])).plain.splitlines()
    assert sum(int(line.split()[-1]) for line in shown) == 4
    assert shown[0].split()[0] == "3" and shown[-1].split()[2] == "9"
    assert preview.histogram(np.asarray([5])).plain.split()[:3] == ["5", "–", "5"]


def test_long_rows_are_cut_and_counted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    config = SFTConfig(max_seq_len=2000)
    source = row_source([{"text": "winter bread river " * 400}], "rows")
    table = load_table(source, tokenizer, text_settings(config, tokenizer), str(tmp_path))
    console = Console(record=True, width=100, file=(tmp_path / "shown").open("w"))
    preview.show_rows(table, tokenizer, 1, console)
    left = int(table.row_sizes[0]) - preview.SHOWN_TOKENS
    assert left > 0 and f"and {left} more tokens of this document" in console.export_text()
