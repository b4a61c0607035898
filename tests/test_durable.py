"""What gets its name by a rename is on the disk before: else a power failure leaves files without content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.consolidate import merge_weights
from fullshard.config.configfile import write_file
from fullshard.config.durable import sync_tree
from fullshard.config.paths import replace_text, replaced_files
from fullshard.data.encode import TextSettings
from fullshard.data.sources import row_source
from fullshard.data.token_table import make_table
from fullshard.launch.export import Choices, export
from fullshard.launch.find_result import find_result
from tests.data.tiny import make_tokenizer, text_rows
from tests.report.small_results import LORA, run

LEAVES = (".gone", "/damaged", ".deleted")
"""Ends of names to which things are moved to be removed."""


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The renames so far; asserts that each file that is renamed has been synced since it was last written."""
    synced: dict[tuple[int, int], tuple[int, int]] = {}
    seen: list[str] = []
    fsync = os.fsync

    def state(found: os.stat_result) -> tuple[int, int]:
        return found.st_size, found.st_mtime_ns

    def record(handle: int) -> None:
        fsync(handle)
        found = os.fstat(handle)
        synced[found.st_dev, found.st_ino] = state(found)

    def checked(rename: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, **options: Any) -> None:
            place = Path(source)
            if not str(target).endswith(LEAVES) and not Path(target).name.startswith("."):
                files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
                for path in files:
                    found = path.stat()
                    assert synced.get((found.st_dev, found.st_ino)) == state(found), f"{path} is not on the disk"
                seen.append(str(target))
            rename(source, target, **options)

        return call

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", checked(os.replace))
    monkeypatch.setattr(os, "rename", checked(os.rename))
    return seen


def test_files_that_are_replaced(tmp_path: Path, renamed: list[str]) -> None:
    replace_text(tmp_path / "a.txt", "text")
    write_file(tmp_path / "b.yaml", {"num_processes": 2})
    with replaced_files(tmp_path / "c") as part:
        (part / "inner").mkdir()
        (part / "one").write_text("1")
        (part / "inner" / "two").write_text("2")
    make_table(row_source(text_rows(5), "rows"), make_tokenizer(), TextSettings(), tmp_path / "table")
    assert {Path(name).name for name in renamed} == {"a.txt", "b.yaml", "one", "two", "table"}
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "e").write_text("new")
    with pytest.raises(AssertionError, match="is not on the disk"):
        os.rename(tmp_path / "d", tmp_path / "f")
    sync_tree(tmp_path / "d")
    os.rename(tmp_path / "d", tmp_path / "f")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_everything_that_a_run_and_an_export_write(tmp_path: Path, kind: str, renamed: list[str]) -> None:
    folder = run(tmp_path, kind, **(LORA if kind == "lora" else {}))
    choices = Choices(merge=kind == "lora", progress=False)
    export(find_result(str(folder), None, None), tmp_path / "exported", choices)
    if kind == "full":
        merge_weights(folder / "checkpoints" / "step-4", tmp_path / "merged")
    else:
        export(find_result(str(folder), None, None), tmp_path / "adapter", Choices(progress=False))
    names = {Path(name).name for name in renamed}
    assert {"settings.json", "report.html", "step-4", "exported"} <= names
    assert {"merged"} <= names if kind == "full" else {"adapter_model.safetensors", "adapter"} <= names
