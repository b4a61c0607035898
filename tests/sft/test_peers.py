"""The settings of transformers and TRL: every field of their classes is known here, served, harmless or refused; the
defaults of a script are TRL's; and transformers' parser takes our class."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

import fullshard
from fullshard.config.errors import ConfigError
from fullshard.config.options import names_of, options_of
from fullshard.sft.checked_run import sharding_settings, with_precision
from fullshard.sft.cli_args import CommandConfig, config_of
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.unused_options import PEER_NAMES

TRL_DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5, "gradient_checkpointing": True, "bf16": None, "logging_steps": 10, "report_to": "none",
}  # fmt: skip
"""Where TRL's `SFTConfig` has another default than transformers' `TrainingArguments`."""
OUR_DEFAULTS = {"output_dir": "trainer_output", "pad_to_multiple_of": None, "fsdp_config": None, "torch_compile": None}
"""Where ours is another text for the same, which transformers fills in when an object is made, or another choice, which
docs/coming-from.md lists."""


# --- every field ----------------------------------------------------------------------------------------------------


def test_every_name_is_known() -> None:
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert theirs <= PEER_NAMES, "a new field: serve it, or say in sft/unused_options.py why not"
    assert not PEER_NAMES - set(names_of(SFTConfig)), "every name is an option, or is in sft/unused_options.py"
    for name in PEER_NAMES:
        assert sum(name in option.names for option in options_of(SFTConfig)) == 1, name


def test_every_name_of_trl_is_known() -> None:
    import trl

    theirs = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    assert theirs == PEER_NAMES
    ours = {name: option.default for option in options_of(SFTConfig) for name in option.names}
    made = trl.SFTConfig(output_dir="x", use_cpu=True)
    for field in dataclasses.fields(trl.SFTConfig):
        if field.default is not dataclasses.MISSING and field.name not in OUR_DEFAULTS:
            assert ours[field.name] in (field.default, getattr(made, field.name)), field.name


def test_defaults_are_those_of_trl() -> None:
    ours = {name: option.default for option in options_of(SFTConfig) for name in option.names}
    for field in dataclasses.fields(TrainingArguments):
        if field.default is not dataclasses.MISSING and field.name not in OUR_DEFAULTS:
            assert ours[field.name] == TRL_DEFAULTS.get(field.name, field.default), field.name


def test_which_defaults_of_the_command_are_others() -> None:
    script, command = ({o.name: o.default for o in options_of(kind)} for kind in (SFTConfig, CommandConfig))
    assert {name: (command[name], script[name]) for name in script if script[name] != command[name]} == {
        "learning_rate": (5e-5, 2e-5), "gradient_checkpointing": (False, True), "bf16": (False, None),
        "torch_dtype": ("auto", None), "report_to": ("auto", "none"), "add_special_tokens": (False, None),
        "logging_steps": (None, 10),
    }  # fmt: skip


def test_an_object_of_theirs_is_taken_whole(tmp_path: Path) -> None:
    """Also values that are false: `report_to="none"` is stored as an empty list."""
    changes: dict[str, Any] = {
        "average_tokens_across_devices": False, "dataloader_pin_memory": False, "report_to": "none",
        "logging_steps": 0.1, "tf32": False, "save_strategy": "best", "eval_strategy": "epoch", "max_grad_norm": 0.0,
        "seed": 0, "lr_scheduler_kwargs": {}, "fp16": True,
    }  # fmt: skip
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **changes)
    config, notes = config_of(given)
    assert {name: getattr(config, name) for name in changes} == changes and notes == []
    assert not config.gradient_checkpointing and config.learning_rate == 5e-5, "transformers' own defaults"
    assert isinstance(config.eval_strategy, str) and str(config.eval_strategy) == "epoch"
    assert config_of(TrainingArguments(report_to=["none"], use_cpu=True))[0].report_to == "none"


def test_nested_settings(tmp_path: Path) -> None:
    import torch
    from transformers import BitsAndBytesConfig

    given = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, gradient_checkpointing_kwargs={"use_reentrant": True},
        accelerator_config={"even_batches": False, "gradient_accumulation_kwargs": {"sync_each_batch": False}},
    )  # fmt: skip
    config, _ = config_of(given)
    assert config.use_reentrant and not config.sync_each_batch
    packed = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    loading = {
        "dtype": torch.float16, "attn_implementation": "eager", "quantization_config": packed, "device_map": "auto",
        "rope_theta": 5.0, "revision": "v2", "use_cache": False,
    }  # fmt: skip
    config = SFTConfig(model_init_kwargs=loading)
    assert (config.torch_dtype, config.attn_implementation, config.revision) == ("float16", "eager", "v2")
    assert (config.use_4bit_quantization, config.use_nested_quant) == (True, True)
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage_dtype) == ("bfloat16", "bfloat16")
    assert config.config_changes == {"rope_theta": 5.0}
    json.loads(config.to_json_string())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel is True, which is not supported: Liger's kernels are not used"),
        ({"deepspeed": {"zero": 3}}, "deepspeed is"), ({"auto_find_batch_size": True}, "auto_find_batch_size is True"),
        ({"debug": "underflow_overflow"}, "debug is 'underflow_overflow'"), ({"ignore_data_skip": True}, "ignore_data"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches is True"),
        ({"accelerator_config": {"split": True}}, "accelerator_config: split is True.*expected dispatch_batches"),
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "gradient_checkpointing_kwargs has selective"),
        ({"model_init_kwargs": {"quantization_config": {"quant_method": "gptq"}}}, "quantization_config is gptq"),
        ({"include_num_input_tokens_seen": True}, "without padding: set non_padding"),
        ({"logging_steps": 1.5}, "logging_steps is 1.5; expected a whole number"),
        ({"eval_steps": 0}, "eval_steps is 0"),
        ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "choose one"),
        ({"gradient_checkpointing": False, "activation_offloading": True}, "it needs gradient_checkpointing"),
        ({"max_length": 3, "max_seq_len": 4}, "max_seq_len and another name of .* are both set"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type: expected linear"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, got 'fast'"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTConfig(**settings)


def test_a_field_of_a_newer_version_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        invented: int = 3

    @dataclasses.dataclass
    class Own(Newer):
        chosen_by_script: int = 1

    Newer.__module__ = "transformers.training_args"
    assert config_of(Newer(use_cpu=True))[0].use_cpu
    config, _ = config_of(Own(use_cpu=True, chosen_by_script=5))
    assert dataclasses.replace(config, seed=1).chosen_by_script == 5, "callbacks can read a script's own field"
    with pytest.raises(ConfigError, match="Newer has invented=4, a setting that is not supported here"):
        config_of(Newer(use_cpu=True, invented=4))


# --- a script's configuration object --------------------------------------------------------------------------------


def test_other_names_can_be_read_and_set() -> None:
    config = SFTConfig("folder", max_length=7)
    assert (config.output_dir, config.max_seq_len, config.max_length, config.max_seq_length) == ("folder", 7, 7, 7)
    config.evaluation_strategy = "epoch"  # type: ignore[attr-defined]
    again = dataclasses.replace(config, seed=3, async_save=True)
    assert (again.eval_strategy, again.seed, again.async_save, again.max_length) == ("epoch", 3, True, 7)
    with pytest.raises(ConfigError, match="takes one value without a name"):
        SFTConfig("folder", "more")


def test_methods_of_training_arguments(tmp_path: Path) -> None:
    ours = SFTConfig(str(tmp_path), warmup_steps=0.2, per_device_train_batch_size=3, hub_token="secret", use_cpu=True)
    theirs = TrainingArguments(str(tmp_path), warmup_steps=0.2, per_device_train_batch_size=3, use_cpu=True)
    names = (
        "world_size", "process_index", "local_process_index", "n_gpu", "device", "train_batch_size", "eval_batch_size",
        "should_log", "should_save", "parallel_mode", "ddp_timeout_delta",
    )  # fmt: skip
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_warmup_steps(33) == theirs.get_warmup_steps(33) == 7
    assert ours.get_process_log_level() == theirs.get_process_log_level()
    shown = json.loads(ours.to_json_string())
    assert shown["hub_token"] == "<HUB_TOKEN>" and shown["output_dir"] == str(tmp_path)
    assert ours.to_sanitized_dict()["train_batch_size"] == 3
    with ours.main_process_first(desc="nothing"):
        pass
    setters = [name for name, _ in inspect.getmembers(TrainingArguments, callable) if name.startswith("set_")]
    assert setters
    for args in (ours, theirs):
        for name in setters:
            getattr(args, name)(**{"model_id": "x"} if name == "set_push_to_hub" else {})
    changed = {field.name for field in dataclasses.fields(theirs)} - {"hub_token", "logging_dir"}
    assert config_of(ours)[0].learning_rate == theirs.learning_rate
    assert {n: getattr(ours, n) for n in changed & {"eval_strategy", "optim", "num_train_epochs", "push_to_hub"}} == {
        n: getattr(theirs, n) for n in changed & {"eval_strategy", "optim", "num_train_epochs", "push_to_hub"}
    }
    with pytest.raises(AttributeError, match="SFTConfig has no setting or method 'set_nothing'"):
        ours.set_nothing()


def test_precision_that_a_script_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(**settings: Any) -> tuple[Any, str, Any]:
        config = SFTConfig(**settings)
        config, engine = with_precision(config, sharding_settings(config, None, []))
        return config.bf16, engine.mixed_precision, config.torch_dtype

    monkeypatch.setattr("fullshard.device.accelerator.computes_bf16", lambda: False)
    assert choose() == (False, "no", "float32")
    assert choose(use_cpu=True) == (True, "bf16", "auto"), "as TRL"
    monkeypatch.setattr("fullshard.device.accelerator.computes_bf16", lambda: True)
    assert choose() == (True, "bf16", "auto")
    assert choose(fp16=True) == (False, "fp16", "auto")
    assert choose(bf16=False) == (False, "no", "float32")
    assert choose(bf16=False, dtype="bfloat16") == (False, "no", "bfloat16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert choose() == (False, "fp16", "auto")


# --- parsers --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """What scripts define beside the trainer's arguments; the names are settings of ours too."""

    model_name_or_path: str = "a"
    dataset_name: str = "b"
    lora_r: int = 1
    use_reentrant: bool = True
    max_seq_length: int = 2


def test_transformers_parser_takes_our_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = HfArgumentParser((Model, fullshard.SFTConfig))
    flags = [
        "--output_dir",
        str(tmp_path),
        "--learning-rate",
        "1e-3",
        "--lora_r",
        "7",
        "--packing",
        "--report_to",
        "none",
    ]
    flags += [
        "--no_gradient_checkpointing",
        "--lr_scheduler_kwargs",
        '{"num_cycles": 1}',
        "--lr_scheduler_type",
        "cosine",
    ]
    flags += ["--gradient_checkpointing_kwargs", '{"use_reentrant": true}', "--bf16", "true", "--eval_steps", "5"]
    model, config = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    assert model.lora_r == 7 and isinstance(config, fullshard.SFTConfig)
    assert (config.learning_rate, config.packing, config.gradient_checkpointing) == (1e-3, True, False)
    assert config.lr_scheduler_kwargs == {"num_cycles": 1} and config.use_reentrant and config.bf16
    assert config.eval_steps == 5 and config.lora_r == 64
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--eval_strategy", "nothing"], look_for_args_file=False)
    offered = {action.dest for action in parser._actions if isinstance(action, argparse.Action)}
    assert offered >= PEER_NAMES
    parser.print_help()
    shown = " ".join(capsys.readouterr().out.split())
    assert "The peak learning rate. (default: 2e-05)" in shown


@pytest.mark.parametrize("kind", ["dict", "json", "yaml"])
def test_parsers_of_files(kind: str, tmp_path: Path) -> None:
    values = {"output_dir": str(tmp_path), "learning_rate": 1e-3, "lr_scheduler_kwargs": {}, "model_name_or_path": "m"}
    parser, file = HfArgumentParser((Model, fullshard.SFTConfig)), tmp_path / f"run.{kind}"
    file.write_text(json.dumps(values).replace("0.001", "1.0e-3"))
    read = {"dict": lambda: parser.parse_dict(values), "json": lambda: parser.parse_json_file(str(file)),
            "yaml": lambda: parser.parse_yaml_file(str(file))}[kind]  # fmt: skip
    model, config = read()
    assert (model.model_name_or_path, config.learning_rate, config.output_dir) == ("m", 1e-3, str(tmp_path))


def test_a_subclass_of_a_script(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(fullshard.SFTConfig):
        own: int = dataclasses.field(default=3, metadata={"help": "of the script"})

    globals()["Mine"] = Mine
    (config,) = HfArgumentParser(Mine).parse_args_into_dataclasses(
        ["--own", "4", "--output_dir", "x"], look_for_args_file=False
    )
    config = dataclasses.replace(config, chunked_loss=False, max_length=9)
    kept, _ = config_of(config, packing=True)
    assert (kept.own, kept.chunked_loss, kept.max_length, kept.packing) == (4, False, 9, True)
    assert type(kept) is Mine


def test_trl_s_parser(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: x\nmax_length: 9\nlearning_rate: 1.0e-3\nmodel_name_or_path: m\npacking: true\n")
    program = (
        "import sys, fullshard, trl; from trl import ModelConfig, ScriptArguments, TrlParser\n"
        "parser = TrlParser((ScriptArguments, fullshard.SFTConfig, ModelConfig))\n"
        "script, config, model = parser.parse_args_and_config()\n"
        "print(config.max_length, config.learning_rate, config.packing, model.model_name_or_path)"
    )
    words = [sys.executable, "-c", program, "--config", str(file), "--learning_rate", "2e-3", "--dataset_name", "d"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.stdout.strip() == "9 0.002 True m", done.stderr
