"""What a run does besides training: evaluation, best model, early stopping, limits, results, scripts of others."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import fullshard
from fullshard.checkpoint.manifest import published_steps
from fullshard.config.errors import ConfigError, TrainingError
from fullshard.distributed import runtime
from fullshard.fsdp.state_dict import whole_value
from fullshard.planner.memory import MemoryOptions, StateMemory, state_memory
from fullshard.planner.optimizer_state import OptimizerMemory
from fullshard.planner.verdict import check_state
from fullshard.report.html_report import render
from fullshard.report.run_record import read_run
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import chat_rows, make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_folder, make_model


def whole_values(model: Any) -> dict[str, torch.Tensor]:
    parameters = [p for unit in model._fullshard_engine.units for p in unit.parameters]
    return {p.plan.name: whole_value(p).detach().clone() for p in parameters}


@ranks(2)
def test_a_run_from_files_leaves_what_transformers_reads(tmp_path: Path) -> None:
    if runtime.is_main():
        make_folder(tmp_path)
    runtime.barrier()
    config = settings(
        tmp_path, max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=1, per_device_train_batch_size=2,
        eval_strategy="epoch", max_seq_len=64, report_to="auto", log_entropy=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=str(tmp_path / "model"), args=config, train_dataset=str(tmp_path / "data" / "train.jsonl"),
        eval_dataset=str(tmp_path / "data" / "test.jsonl"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    out = tmp_path / "out"
    read = AutoModelForCausalLM.from_pretrained(out)
    values = whole_values(trainer.model)
    for name, value in read.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert AutoTokenizer.from_pretrained(out).get_vocab() == trainer.tokenizer.get_vocab()
    assert published_steps(out / "checkpoints") == [4]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4] and records[-2]["eval_loss"] > 0
    needed = {"loss", "learning_rate", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens", "epoch"}
    assert needed | {"tokens_per_second", "memory_gib"} <= records[0].keys()
    saved = json.loads((out / "settings.json").read_text())
    assert saved["settings"]["max_steps"] == 4 and saved["ranks"] == 2 and saved["versions"]["torch"]
    assert "max_steps" in (out / "README.md").read_text()
    assert (out / "report.html").read_text() == render(read_run(out))  # as `fullshard report` makes it again
    runtime.barrier()


@ranks(2)
def test_an_adapter_is_peft_s(tmp_path: Path) -> None:
    if runtime.is_main():
        make_folder(tmp_path)
    runtime.barrier()
    config = settings(
        tmp_path, max_steps=3, use_peft_lora=True, lora_r=4, lora_dropout=0.0, lora_target_modules="all-linear",
        learning_rate=1e-2, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = SFTTrainer(model=str(tmp_path / "model"), args=config, train_dataset=text_rows(20))
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate(text_rows(6, seed=3))
    assert "entropy" not in trainer.state.log_history[0] and "eval_entropy" not in metrics, (
        "no entropy unless asked for"
    )
    evaluated = metrics["eval_loss"]
    read = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer, total, count = make_tokenizer(), 0.0, 0
    for row in text_rows(6, seed=3):
        tokens = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*tokens, tokenizer.eos_token_id]])
        loss = read(input_ids=ids, labels=ids).loss
        total, count = total + float(loss.detach()) * (ids.shape[1] - 1), count + ids.shape[1] - 1
    assert evaluated == pytest.approx(total / count, abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()[name])
    runtime.barrier()


@ranks(2)
def test_new_adapters_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """First values are a function of seed and name: rank 0 alone would draw the same."""
    if runtime.is_main():
        make_folder(tmp_path)
    runtime.barrier()
    seen = []
    for seed in (1, 1, 2):
        config = settings(tmp_path / f"{len(seen)}", max_steps=1, seed=seed, use_peft_lora=True, lora_r=4)
        trainer = SFTTrainer(model=str(tmp_path / "model"), args=config, train_dataset=text_rows(8))
        seen.append({k: v for k, v in whole_values(trainer.prepare().model).items() if "lora_A" in k})
    assert all(torch.equal(seen[0][k], seen[1][k]) and not torch.equal(seen[0][k], seen[2][k]) for k in seen[0])
    bound = max(float(v.abs().max()) for v in seen[0].values())
    assert 0 < bound <= 32**-0.5, "PEFT's range for a layer of 32 inputs"


@ranks(2)
def test_best_model_limit_and_early_stopping(tmp_path: Path) -> None:
    """A learning rate that ruins the model: the best evaluation is an early one, is kept, and has the last word."""
    config = settings(
        tmp_path, max_steps=12, learning_rate=0.5, warmup_steps=6, per_device_train_batch_size=4, save_strategy="steps",
        save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_total_limit=1,
        early_stopping_patience=3,
    )  # fmt: skip
    trainer = train(make_model(), config, eval_dataset=text_rows(12, seed=5))
    best, last = trainer.state.best_global_step, trainer.state.global_step
    assert best < last == best + 3 < 12
    assert published_steps(tmp_path / "out" / "checkpoints") == [best, last], "the best and the newest stay"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


@ranks(1)
def test_the_best_evaluation_is_saved_where_no_save_is_due(tmp_path: Path) -> None:
    config = settings(
        tmp_path, max_steps=6, learning_rate=0.5, warmup_steps=6, save_strategy="steps", save_steps=4, logging_steps=6,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = train(make_model(), config, eval_dataset=text_rows(12, seed=5))
    best = trainer.state.best_global_step
    assert best is not None and best % 4 and best < 6, "between two saves, and before the end"
    assert best in published_steps(tmp_path / "out" / "checkpoints")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)
    elsewhere = dataclasses.replace(
        config, output_dir=str(tmp_path / "second"), max_steps=8, learning_rate=0.0,
        resume_from_checkpoint=str(tmp_path / "out" / "checkpoints"),
    )  # fmt: skip
    second = train(make_model(), elsewhere, eval_dataset=text_rows(12, seed=5))
    assert second.state.best_global_step in published_steps(tmp_path / "second" / "checkpoints"), "the other's is not"


@ranks(2)
@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_loss_that_is_no_number(choice: str, tmp_path: Path) -> None:
    """Token 7's embedding is NaN: the row that has it gives no loss; its step is refused or left out, on all ranks."""
    model = make_model()
    rows = [{"input_ids": [11, 12, 13, 14 + i]} for i in range(16)]
    rows[9] = {"input_ids": [11, 7, 13, 14]}
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = settings(
        tmp_path, max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=2, on_nonfinite_loss=choice,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, tokenizer=make_tokenizer())
    if choice == "stop":
        with pytest.raises(TrainingError, match=r"step 3: the loss is nan; it came from rows 9 of .*not changed"):
            trainer.train()
        assert trainer.loop.progress.step == 2
    else:
        trainer.train()
        assert trainer.loop.progress.skipped == 1 and trainer.loop.progress.step == 4
    after = whole_values(trainer.model)
    changed = [n for n in after if not torch.equal(after[n].nan_to_num(), before[n].nan_to_num())]
    assert changed and all(torch.isfinite(after[n]).all() for n in after if "embed_tokens" not in n)


SNIPPET = """
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    args=training_args,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    peft_config=peft_config,
    packing=data_args.packing,
    dataset_kwargs={
        "append_concat_token": data_args.append_concat_token,
        "add_special_tokens": data_args.add_special_tokens,
    },
    dataset_text_field=data_args.dataset_text_field,
    max_seq_length=data_args.max_seq_length,
)
trainer.accelerator.print(f"{trainer.model}")
if model_args.use_peft_lora:
    # handle PEFT+FSDP case
    trainer.model.print_trainable_parameters()
    if getattr(trainer.accelerator.state, "fsdp_plugin", None):
        from peft.utils.other import fsdp_auto_wrap_policy

        fsdp_plugin = trainer.accelerator.state.fsdp_plugin
        fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(trainer.model)

# train
checkpoint = None
if training_args.resume_from_checkpoint is not None:
    checkpoint = training_args.resume_from_checkpoint
trainer.train(resume_from_checkpoint=checkpoint)

# saving final model
if trainer.is_fsdp_enabled:
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
trainer.save_model()
"""
"""The training part of PEFT's guide; only where its names come from differs."""


@ranks(2)
def test_the_guide_s_snippet(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=2, save_steps=2, report_to="none",
        use_cpu=True, logging_steps=1, learning_rate=1e-2,
    )  # fmt: skip
    data = types.SimpleNamespace(
        packing=True,
        append_concat_token=True,
        add_special_tokens=False,
        dataset_text_field="content",
        max_seq_length=48,
    )
    names = {
        "SFTTrainer": fullshard.SFTTrainer, "model": make_model(), "tokenizer": make_tokenizer(),
        "training_args": arguments, "train_dataset": [{"content": r["text"]} for r in text_rows(40)],
        "eval_dataset": None, "data_args": data,
        "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1),
        "model_args": types.SimpleNamespace(use_peft_lora=True),
    }  # fmt: skip
    exec(SNIPPET, names)
    trainer: Any = names["trainer"]
    assert AutoPeftModelForCausalLM.from_pretrained is not None
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and trainer.state.global_step == 4
    # Another guide's way to go on: the folder of a checkpoint, or the one that holds them.
    reached = losses(trainer)
    before = whole_values(trainer.model)
    trainer.accelerator.load_state(str(tmp_path / "out" / "checkpoints" / "step-2"))
    assert trainer.loop.progress.step == 2
    assert any(not torch.equal(v, before[n]) for n, v in whole_values(trainer.model).items())
    trainer.accelerator.load_state(str(tmp_path / "out"))
    assert trainer.loop.progress.step == 4 and len(reached) == 4
    assert all(torch.equal(v, before[n]) for n, v in whole_values(trainer.model).items())
    with pytest.raises(ConfigError, match=r"FULL_STATE_DIC.*did you mean FULL_STATE_DICT"):
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DIC")


@ranks(2)
def test_evaluate_before_training_and_chats(tmp_path: Path) -> None:
    config = settings(tmp_path, max_steps=1, chat_template_format="chatml", assistant_only_loss=True, max_seq_len=200)
    trainer = SFTTrainer(
        model=make_model(),
        args=config,
        train_dataset=chat_rows(8),
        eval_dataset=chat_rows(5, seed=2),
        tokenizer=make_tokenizer(),
    )
    first = trainer.evaluate()
    assert first["eval_loss"] == pytest.approx(6.03, abs=0.1), "an untrained model knows nothing"
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first["eval_loss"]


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "checkpointing, reentrant": ({"gradient_checkpointing": True, "use_reentrant": True}, {}, 1e-5),
    "gradients reduced once": ({"sync_each_batch": False}, {}, 1e-5),
    "offload": ({}, {"offload_params": True}, 1e-5),
    "bf16": ({"bf16": True}, {}, 0.05),
}
MORE_CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "checkpointing": ({"gradient_checkpointing": True}, {}, 1e-5),
    "whole logits": ({"chunked_loss": False}, {}, 1e-5),
    "threads": ({"dataloader_num_workers": 2}, {}, 0),
    "saving in the background": ({"async_save": True, "save_strategy": "steps", "save_steps": 2}, {}, 0),
    "plain AdamW": ({"optim": "adamw_torch"}, {}, 1e-5),
    "fp16": ({"fp16": True}, {}, 0.05),
    "bf16, checkpointing": ({"bf16": True, "gradient_checkpointing": True}, {}, 0.05),
}


@ranks(2)
def test_choices_that_do_not_change_the_curve(tmp_path: Path) -> None:
    compare(CHOICES, tmp_path)


@pytest.mark.slow
@ranks(2)
def test_more_choices_that_do_not_change_the_curve(tmp_path: Path) -> None:
    compare(MORE_CHOICES, tmp_path)


def compare(choices: dict[str, tuple[dict[str, Any], dict[str, Any], float]], folder: Path) -> None:
    share = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    plain = losses(train(make_model(), settings(folder / "plain", **share)))
    assert plain[0] - plain[-1] > 0.05, "a curve that goes nowhere shows nothing"
    for name, (changes, engine, tolerance) in choices.items():
        other = losses(train(make_model(), settings(folder / name, **share, **changes), engine=engine))
        assert other == pytest.approx(plain, abs=tolerance), name


def test_what_does_not_fit_is_said_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least 4.00 GiB of host memory \(shards 1.00 GiB, .* has 3.00 GiB"):
        check_state(StateMemory(2**30, 2**30, 2 * 2**30), 3 * 2**30, "host memory")


@ranks(1)
def test_the_plan_s_bytes(tmp_path: Path) -> None:
    model = make_model()
    count = sum(p.numel() for p in model.parameters())
    config = settings(tmp_path, max_steps=1, progress="quiet")
    trainer = SFTTrainer(model=model, args=config, train_dataset=text_rows(4), tokenizer=make_tokenizer())
    options = MemoryOptions(accelerator=False, optimizer=OptimizerMemory("adamw_torch"))
    state = state_memory(trainer.prepare().model.plan, options)
    assert state == StateMemory(4 * count, 4 * count, 8 * count)
