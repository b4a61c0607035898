"""Resuming an adapter: training starts from exactly its values, with its own rank, targets and tokens."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.config.errors import ConfigError, WeightsError
from fullshard.data.chat_template import prepare_tokenizer
from fullshard.distributed import runtime
from fullshard.sft.adapter import resumed_config
from fullshard.sft.checked_run import check_paths
from fullshard.sft.cli_args import parse
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings
from tests.sft.test_tokens_train import NEW, folder, logits_of, start
from tests.sft.tiny import make_folder, make_model


def test_settings_that_the_resumed_adapter_decides_are_reported(tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0).save_pretrained(tmp_path)
    lines: list[str] = []
    changes = {"lora_r": 8, "lora_dropout": 0.1, "lora_target_modules": "all-linear", "lora_experts": False}
    resumed_config(SFTConfig(**changes), tmp_path, lines.append)
    assert sorted(line.split()[0] for line in lines) == sorted(changes), "also a value that is the usual one"
    lines.clear()
    resumed_config(SFTConfig(), tmp_path, lines.append)
    assert not lines


@pytest.mark.slow
@ranks(2)
def test_training_goes_on_from_the_adapter_s_values(tmp_path: Path) -> None:
    folder(tmp_path)
    first = start(tmp_path, max_steps=4)
    first.train()
    first.save_model()
    expected = first.evaluate(str(tmp_path / "chats" / "test.jsonl"))["eval_loss"]
    out = first.args.output_dir
    runtime.barrier()
    changes: dict[str, Any] = {"use_peft_lora": False, "lora_r": 9, "chat_template_format": "none"}
    changes |= {"output_dir": str(tmp_path / "second")}
    second = start(tmp_path, max_steps=3, adapter_name_or_path=out, **changes)
    assert second.model.peft_config["default"].r == 4, "its own"
    assert second.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
    tokenizer = second.tokenizer
    loaded = PeftModel.from_pretrained(_resized(tmp_path), out)
    torch.testing.assert_close(logits_of(second.model, tokenizer), logits_of(loaded, tokenizer), rtol=1e-4, atol=1e-5)
    second.train()
    second.save_model()
    assert losses(second)[-1] < expected
    loaded = PeftModel.from_pretrained(_resized(tmp_path), second.args.output_dir)
    torch.testing.assert_close(logits_of(second.model, tokenizer), logits_of(loaded, tokenizer), rtol=1e-4, atol=1e-5)
    third = start(
        tmp_path, max_steps=1, model=out, **changes
    )  # a folder with an adapter may be named as the model, too
    assert str(third.parts.adapter) == out and third.model.peft_config["default"].r == 4


def _resized(place: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    base.resize_token_embeddings(NEW + 2)
    return base


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "head": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "resized": {"target_modules": ["q_proj"], "trainable_token_indices": [NEW, NEW + 1]},
    "pissa": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"},
    "vera": {"target_modules": ["q_proj", "down_proj"], "projection_prng_key": 9},
}


def others_adapter(place: Path, kind: str) -> Path:
    """An adapter that PEFT made; `resized` brings whole tables with it."""
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    tokenizer = make_tokenizer()
    if kind == "resized":
        prepare_tokenizer(tokenizer, "chatml")
        model.resize_token_embeddings(NEW + 2)
    torch.manual_seed(3)
    kind_of: Any = (
        functools.partial(VeraConfig, r=3) if kind == "vera" else functools.partial(LoraConfig, r=3, lora_alpha=8)
    )
    made = get_peft_model(model, kind_of(task_type="CAUSAL_LM", **KINDS[kind]))
    for name, p in made.named_parameters():
        if p.requires_grad and "magnitude" not in name:
            p.data.normal_(std=0.1)
    made.save_pretrained(place / kind)
    if kind == "resized":
        tokenizer.save_pretrained(place / kind)
    return place / kind


@ranks(2)
@pytest.mark.parametrize(
    "kind", ["resized", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "resized")]
)
@pytest.mark.parametrize("held", ["files", pytest.param("memory", marks=pytest.mark.slow)])
def test_adapters_of_others(kind: str, held: str, tmp_path: Path) -> None:
    if runtime.is_main():
        make_folder(tmp_path, vocab_size=NEW)
        others_adapter(tmp_path, kind)
    runtime.barrier()
    config = settings(
        tmp_path, max_steps=2, adapter_name_or_path=str(tmp_path / kind), max_seq_len=128, **global_batch(2)
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model") if held == "memory" else None
    data = str(tmp_path / "data" / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / ("resized" if kind == "resized" else "model"))
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, tokenizer=tokenizer)

    def loaded(adapter: Any) -> Any:
        base = _resized(tmp_path) if kind == "resized" else AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return logits_of(PeftModel.from_pretrained(base, adapter), tokenizer)

    got = logits_of(trainer.prepare().model, tokenizer)
    torch.testing.assert_close(got, loaded(tmp_path / kind), rtol=1e-4, atol=1e-5)
    trainer.train()
    trainer.save_model()
    got = logits_of(trainer.model, tokenizer)
    torch.testing.assert_close(got, loaded(config.output_dir), rtol=1e-4, atol=1e-5)
    if kind == "resized" and runtime.is_main():
        stored = [load_file(Path(f) / "adapter_model.safetensors") for f in (tmp_path / kind, config.output_dir)]
        assert stored[0].keys() == stored[1].keys(), "the tables it brought stay with it"


# --- what cannot be gone on with --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("adapters"), rows=8, vocab_size=NEW)
    others_adapter(made, "lora")
    return made


def paths(place: Path, *words: str) -> Any:
    data = ["--dataset_name", str(place / "chats"), "--output_dir", str(place / "out")]
    return check_paths(parse([*data, *words]).config)


def test_an_adapter_names_its_base(place: Path) -> None:
    named = str(place / "lora")
    for option in ("--adapter_name_or_path", "--model_name_or_path"):
        assert paths(place, option, named) == (str(place / "model"), named)


def test_bad_adapters_are_named_before_torch(place: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(place / "lora", broken)
    (broken / "adapter_model.safetensors").unlink()
    lost = tmp_path / "lost"
    shutil.copytree(place / "lora", lost)
    config = json.loads((lost / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/nowhere/model"}))
    nameless = tmp_path / "nameless"
    shutil.copytree(place / "lora", nameless)
    (nameless / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    garbled = tmp_path / "garbled"
    shutil.copytree(place / "lora", garbled)
    (garbled / "adapter_config.json").write_text("{")
    adapter = "--adapter_name_or_path"
    for words, said in (
        ((adapter, str(tmp_path / "absent")), r"adapter_name_or_path: .*absent does not exist"),
        ((adapter, str(place / "model")), r"model has no adapter_config.json; it holds"),
        ((adapter, str(broken)), r"broken has no adapter_model.safetensors; it holds"),
        (
            (adapter, str(lost)),
            r"lost was trained on /nowhere/model, which does not exist here; give the model's folder",
        ),
        ((adapter, str(nameless)), r"nameless does not name the model it was trained on"),
        (
            (adapter, str(place / "lora"), "--model_name_or_path", str(place / "lora")),
            r"holds an adapter, and adapter_",
        ),
        ((), r"model_name_or_path is missing"),
        (
            (adapter, str(place / "lora"), "--chat_template_path", "own.jinja"),
            r"own.jinja does not exist; expected a Jinja",
        ),
        (
            (adapter, str(place / "lora"), "--chat_template_path", str(place / "data")),
            r"data has no chat_template.jinja or",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            paths(place, *words)
    with pytest.raises(WeightsError, match=r"adapter_config.json cannot be read"):
        paths(place, adapter, str(garbled))
    program = "import sys; import fullshard.sft.checked_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@ranks(1)
def test_what_does_not_go_together(tmp_path: Path) -> None:
    make_folder(tmp_path, rows=8, vocab_size=NEW)
    adapter = others_adapter(tmp_path, "lora")
    rows = str(tmp_path / "chats" / "train.jsonl")

    def begin(model: Any = None, peft_config: Any = None, **changes: Any) -> Any:
        config = settings(tmp_path, adapter_name_or_path=str(adapter), **changes)
        return SFTTrainer(model=model, args=config, train_dataset=rows, peft_config=peft_config)

    with pytest.raises(ConfigError, match=r"was trained without <\|im_start\|> <\|im_end\|>, which the template needs"):
        begin(chat_template_format="chatml")
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="has an adapter already, and peft_config asks for another"):
        begin(peft_config=lora)
    with pytest.raises(ConfigError, match="adapter_name_or_path: the model has an adapter already"):
        begin(model=get_peft_model(make_model(vocab_size=NEW), lora))
    make_model(vocab_size=NEW, hidden_size=16).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    config, data = settings(tmp_path, adapter_name_or_path=str(adapter)), str(tmp_path / "data" / "train.jsonl")
    with pytest.raises(
        WeightsError, match=r"lora was trained on \S+/model, but \S+/other is a different .*fingerprint"
    ):
        SFTTrainer(model=str(tmp_path / "other"), args=config, train_dataset=data)
    shutil.rmtree(tmp_path / "model")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "warn_once", lambda key, text: said.append(text))
        trainer = SFTTrainer(model=str(tmp_path / "other"), args=config, train_dataset=data)
    assert f"{tmp_path / 'model'}, which was not found. {tmp_path / 'other'} cannot be compared with it" in said[0]
    shapes = r"trained on \S+/model, does not match the model \S+/other: .*lora_A.weight has shape \(3, 32\)"
    with pytest.raises(WeightsError, match=shapes):
        trainer.prepare()
