"""Every option changes the run (what is trained, logged, written, how it is computed), or says that it does not."""
# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.config.errors import ConfigError, UserError
from fullshard.config.options import options_of
from fullshard.distributed import runtime
from fullshard.sft import model_steps
from fullshard.sft.cli_args import CommandConfig
from fullshard.sft.hub import Hub
from fullshard.sft.optimizer_step import OptimizerSteps
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from fullshard.sft.unused_options import notes_without_effect, turn_on_lora
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import make_folder

TIMED = (
    "tokens_per_second", "memory_gib", "train_runtime", "train_samples_per_second", "train_steps_per_second",
    "eval_runtime", "eval_samples_per_second", "eval_steps_per_second",
)  # fmt: skip
BASE: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 2, "max_length": 24,
    "warmup_steps": 1, "weight_decay": 0.1, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
}  # fmt: skip
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
CHATS = {"dataset_name": "chats", "chat_template_format": "chatml", "max_length": 200}
LORA = {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.0}
VERA = {"peft_type": "vera", "lora_r": 4, "lora_dropout": 0.0}
PROMPT = {"peft_type": "prompt_tuning", "num_virtual_tokens": 3}
QLORA = {**LORA, "use_4bit_quantization": True}
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    # option: (what else is set, its other value)
    "tokenizer_name_or_path": ({}, "other"), "torch_dtype": ({}, "bfloat16"), "attn_implementation": ({}, "eager"),
    "chat_template_format": (CHATS, "zephyr"), "chat_template_path": (CHATS, "own.jinja"), "use_peft_lora": ({}, True), "lora_r": (LORA, 8),
    "lora_alpha": (LORA, 32), "lora_dropout": (LORA, 0.5), "lora_target_modules": (LORA, "q_proj"),
    "dataset_text_field": ({}, "other"), "dataset_columns": ({}, "text=other"), "packing": ({}, True), "max_length": ({}, 12), "overflow": ({"max_length": 8}, "drop"),
    "append_concat_token": ({}, False), "add_special_tokens": ({}, True), "eos_token": ({}, "<s>"),
    "truncation_mode": ({"max_length": 8}, "keep_end"), "packing_strategy": ({"packing": True, "max_length": 16}, "wrapped"),
    "eval_packing": ({**EVALUATES, "max_length": 48, "packing": True}, False), "shuffle_dataset": ({}, True), "dataset_kwargs": ({}, {"append_concat_token": False}),
    "assistant_only_loss": (CHATS, True), "last_turn_only_loss": (CHATS, True),
    "train_sampling_strategy": ({}, "sequential"), "data_seed": ({}, 5), "dataloader_drop_last": ({"max_steps": 20, "per_device_train_batch_size": 3}, True),
    "dataloader_num_workers": ({}, 2), "cache_dir": ({}, "cache 2"), "output_dir": ({}, "elsewhere"), "seed": ({}, 7),
    "num_train_epochs": ({"max_steps": -1, "num_train_epochs": 0.2}, 0.3), "max_steps": ({}, 3),
    "per_device_train_batch_size": ({}, 3), "per_device_eval_batch_size": (EVALUATES, 1), "gradient_accumulation_steps": ({}, 1),
    "sync_each_batch": ({}, False), "learning_rate": ({}, 1e-4), "lr_scheduler_type": ({}, "linear"),
    "warmup_ratio": ({"warmup_steps": 0}, 0.5), "warmup_steps": ({}, 2), "optim": ({}, "sgd"), "optim_args": ({"optim": "sgd"}, {"momentum": 0.9}), "weight_decay": ({}, 0.9),
    "adam_beta1": ({}, 0.5), "adam_beta2": ({}, 0.5), "adam_epsilon": ({}, 1e-2), "max_grad_norm": ({"optim": "sgd"}, 0.01),
    "bf16": ({}, True), "fp16": ({}, True), "gradient_checkpointing": ({}, True),
    "use_reentrant": ({"gradient_checkpointing": True}, True), "chunked_loss": ({}, False), "loss_chunk_tokens": ({}, 3),
    "log_entropy": ({}, True),
    "eval_strategy": ({}, "epoch"), "eval_steps": (EVALUATES, 1), "eval_on_start": (EVALUATES, True),
    "save_strategy": ({}, "no"), "save_steps": ({}, 3), "save_total_limit": ({}, 1), "save_dtype": ({}, "float16"),
    "async_save": ({}, True), "early_stopping_patience": ({**EVALUATES, "eval_steps": 1, "learning_rate": 2.0}, 1),
    "metric_for_best_model": (EVALUATES, "eval_entropy"), "greater_is_better": (EVALUATES, True),
    "early_stopping_threshold": ({**EVALUATES, "eval_steps": 1, "early_stopping_patience": 1}, 1e9),
    "load_best_model_at_end": ({**EVALUATES, "learning_rate": 2.0}, True), "logging_strategy": ({}, "epoch"),
    "logging_steps": ({}, 1), "logging_first_step": ({}, True), "run_name": ({}, "mine"),
    "eval_samples": (EVALUATES, 2), "sample_prompts": ({**EVALUATES, "eval_samples": 1}, "prompts.txt"),
    "sample_max_new_tokens": ({**EVALUATES, "eval_samples": 1}, 3),
    "push_to_hub": ({}, True), "hub_strategy": ({"push_to_hub": True}, "end"), "fsdp": ({}, "shard_grad_op"), "fsdp_config": ({}, "section.json"), "ddp_timeout": ({}, 77.0),
    "progress": ({}, "json"), "log_level": ({}, "error"), "adapter_dtype": (LORA, "bfloat16"),
    "bnb_4bit_compute_dtype": (QLORA, "bfloat16"), "bnb_4bit_quant_storage_dtype": (QLORA, "float16"),
    "bnb_4bit_quant_type": (QLORA, "fp4"), "lr_scheduler_kwargs": ({}, {"num_cycles": 1.0}),
    "peft_type": (LORA, "vera"), "use_rslora": (LORA, True), "use_dora": (LORA, True), "init_lora_weights": (LORA, "olora"),
    "modules_to_save": (LORA, "lm_head"), "trainable_token_indices": (LORA, "5,6"), "freeze": ({}, "layers.0"),
    "vera_d_initial": (VERA, 0.3), "projection_prng_key": (VERA, 4), "save_projection": (VERA, False),
    "num_virtual_tokens": (PROMPT, 4), "prompt_tuning_init_text": (PROMPT, "old bird"), "prefix_projection": ({"peft_type": "prefix_tuning"}, True),
    "encoder_hidden_size": ({"peft_type": "p_tuning"}, 7), "loraplus_lr_ratio": (LORA, 8.0), "neftune_noise_alpha": ({}, 5.0),
    "eval_delay": (EVALUATES, 3), "include_num_input_tokens_seen": ({}, "non_padding"), "save_only_model": ({}, True),
    "loss_type": ({}, "dft"), "label_smoothing_factor": ({}, 0.1), "model_init_kwargs": ({}, {"dtype": "bfloat16"}),
    "gradient_checkpointing_kwargs": ({"gradient_checkpointing": True}, {"use_reentrant": True}),
    "loraplus_lr_embedding": ({**LORA, "lora_target_modules": "q_proj,embed_tokens", "loraplus_lr_ratio": 2.0}, 1e-3),
}  # fmt: skip
ELSEWHERE = {
    "model_name_or_path": "test_bad_input", "dataset_name": "test_bad_input", "splits": "test_row_formats", "overwrite": "test_output_dir",
    "resume": "test_resume", "resume_from_checkpoint": "test_trainer", "use_4bit_quantization": "test_qlora",
    "base_dtype": "test_fp8", "dequantize": "test_shipped", "use_8bit_quantization": "test_bad_input", "use_nested_quant": "test_bad_input", "use_unsloth": "test_bad_input",
    "on_nonfinite_loss": "test_trainer", "use_flash_attn": "needs a GPU and flash-attn", "torch_compile": "test_compilation",
    "adapter_name_or_path": "test_resume_adapter", "dataset_config_name": "test_row_formats", "dataset_weights": "test_mixture",
    "stopping_strategy": "test_mixture", "val_size": "test_data_options", "on_bad_row": "test_data_options", "streaming": "test_stream",
    "shuffle_buffer_size": "test_stream", "completion_only_loss": "test_chat", "preview": "test_preview", "preview_rows": "test_preview",
    "prompt_format": "test_data_options", "dataset_settings": "test_data_options", "sample_by": "test_data_options",
    "dataloader_pin_memory": "needs a GPU", "report_to": "test_loggers", "hub_model_id": "test_hub", "hub_private_repo": "test_hub",
    "trust_packing": "test_packing_check", "router_aux_loss_coef": "test_own_loss", "rope_scaling": "test_rope_scaling",
    "optim_target_modules": "test_optimizers", "fused_lora": "test_fused_sharded", "lora_experts": "test_all_linear",
    "sequence_slices": "test_sequence_slices", "offload_embedding": "test_host_weights", "offload_experts": "test_host_weights", "skip_plan": "test_plan_first",
    "torch_compile_backend": "test_compilation", "torch_compile_mode": "needs a compiler",
    "trust_remote_code": "test_peers", "use_cpu": "test_peers", "accelerator_config": "test_peers", "activation_offloading": "test_peers",
    "disable_tqdm": "test_peers", "tf32": "needs a GPU", "full_determinism": "test_peers", "torch_empty_cache_steps": "needs a GPU",
    "logging_dir": "test_loggers", "project": "test_loggers", "trackio_space_id": "test_loggers", "trackio_bucket_id": "test_loggers",
    "trackio_static_space_id": "test_loggers", "hub_token": "test_hub", "hub_revision": "test_hub", "hub_always_push": "test_hub",
    "average_tokens_across_devices": "test_peer_runs", "prediction_loss_only": "test_peer_runs",
    "padding_free": "test_prepared_rows", "pad_token": "test_prepared_rows",
    "pad_to_multiple_of": "test_prepared_rows", "dataset_num_proc": "test_prepared_rows", "skip_prepare_dataset": "test_prepared_rows",
}  # fmt: skip
"""Options that other tests change, and those that this machine cannot show."""


BY_DATA = ("dataloader_drop_last",)
"""Options whose effect needs other data, not other settings."""


def test_every_option_is_accounted_for() -> None:
    named = {o.name for o in options_of(SFTConfig) if not (o.no_op or o.refused)}
    assert named == CHANGES.keys() | ELSEWHERE.keys() and not CHANGES.keys() & ELSEWHERE.keys()


def holds_optimizer(checkpoint: Path) -> bool:
    return checkpoint.is_dir() and any("exp_avg" in file.read_text() for file in checkpoint.rglob("*.json"))


def picture(place: Path, name: str, changes: dict[str, Any], events: list[Any]) -> dict[str, Any]:
    """What a run did, as far as anyone can tell, times aside."""
    data = place / changes.pop("dataset_name", "data")
    values = {**BASE, "output_dir": str(place / f"out {name}"), **changes}
    for key in (
        "tokenizer_name_or_path",
        "cache_dir",
        "output_dir",
        "fsdp_config",
        "sample_prompts",
        "chat_template_path",
    ):
        if key in values and "/" not in str(values[key]):
            values[key] = str(place / values[key])
    events.clear()
    config = settings(place, **values)
    train, test = (str(data / f"{split}.jsonl") for split in ("train", "test"))
    trainer = SFTTrainer(model=str(place / "model"), args=config, train_dataset=train, eval_dataset=test)
    loop = trainer.prepare()
    held = loop.model.no_sync
    vars(loop.model)["no_sync"] = lambda: (events.append("no_sync"), held())[1]
    trainer.train()
    trainer.save_model()
    out = Path(config.output_dir)
    written: dict[str, Any] = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in list(opened.keys()):
                tensor = opened.get_tensor(key)
                written[key] = (str(tensor.dtype), round(float(tensor.float().abs().sum()), 5))
    layer = loop.model.get_base_model() if hasattr(loop.model, "get_base_model") else loop.model
    forward = vars(layer.model.layers[0]).get("forward")
    assert trainer.parts.train is not None
    return {
        "history": [{k: v for k, v in r.items() if k not in TIMED} for r in trainer.state.log_history],
        "checkpoints": sorted((p.name, holds_optimizer(p)) for p in (out / "checkpoints").iterdir()),
        "written": written,
        "samples": (out / "samples.jsonl").read_text() if (out / "samples.jsonl").exists() else "",
        "files": sorted(p.name for p in out.iterdir()),
        "best": (loop.progress.best_step, loop.progress.best_value),
        "title": (out / "report.html")
        .read_text()
        .split("<header>")[1]
        .split("</header>")[0]
        .replace(f"out {name}", ""),
        "folders": (str(trainer.parts.train.folder.parent), out.name.replace(f"out {name}", "")),
        "engine": (loop.model.plan.strategy, len(loop.model.plan.units), str(layer.config._attn_implementation)),
        "inside": (
            getattr(getattr(forward, "__func__", None), "__name__", ""),
            loop.head.head is None,
            loop.head.chunk_tokens,
            loop.loader.workers,
        ),
        "events": list(events),
        "said": (loop.reporter.mode, runtime.get_logger().level),
    }


@pytest.mark.slow
@ranks(1, timeout=400)
def test_every_option_changes_the_run(tmp_path: Path) -> None:
    make_folder(tmp_path, rows=40)
    other = make_tokenizer()
    other.add_tokens(["bird"])
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "prompts.txt").write_text("the red bird\n")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    (tmp_path / "section.json").write_text(json.dumps({"auto_wrap_policy": "NO_WRAP"}))
    for split in ("train", "test"):
        path = tmp_path / "data" / f"{split}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**r, "other": r["text"][::-1]}) + "\n" for r in rows))
    events: list[Any] = []
    before: dict[str, Any] = {}
    same, silent = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.sft.hub.Hub._why_not", lambda hub: None)
        patch.setattr(Hub, "push", lambda self, place, message: events.append("pushed"))
        patch.setattr(Hub, "_start", lambda self, work: events.append("sent"))
        _note(patch, events, CheckpointManager, "save_async", lambda kwargs: "save_async")
        _note(patch, events, model_steps, "shard_model", lambda kwargs: ("wrap", kwargs["timeout"]))
        _note(patch, events, OptimizerSteps, "_micro_batch", lambda kwargs: "micro-batch")
        for number, (name, (also, value)) in enumerate(CHANGES.items()):
            key = json.dumps(also, sort_keys=True)
            level = runtime.get_logger().level
            if key not in before:
                before[key] = picture(tmp_path, f"base {len(before)}", dict(also), events)
            after = picture(tmp_path, f"run {number}", {**also, name: value}, events)
            runtime.get_logger().setLevel(level)
            if after == before[key]:
                same.append(name)
            if also and name not in BY_DATA and not is_told({**BASE, name: value}, name):
                with contextlib.suppress(UserError):
                    if picture(tmp_path, f"alone {number}", {name: value}, events) == before["{}"]:
                        silent.append(name)
                runtime.get_logger().setLevel(level)
        again = picture(tmp_path, "again", {}, events)
        assert again == before["{}"], "a run repeats itself, or these pictures show nothing"
    assert not same
    assert not silent, "without what they need they have no effect, and nobody says so: sft/unused_options.py"


def is_told(values: dict[str, Any], name: str) -> bool:
    """Whether a run with these settings refuses this one, says that it has no effect, or what it turns on."""
    values = dict(values)
    try:
        note = turn_on_lora(values)
        notes = notes_without_effect(CommandConfig(**values), [name])
    except ConfigError:
        return True
    return note is not None or bool(notes)


def _note(patch: pytest.MonkeyPatch, events: list[Any], kind: type, name: str, told: Any) -> None:
    plain = getattr(kind, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(told(kwargs))
        return plain(self, *args, **kwargs)

    patch.setattr(kind, name, noted)
