"""Which base an adapter belongs to: what its files say, from any folder, and that another model is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import AutoPeftModelForCausalLM, PeftConfig

from fullshard import load_pretrained
from fullshard.config.errors import ConfigError, WeightsError
from fullshard.launch.find_result import find_result
from fullshard.sft.checked_run import base_of_adapter
from fullshard.sft.trainer import SFTTrainer
from fullshard.weights.adapter_base import RECORD, check_base, lasting_name, read_record, write_record
from fullshard.weights.merge_adapter import merge_adapter
from fullshard.weights.source_files import fingerprint_of
from tests.data.tiny import text_rows
from tests.pool import ranks
from tests.report.small_results import LORA, add_adapter, chat_model, command
from tests.sft.runs import settings


def named(adapter: Path, base: str | None) -> Path:
    """The adapter with another name of its base, as PEFT might have written it."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
    (adapter / RECORD).unlink(missing_ok=True)
    return adapter


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bases")
    chat_model(place / "base")
    chat_model(place / "other", seed=1)
    add_adapter(place / "base", place / "peft")
    return place


@ranks(1)
def test_a_run_s_adapter_works_from_any_folder_and_knows_its_base(tmp_path: Path) -> None:
    """The base is named by a relative path; another model of the same shape, under the same name, is refused."""
    chat_model(tmp_path / "model", vocab_size=416)
    chat_model(tmp_path / "elsewhere" / "model", vocab_size=416, seed=1)
    home = os.getcwd()
    config = settings(tmp_path, max_steps=1, save_strategy="steps", per_device_train_batch_size=2, **LORA)
    try:
        os.chdir(tmp_path)
        trainer = SFTTrainer(model="model", args=config, train_dataset=text_rows(8))
        trainer.train()
        trainer.save_model()
    finally:
        os.chdir(home)
    out, other = tmp_path / "out", tmp_path / "elsewhere" / "model"
    assert PeftConfig.from_pretrained(str(out)).base_model_name_or_path == str(tmp_path / "model")
    assert f'base_model: "{tmp_path / "model"}"' in (out / "README.md").read_text()
    AutoPeftModelForCausalLM.from_pretrained(out)
    assert read_record(out)["fingerprint"] == fingerprint_of(tmp_path / "model")
    exported, early = tmp_path / "exported", tmp_path / "early"
    assert command("export", str(out), str(exported))[0] == 0
    assert command("export", str(out), str(early), "--checkpoint", "latest")[0] == 0
    both = rf"{tmp_path}/model, but {other} is a different model or has changed since .*remove {RECORD}"
    for adapter in (out, exported, early):
        with pytest.raises(WeightsError, match=both):
            check_base(adapter, other)
        with pytest.raises(WeightsError, match=both):
            merge_adapter(adapter, tmp_path / "merged", base=other, progress=False)
        shutil.copytree(tmp_path / "model", tmp_path / "moved", dirs_exist_ok=True)
        check_base(adapter, tmp_path / "moved")
    with pytest.raises(WeightsError, match=both):
        load_pretrained(other, adapter=out)
    again = settings(tmp_path / "again", max_steps=1, adapter_name_or_path=str(out))
    with pytest.raises(WeightsError, match=both):
        SFTTrainer(model=str(other), args=again, train_dataset=text_rows(8))
    code, _, said = command("chat", str(out), "--base", str(other), "--prompt", "one")
    assert code == 2 and "is a different model" in said and len(said.splitlines()) == 1
    code, _, said = command("export", str(out), str(tmp_path / "wrong"), "--base", str(other))
    assert code == 2 and not (tmp_path / "wrong").exists()


def test_adapters_of_peft_are_known_by_what_they_name(made: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(made / "peft", tmp_path / "peft")
    check_base(adapter, made / "base")
    with pytest.raises(WeightsError, match=rf"{made}/base, but {made}/other is a different model"):
        check_base(adapter, made / "other")  # same shapes
    check_base(adapter, shutil.copytree(made / "base", tmp_path / "a copy"))
    named(adapter, str(made / "other"))
    check_base(adapter, made / "other")  # "if the difference is meant, name the new one"
    snapshot = tmp_path / "hub" / "models--org--Llama-3" / "snapshots" / "0123"
    shutil.copytree(made / "base", snapshot)
    assert lasting_name(snapshot) == "org/Llama-3" and lasting_name("org/Llama-3") == "org/Llama-3"
    named(adapter, "org/Llama-3")
    for fits in (snapshot, "other-org/llama-3", "/models/Llama-3", "/models/Llama-3-bnb-4bit"):
        check_base(adapter, fits)
    for other in (made / "base", "org/Llama-3-Instruct", "/models/llama-3.1"):
        with pytest.raises(
            WeightsError, match=rf"was trained on org/Llama-3, and {other} appears to be a different model"
        ):
            check_base(adapter, other)
    check_base(named(adapter, None), made / "other")  # nobody knows: shapes alone


def test_a_4_bit_copy_and_its_original_belong_together(made: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(made / "peft", tmp_path / "peft")
    packed = shutil.copytree(made / "other", tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"load_in_4bit": True}}))
    check_base(adapter, packed)
    check_base(named(adapter, str(packed)), made / "base")
    write_record(adapter, "org/Llama-3-bnb-4bit", (str(packed), {"fingerprint": fingerprint_of(packed)}))
    check_base(adapter, packed)
    check_base(adapter, made / "base")
    with pytest.raises(WeightsError, match=r"was trained on org/Llama-3-bnb-4bit, but .*changed is a different model"):
        check_base(adapter, _changed(packed))


def _changed(model: Path) -> Path:
    other = shutil.copytree(model, model.with_name("changed"))
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    return other


def test_a_relative_base_is_found_from_the_folders_above_the_adapter(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made / "base", tmp_path / "project" / "models" / "base")
    adapter = shutil.copytree(made / "peft", tmp_path / "project" / "runs" / "first" / "out")
    named(adapter, "models/base")
    monkeypatch.chdir(tmp_path)
    expected = str(tmp_path / "project" / "models" / "base")
    assert base_of_adapter(adapter) == expected and find_result(str(adapter)).base == expected
    named(adapter, "./lost")
    with pytest.raises(ConfigError, match=r"\./lost does not exist; set the folder .* with --base"):
        find_result(str(adapter))
    named(adapter, "lost/model")
    for words in (["chat", "--prompt", "one"], ["export", str(tmp_path / "to"), "--merge"]):
        code, _, said = command(words[0], str(adapter), *words[1:])
        assert code == 2 and "'lost/model' is neither a local directory nor a model that can be downloaded" in said
        assert said.rstrip().endswith("with --base.") and len(said.splitlines()) == 1


def test_a_name_that_does_not_exist_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once, for all files together; nothing tries again and again."""
    import huggingface_hub

    asked: list[Any] = []

    def refuse(name: str, **options: Any) -> str:
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for words in (["chat", "nobody/nothing", "--prompt", "one"], ["export", "nobody/nothing", "no/such/folder"]):
        code, _, said = command(*words)
        assert code == 2 and said.startswith("fullshard: 'nobody/nothing' is neither a local directory nor a model")
        assert len(said.splitlines()) == 1
    assert asked == ["nobody/nothing"] * 2
