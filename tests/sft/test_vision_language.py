"""Vision-language models are trained on text: the language model trains, and what is saved is the whole model.

The oracle is transformers' class of the whole model on one device, with everything but its language model frozen, and
PEFT's adapter on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Blip2Config, TrainerCallback

from fullshard.config.errors import ConfigError, DataError
from fullshard.distributed import runtime
from fullshard.lora.language_model import left_out
from fullshard.models.causal_lm import embedding_rows
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.planned_model import planned_model
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.report.small_results import command
from tests.sft.runs import global_batch, losses, plain_losses, settings
from tests.sft.test_adapter_kinds import logits_of, values_of
from tests.sft.test_qlora import FOUR_BITS
from tests.sft.vision_language import config_of, make_folder, whole_model

KINDS = ("gemma3", "qwen2_5_vl", "mistral3", "llama4")
LORA = {"use_peft_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
ROWS = text_rows(40)
LANGUAGE = {"llama4": "language_model."}


def start(place: Path, kind: str, name: str = "run", **changes: Any) -> Any:
    if runtime.is_main() and not (place / "model").exists():
        make_folder(place, kind)
    runtime.barrier()
    values: dict[str, Any] = {"max_steps": 4, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    config = settings(place / name, **{**values, **global_batch(runtime.world_size()), **changes})
    return SFTTrainer(model=str(place / "model"), args=config, train_dataset=str(place / "data" / "train.jsonl"))


def whole(folder: Path) -> Any:
    model, report = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def in_language_model(kind: str, name: str) -> bool:
    return name.startswith((LANGUAGE.get(kind, "model.language_model."), "lm_head."))


def plain(made: Any, trainer: Any) -> list[float]:
    """A plain loop over the whole model on one device."""
    config, table, order = trainer.args, trainer.parts.train, trainer.prepare().loader.sampler.order
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return plain_losses(made.train(), optimizer, schedule, table, order, config)


def check_full(place: Path, kind: str) -> None:
    trainer = start(place, kind)
    assert all(p.is_meta for part in left_out(trainer.parts.model).values() for p in part.parameters())
    assert left_out(trainer.parts.model)
    oracle = whole(place / "model")
    for name, p in oracle.named_parameters():
        p.requires_grad_(in_language_model(kind, name))
    expected = plain(oracle, trainer)
    trainer.train()
    assert losses(trainer) == pytest.approx(expected, abs=2e-5)
    trainer.save_model(place / "saved")
    runtime.barrier()
    source, saved = load_file(place / "model/model.safetensors"), load_file(place / "saved/model.safetensors")
    assert source.keys() == saved.keys()
    assert (place / "saved" / "preprocessor_config.json").is_file()
    found, before, trained = whole(place / "saved"), whole(place / "model").state_dict(), values_of(trainer.model)
    assert type(found) is type(oracle)
    for name, value in found.named_parameters():
        assert torch.equal(value, trained[name] if in_language_model(kind, name) else before[name]), name
    assert all(not torch.equal(trained[name], before[name]) for name in trained if "q_proj" in name)
    torch.testing.assert_close(logits_of(found), logits_of(oracle), rtol=0, atol=1e-3)


@ranks(2)
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_the_language_model_trains_and_the_whole_model_is_saved(kind, tmp_path):
    check_full(tmp_path, kind)


@ranks(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind, tmp_path):
    check_full(tmp_path, kind)


def check_lora(place: Path, kind: str, **changes: Any) -> None:
    trainer = start(place, kind, **{**LORA, **changes})
    ready = trainer.prepare()
    values = {name: value for name, value in values_of(ready.model).items() if "lora_" in name}
    trainer.train()
    trainer.save_model(place / "adapter")
    runtime.barrier()
    loaded = PeftModel.from_pretrained(whole(place / "model"), place / "adapter", is_trainable=True)
    keys = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    assert values.keys() == keys.keys()
    assert all("vision" not in name and "visual" not in name for name in keys)
    for name, value in values_of(ready.model).items():
        if "lora_" in name:
            assert torch.equal(keys[name].cpu(), value.cpu()), name
    if not changes:
        for name, p in keys.items():
            p.data.copy_(values[name])
        assert losses(trainer) == pytest.approx(plain(loaded, trainer), abs=2e-5)


@ranks(2)
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_an_adapter_is_that_of_the_whole_model(kind, tmp_path):
    check_lora(tmp_path, kind)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"lora_target_modules": "q_proj,v_proj"}, FOUR_BITS], ids=["names", "4 bits"])
def test_adapters_are_in_the_language_model_alone(changes, tmp_path):
    check_lora(tmp_path, "gemma3", **changes)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_vocabulary_that_grows(kind, changes, tmp_path):
    """A chat template's tokens get rows in the language model's embedding and head; the plan knows them."""
    if runtime.is_main():
        make_folder(tmp_path, kind, vocab_size=400)
    runtime.barrier()
    config = settings(
        tmp_path / "run", max_steps=2, chat_template_format="chatml", max_length=200, skip_plan=False, packing=True,
        learning_rate=1e-3, **global_batch(runtime.world_size()), **changes,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=str(tmp_path / "model"), args=config, train_dataset=str(tmp_path / "chats" / "train.jsonl")
    )
    trainer.train()
    assert not runtime.is_main() or trainer.estimate is not None
    trainer.save_model(tmp_path / "saved")
    runtime.barrier()
    if changes:
        model = whole(tmp_path / "model")
        model.resize_token_embeddings(embedding_rows(trainer.model), mean_resizing=False)
        PeftModel.from_pretrained(model, tmp_path / "saved")
    else:
        model = whole(tmp_path / "saved")
        assert model.get_input_embeddings().weight.shape[0] == model.config.get_text_config().vocab_size > 400


@ranks(1)
def test_settings_that_name_a_part_that_text_does_not_use(tmp_path):
    start(tmp_path, "gemma3", freeze="vision_tower,embed_tokens")  # frozen already
    with pytest.raises(ConfigError, match="modules_to_save names multi_modal_projector, but text does not use"):
        start(tmp_path, "gemma3", **LORA, modules_to_save="multi_modal_projector")
    with pytest.raises(ConfigError, match="freeze: 'vision_towers' matches no parameter"):
        start(tmp_path, "gemma3", freeze="vision_towers")


@ranks(1)
def test_a_model_that_does_not_run_on_text_is_refused_by_name(tmp_path):
    config = Blip2Config(vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Blip2ForConditionalGeneration does not run on text alone .*pixel_values"):
        planned_model(settings(tmp_path / "run"), EngineSettings(), tmp_path, 2, device="cpu")


@ranks(2)
@pytest.mark.slow
def test_parameters_that_text_does_not_use_stay_as_they_are(tmp_path):
    """Experts for images inside the language model get no gradient, so weight decay leaves them alone, as on one
    device."""
    trainer = start(tmp_path, "ernie4_5_vl_moe", weight_decay=0.5)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    runtime.barrier()
    before, found = whole(tmp_path / "model").state_dict(), whole(tmp_path / "saved").state_dict()
    for_images = [name for name in before if "vision_moe" in name]
    assert for_images and all(torch.equal(before[name], found[name]) for name in for_images)
    assert not any(torch.equal(before[name], found[name]) for name in before if "text_moe.experts" in name)


# --- around a run -----------------------------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(changes, tmp_path):
    whole_run = start(tmp_path, "gemma3", "whole", **changes)
    whole_run.train()
    saves = {**changes, "save_strategy": "steps", "save_steps": 2}
    stopped = start(tmp_path, "gemma3", "stopped", **saves)
    stopped.add_callback(Stop(2))
    stopped.train()
    again = start(tmp_path, "gemma3", "stopped", **saves, resume_from_checkpoint="true")
    again.train()
    expected = values_of(whole_run.model)
    for name, value in values_of(again.model).items():
        assert torch.equal(value, expected[name]), name


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step == self.step


@ranks(1)
@pytest.mark.slow
def test_checkpoints_and_adapters_become_the_whole_model(tmp_path):
    trainer = start(tmp_path, "qwen2_5_vl", save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    code, *_ = command("export", str(tmp_path / "run/out/checkpoints/step-4"), str(tmp_path / "exported"))
    assert code == 0
    same_files(tmp_path / "saved", tmp_path / "exported")
    adapter = start(tmp_path, "qwen2_5_vl", "adapter", **LORA)
    adapter.train()
    adapter.save_model(tmp_path / "tuned")
    code, *_ = command("export", str(tmp_path / "tuned"), str(tmp_path / "merged"), "--merge")
    assert code == 0
    expected = PeftModel.from_pretrained(whole(tmp_path / "model"), tmp_path / "tuned").merge_and_unload()
    expected.save_pretrained(tmp_path / "by peft")
    same_files(tmp_path / "by peft", tmp_path / "merged")


def same_files(one: Path, other: Path) -> None:
    values, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert values.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    assert (other / "preprocessor_config.json").is_file()
    whole(other)


@ranks(1)
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_chat(changes, tmp_path):
    trainer = start(tmp_path, "gemma3", max_steps=1, **changes)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "Gemma3ForConditionalGeneration.from_pretrained" in card and "Auto" not in card
    code, out, errors = command("chat", str(tmp_path / "saved"), "--device", "cpu", "--max_new_tokens", "4",
                                "--prompt", "the old bird")  # fmt: skip
    assert code == 0, errors
    assert out.strip()


@ranks(1)
def test_plan_and_show_price_the_language_model(tmp_path):
    make_folder(tmp_path, "gemma3")
    words = ["--model_name_or_path", str(tmp_path / "model"), "--num_processes", "2", "--max_length", "48"]
    code, out, errors = command("plan", *words, "--json")
    assert code == 0, errors
    estimate = json.loads(out)
    assert [name for name in estimate["layers"] if "language_model" not in name] == []
    assert len(estimate["layers"]) == 3
    assert any("model.vision_tower" in line and "not loaded" in line for line in estimate["assumptions"])
    code, out, errors = command("show", *words)
    assert code == 0, errors
    assert "Siglip" not in out and "Gemma3DecoderLayer" in out


@ranks(1)
@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_plan_of_few_layers_is_that_of_all(kind, changes, tmp_path):
    config_of(kind, num_hidden_layers=9).save_pretrained(tmp_path / "model")
    config = settings(tmp_path / "run", **changes)
    few, every = (
        planned_model(config, EngineSettings(), tmp_path / "model", 2, device="cpu", condensed=condensed)
        for condensed in (True, False)
    )
    assert few.plan == every.plan and few.layers == every.layers
    assert len(dict(few.model.named_parameters())) < len(dict(every.model.named_parameters()))
    assert not any("vision" in name for unit in few.plan.units for p in unit.parameters for name in p.names)


@ranks(1)
def test_a_plan_leaves_out_layers_that_the_forward_pass_does_not_call(tmp_path):
    """A model in memory keeps its vision tower, whose layers a plan would look for in the trace."""
    config = settings(tmp_path / "run", max_steps=1, skip_plan=False)
    trainer = SFTTrainer(model=whole_model("gemma3"), args=config, train_dataset=ROWS, tokenizer=make_tokenizer())
    before = {name: p.detach().clone() for name, p in trainer.parts.model.named_parameters()}
    trainer.train()
    assert trainer.estimate is not None
    assert all("language_model" in name for name in trainer.estimate.layers)
    for name, value in values_of(trainer.model).items():
        assert in_language_model("gemma3", name) or torch.equal(value, before[name]), name


@ranks(1)
def test_a_script_names_layers_as_in_peft(tmp_path):
    """`q_proj` is in the vision tower too; the files say that it is left out."""
    make_folder(tmp_path, "gemma3")
    config = settings(tmp_path / "run", max_steps=1)
    trainer = SFTTrainer(
        model=str(tmp_path / "model"),
        args=config,
        train_dataset=ROWS,
        peft_config=LoraConfig(target_modules=["q_proj"]),
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(whole(tmp_path / "model"), tmp_path / "saved")
    assert {n for n, _ in loaded.named_parameters() if "lora_A" in n} == {
        f"base_model.model.model.language_model.layers.{i}.self_attn.q_proj.lora_A.default.weight" for i in range(3)
    }


@ranks(1)
@pytest.mark.parametrize(
    "row",
    [{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hello"}]},
                   {"role": "assistant", "content": "yes"}]},
     {"text": "hello", "images": ["a.png"]}],
)  # fmt: skip
def test_images_are_refused_by_name(row, tmp_path):
    make_folder(tmp_path, "gemma3")
    config = settings(tmp_path / "run", max_steps=1, chat_template_format="chatml")
    with pytest.raises(DataError, match=r"image.*vision-language model"):
        SFTTrainer(model=str(tmp_path / "model"), args=config, train_dataset=[row]).train()
