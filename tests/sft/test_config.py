"""The settings: one class gives flags, YAML keys and checks; others' arguments are understood."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments, get_scheduler

import fullshard.data
import fullshard.launch
import fullshard.planner
import fullshard.sft
from fullshard.config.errors import ConfigError
from fullshard.config.options import options_of, parse_flags
from fullshard.launch.config import launch_options
from fullshard.launch.sft_command import refuse_unknown, split
from fullshard.optim.lr_schedule import check_schedule, factor
from fullshard.sft.adapter import requested_adapter_config
from fullshard.sft.cli_args import CommandConfig, command_options, config_of, parse
from fullshard.sft.sft_config import SFTConfig

SEED_FLAGS = """
--seed 100 --model_name_or_path meta-llama/Llama-2-70b-hf --dataset_name smangrul/ultrachat-10k-chatml
--chat_template_format chatml --add_special_tokens False --append_concat_token False --splits train,test --max_seq_len
2048 --num_train_epochs 1 --logging_steps 5 --log_level info --logging_strategy steps --evaluation_strategy epoch
--save_strategy epoch --push_to_hub --hub_private_repo True --hub_strategy every_save --bf16 True --packing True
--learning_rate 1e-4 --lr_scheduler_type cosine --weight_decay 1e-4 --warmup_ratio 0.0 --max_grad_norm 1.0 --output_dir
llama-sft-lora-fsdp --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 4
--gradient_checkpointing True --use_reentrant False --dataset_text_field content --use_flash_attn True --use_peft_lora
True --lora_r 8 --lora_alpha 16 --lora_dropout 0.1 --lora_target_modules all-linear --use_4bit_quantization False
""".split()  # noqa: SIM905 - as a command


def test_the_guide_s_command() -> None:
    config = parse(SEED_FLAGS).config
    assert config.changed() == {
        "model_name_or_path": "meta-llama/Llama-2-70b-hf", "dataset_name": "smangrul/ultrachat-10k-chatml",
        "chat_template_format": "chatml", "append_concat_token": False, "use_flash_attn": True,
        "use_peft_lora": True, "lora_r": 8, "lora_dropout": 0.1,
        "lora_target_modules": "all-linear", "dataset_text_field": "content", "packing": True, "max_length": 2048,
        "output_dir": "llama-sft-lora-fsdp", "seed": 100, "num_train_epochs": 1.0, "gradient_accumulation_steps": 4,
        "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "weight_decay": 1e-4, "bf16": True,
        "gradient_checkpointing": True, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 5,
        "log_level": "info", "push_to_hub": True, "hub_private_repo": True,
    }  # fmt: skip


def test_defaults_of_the_guide_s_script() -> None:
    config = parse([]).config
    assert (config.learning_rate, config.gradient_checkpointing, config.bf16) == (5e-5, False, False)
    lora = requested_adapter_config(parse(["--use_peft_lora"]).config, None)
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (64, 16, 0.1)
    assert config.lora_target_modules == "q_proj,k_proj,v_proj,o_proj,down_proj,up_proj,gate_proj"
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage_dtype) == ("auto", "uint8")
    assert (config.bnb_4bit_quant_type, config.chat_template_format, config.splits) == ("nf4", "none", "train,test")


def test_a_file_and_flags_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning-rate: 1e-3\nmax_length: 77\nbf16: yes\nsave_total_limit: 3\nmax_steps: 1e3\n")
    config = parse([str(file), "--learning_rate=2e-3", "--no-bf16", "--packing"]).config
    assert (config.learning_rate, config.max_seq_len, config.bf16, config.packing) == (2e-3, 77, False, True)
    assert config.save_total_limit == 3 and config.max_steps == 1000


def test_the_launcher_s_words_are_told_apart() -> None:
    mine, theirs = split(
        ["run.yaml", "--num_processes", "2", "--bf16", "True", "--use-cpu", "--config_file=x.yaml", "--seed", "3", "-q"]
    )
    assert mine == ["run.yaml", "--bf16", "True", "--seed", "3"]
    assert theirs == ["--num_processes", "2", "--use-cpu", "--config_file=x.yaml", "-q"]
    assert split(["--use_cpu", "true", "--fp16"]) == (["--fp16"], ["--use_cpu", "true"])


TRACKIO = ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
"""Read by transformers' callback."""


@pytest.mark.parametrize("name", [o.name for o in options_of(SFTConfig) if not (o.no_op or o.refused)])
def test_every_option_has_help_and_is_used(name: str) -> None:
    """An option that no code reads would be a lie."""
    option = next(o for o in options_of(SFTConfig) if o.name == name)
    assert option.help
    assert name in {*_names_read(), *TRACKIO}, "no code reads this option"


@functools.cache
def _names_read() -> set[str]:
    found: set[str] = set()
    for room in (fullshard.sft, fullshard.data, fullshard.launch, fullshard.planner):
        for file in Path(room.__path__[0]).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and file.name in ("sft_config.py", "cli_args.py", "training_arguments.py")
                ):
                    found.add(node.value)
    return found


def test_transformers_arguments_are_understood(tmp_path: Path) -> None:
    given = TrainingArguments(
        output_dir=str(tmp_path), learning_rate=3e-4, lr_scheduler_type="cosine", eval_strategy="steps", eval_steps=7,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}, label_smoothing_factor=0.1,
        use_cpu=True, report_to="none", ddp_bucket_cap_mb=5,
    )  # fmt: skip
    config, notes = config_of(given, packing=True)
    assert (config.learning_rate, config.lr_scheduler_type, config.eval_strategy) == (3e-4, "cosine", "steps")
    assert config.use_reentrant and config.gradient_checkpointing and config.packing and config.eval_steps == 7
    assert config.use_cpu and config.label_smoothing_factor == 0.1 and config.report_to == "none"
    assert notes == ["no effect here (see docs/options.md): ddp_bucket_cap_mb"]
    with pytest.raises(ConfigError, match="unknown setting 'lerning_rate'; did you mean learning_rate"):
        config_of({"lerning_rate": 1})


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("linear", {}), ("cosine", {}), ("cosine", {"num_cycles": 0.75}), ("constant", {}),
        ("constant_with_warmup", {}), ("cosine_with_min_lr", {"min_lr_rate": 0.1}), ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": 0.06, "num_cycles": 1}), ("inverse_sqrt", {"timescale": 7}),
        ("cosine_with_restarts", {}), ("cosine_with_restarts", {"num_cycles": 3}), ("polynomial", {}),
        ("polynomial", {"lr_end": 0.1, "power": 2.0}), ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.06, "warmup_lr_rate": 0.25}),
        ("warmup_stable_decay", {"num_decay_steps": 6, "min_lr_ratio": 0.2}),
        ("warmup_stable_decay", {"num_decay_steps": 6, "warmup_type": "cosine", "decay_type": "linear"}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 3, "decay_type": "1-sqrt",
                                 "warmup_type": "1-sqrt"}),
    ],
)  # fmt: skip
def test_schedules_are_transformers(kind: str, given: dict[str, Any]) -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.6)
    theirs = get_scheduler(kind, optimizer, 5, 20, given)
    said = check_schedule(kind, given, 0.6)
    for step in range(20):
        assert 0.6 * factor(kind, step, 5, 20, said) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_settings_of_a_schedule_in_flags_and_files(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr_scheduler_type: inverse_sqrt\nlr_scheduler_kwargs: {timescale: 9}\n")
    assert parse([str(tmp_path / "run.yaml")]).config.schedule_settings() == {"timescale": 9}
    flags = ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs"]
    for text in ('{"min_lr": 1e-6}', "min_lr=1e-6"):
        said = parse([*flags, text, "--learning_rate", "1e-4"]).config.schedule_settings()
        assert said["min_lr_rate"] == pytest.approx(0.01)
    given = TrainingArguments(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.2})
    assert config_of(given)[0].schedule_settings()["min_lr_rate"] == 0.2


def test_warm_up() -> None:
    assert SFTConfig(warmup_ratio=0.1).warmup(95) == 10
    assert SFTConfig(warmup_ratio=0.1, warmup_steps=3).warmup(95) == 3
    assert SFTConfig(warmup_steps=0.5).warmup(95) == 48


def test_other_names_work_in_a_script_too() -> None:
    named = SFTConfig(max_length=77, evaluation_strategy="epoch", dtype="bfloat16")  # type: ignore[call-arg]
    assert (named.max_seq_len, named.eval_strategy, named.torch_dtype) == (77, "epoch", "bfloat16")
    with pytest.raises(ConfigError, match="unknown setting 'learnin_rate'; did you mean learning_rate"):
        SFTConfig(learnin_rate=1)  # type: ignore[call-arg]


# --- names of other tools ---------------------------------------------------------------------------------------------


def test_names_of_other_tools_are_answered_with_ours(tmp_path: Path) -> None:
    """As flags, as keys of the file, and in scripts; no such name is one of our own, or stands for two settings."""
    options = (*command_options(), *launch_options())
    ours = {name for one in options for name in (*one.names, *one.flags)}
    theirs = [(name, one) for one in options for name in one.elsewhere]
    assert len(theirs) > 80 and not ours & {name for name, _ in theirs}
    assert len({name for name, _ in theirs}) == len(theirs)
    for name, one in theirs:
        with pytest.raises(ConfigError, match=rf"unknown flag --{name}; did you mean {one.key}\?"):
            refuse_unknown([f"--{name}", "1"], options, "sft")
    (tmp_path / "run.yaml").write_text("lora_rank: 8\n")
    with pytest.raises(ConfigError, match=r"run.yaml:1: lora_rank: unknown key; did you mean lora_r\?"):
        parse([str(tmp_path / "run.yaml")])
    with pytest.raises(ConfigError, match=r"unknown setting 'lora_rank'; did you mean lora_r\?"):
        SFTConfig(lora_rank=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"unknown flag --nproc-per-node; did you mean num_processes\?"):
        parse_flags(["--nproc-per-node", "2"], launch_options(), "launch")


# --- log lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (18, 1), (39, 1), (40, 2), (100, 5), (200, 10), (100_000, 10)])
def test_log_lines_follow_the_length_of_the_run(steps: int, every: int) -> None:
    """Where nothing is said; a value that is given is kept, and evaluations do not follow."""
    config = CommandConfig()
    assert config.logging_steps is None and config.logs_every(steps) == every and config.evaluates_every == 10
    assert parse(["--logging_steps", "10"]).config.logging_steps == 10 == SFTConfig().logging_steps
    assert steps / every >= min(steps, 20)
