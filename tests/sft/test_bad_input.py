"""What a user can get wrong in `fullshard sft`: one clear line, exit code 2, nothing half-written."""
# ruff: noqa: E501 - a table of cases reads best with a case per line

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.errors import UserError
from fullshard.launch.sft_command import sft
from fullshard.sft.checked_run import check_command
from fullshard.sft.cli_args import parse
from fullshard.sft.trainer import train_run
from tests.data.tiny import make_tokenizer, write_rows
from tests.pool import ranks
from tests.sft.tiny import make_folder, make_model

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "distilbert": {"model_type": "distilbert"},
    "electra": {"model_type": "electra", "architectures": ["ElectraForPreTraining"]},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
}
"""Models that are no causal language models, by what their config.json states."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("sft"), rows=12)
    (folder / "empty").mkdir()
    (folder / "noise").mkdir()
    (folder / "noise" / "train.jsonl").write_text("\n")
    (folder / "blank").mkdir()
    (folder / "blank" / "train.jsonl").write_text('{"text": ""}\n')
    for kind in ("jsonl", "parquet"):
        (folder / f"odd.{kind}").write_bytes(b"PAR1 and nothing else")
    (folder / "run.yaml").write_text("learning_rat: 1e-3\n")
    (folder / "twice.yaml").write_text("max_seq_len: 12\nmax_length: 13\n")
    (folder / "broken.yaml").write_text("seed: [1\n")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    for name, stated in ENCODERS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(stated))
    return folder


def words(place: Path, **changes: Any) -> list[str]:
    flags = {"model_name_or_path": place / "model", "dataset_name": place / "data", "output_dir": place / "out"}
    flags |= {
        "cache_dir": place / "cache",
        "report_to": "none",
        "max_steps": 1,
        "per_device_train_batch_size": 2,
    } | changes  # type: ignore[dict-item]
    return [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]


EARLY: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown flag": (lambda p: ["--lerning_rate", "1"], "unknown flag --lerning_rate; did you mean learning_rate?"),
    "not a number": (lambda p: ["--learning_rate", "fast"], "--learning_rate: expected a number, got 'fast'"),
    "not a choice": (lambda p: ["--lr_scheduler_type", "wavy"], "--lr_scheduler_type: expected linear, cosine, constant"),
    "flag without value": (lambda p: ["--learning_rate"], "--learning_rate needs a value"),
    "word that is no flag": (lambda p: ["--seed", "1", "run.yaml"], "'run.yaml' is not a flag. The file of settings comes first"),
    "unknown key in the file": (lambda p: [str(p / "run.yaml")], "run.yaml:1: learning_rat: unknown key; did you mean learning_rate?"),
    "key twice": (lambda p: [str(p / "twice.yaml")], "both set max_length; keep one"),
    "file that is no YAML": (lambda p: [str(p / "broken.yaml")], "broken.yaml:2: not YAML"),
    "no such file": (lambda p: [str(p / "nothing.yaml")], "nothing.yaml does not exist"),
    **{
        name: (
            lambda p, name=name: words(p, model_name_or_path=p / name, dataset_name=p / "nowhere"),  # type: ignore[misc]
            rf"{name} is a {name} model \(.*an encoder.*expected a causal language model.*under fullshard launch",
        )
        for name in ENCODERS
    },
    "a name of another tool": (lambda p: words(p, lora_rank=8), "unknown flag --lora_rank; did you mean lora_r\\?"),
    "no model": (lambda p: words(p, model_name_or_path=None), "model_name_or_path is missing; give --model_name_or_path"),
    "no data": (lambda p: words(p, dataset_name=None), "dataset_name is missing"),
    "model folder missing": (lambda p: words(p, model_name_or_path=p / "nowhere"), "model_name_or_path: .*nowhere does not exist"),
    "model folder without config": (lambda p: words(p, model_name_or_path=p / "data"), "has no config.json; it holds test.jsonl"),
    "data missing": (lambda p: words(p, dataset_name=p / "nowhere"), "the dataset '.*nowhere' does not exist"),
    "no file for the split": (lambda p: words(p, dataset_name=p / "empty"), "no file for the split 'train'"),
    "no evaluation split": (lambda p: words(p, dataset_name=p / "noise", eval_strategy="epoch"), "evaluation is on .eval_strategy epoch., but .*noise has no split 'test'; .*val_size"),
    "a kind of file that is not read": (lambda p: words(p, dataset_name=p / "run.yaml"), "unsupported file type '.yaml'; expected .jsonl"),
    "output is a file": (lambda p: words(p, output_dir=p / "run.yaml"), "output_dir: .*run.yaml is a file"),
    "output holds other things": (lambda p: words(p, output_dir=p / "noise"), "is not empty .* and holds no earlier run"),
    "zero rows": (lambda p: words(p, per_device_train_batch_size=0), "per_device_train_batch_size is 0; expected 1 or more"),
    "no steps": (lambda p: words(p, max_steps=0), "max_steps is 0; expected 1 or more, or -1"),
    "negative rate": (lambda p: words(p, learning_rate=-1), "learning_rate is -1.0; expected 0 or more"),
    "rate that is no number": (lambda p: words(p, learning_rate="nan"), "learning_rate: expected a number, got .nan"),
    "both precisions": (lambda p: words(p, bf16=True, fp16=True), "bf16 and fp16 are both on"),
    "8 bits": (lambda p: words(p, use_8bit_quantization=True), "8 bits .LLM.int8. are not supported"),
    "fp8 and 4 bits": (lambda p: words(p, base_dtype="fp8", use_4bit_quantization=True), "choose one"),
    "pissa in fp8": (
        lambda p: words(p, base_dtype="fp8", use_peft_lora=True, init_lora_weights="pissa"), "quantized to fp8",
    ),
    "nested alone": (lambda p: words(p, use_nested_quant=True), "it needs use_4bit_quantization"),
    "both quantisations": (lambda p: words(p, use_4bit_quantization=True, use_8bit_quantization=True), "are both on; choose one"),
    "unsloth": (lambda p: words(p, use_unsloth=True), "Unsloth's models cannot be sharded"),
    "best without evaluation": (lambda p: words(p, load_best_model_at_end=True), "load_best_model_at_end needs evaluations"),
    "resume and overwrite": (lambda p: words(p, resume=True, overwrite=True), "resume and overwrite are both on"),
    "no evaluation data": (lambda p: words(p, dataset_name=p / "data" / "train.jsonl", eval_strategy="epoch"), "train.jsonl has no split 'test'; .*val_size"),
    "no rows": (lambda p: words(p, dataset_name=p / "noise"), "noise/train.jsonl: no rows; expected at least one"),
    "a first row that is not understood": (lambda p: words(p, dataset_text_field="body"), "train.jsonl, line 1: columns text; expected .*dataset_columns"),
    "a file by another name": (lambda p: words(p, dataset_name=p / "odd.jsonl"), "odd.jsonl: the content is that of a .parquet file"),
    "half a parquet": (lambda p: words(p, dataset_name=p / "odd.parquet"), "odd.parquet cannot be read as parquet"),
    "columns that are not there": (lambda p: words(p, dataset_columns="text=body"), "line 1: dataset_columns is text=body, but the columns are text"),
    "weights of other sets": (lambda p: words(p, dataset_weights="1,2"), "dataset_weights has 2 numbers, dataset_name 1 data sets"),
    "a part of a row": (lambda p: words(p, val_size=1.5), "val_size is 1.5; expected a number of rows"),
    "no such way to begin": (lambda p: words(p, use_peft_lora=True, init_lora_weights="piss"), "init_lora_weights is 'piss'; expected true, false, gaussian"),
    "a way to begin that is not offered": (lambda p: words(p, use_peft_lora=True, init_lora_weights="eva"), "init_lora_weights is eva, which is not supported: it needs activations"),
    "loftq without 4 bits": (lambda p: words(p, use_peft_lora=True, init_lora_weights="loftq"), "loftq, which corrects quantization errors; it needs use_4bit_quantization"),
    "pissa in 4 bits": (lambda p: words(p, use_peft_lora=True, init_lora_weights="pissa", use_4bit_quantization=True), "pissa, and the model is quantized to 4 bits: .*Use loftq"),
    "pissa saved narrow": (lambda p: words(p, use_peft_lora=True, init_lora_weights="pissa", save_dtype="float16"), "save_dtype is float16, and init_lora_weights is pissa"),
    "a setting of another adapter": (lambda p: words(p, peft_type="vera", use_dora=True), "use_dora is a setting of lora adapters, and peft_type is vera"),
    "a setting without adapter": (lambda p: words(p, use_rslora=True, use_peft_lora=False), "use_rslora is a setting of lora adapters, and there is no adapter"),
    "modules to save without adapter": (lambda p: words(p, modules_to_save="lm_head"), "modules_to_save: without an adapter all modules are trained"),
    "an adapter that is not offered": (lambda p: words(p, peft_type="ia3"), "--peft_type: expected lora, vera, prompt_tuning, prefix_tuning, p_tuning, got 'ia3'"),
    "a prompt in packed rows": (lambda p: words(p, peft_type="p_tuning", packing=True), "packing is on, and the adapter is p_tuning: documents that share a row"),
    "a prefix computed again": (lambda p: words(p, peft_type="prefix_tuning", gradient_checkpointing=True), "the adapter is prefix_tuning: the prefix is in the attention cache"),
    "no floor": (lambda p: words(p, lr_scheduler_type="cosine_with_min_lr"), "which needs either min_lr .a learning rate. or min_lr_rate"),
    "no end": (lambda p: words(p, lr_scheduler_type="warmup_stable_decay"), "which needs num_decay_steps in lr_scheduler_kwargs"),
    "a setting of another schedule": (lambda p: words(p, lr_scheduler_kwargs="min_lr=1"), "linear has no setting 'min_lr'; it takes none"),
    "a shape that is none": (lambda p: words(p, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs="num_decay_steps=2,decay_type=wavy"), "decay_type is 'wavy'; expected linear, cosine, 1-sqrt"),
    "settings that are none": (lambda p: words(p, lr_scheduler_kwargs="fast"), "--lr_scheduler_kwargs: expected name=value,…, or JSON, got 'fast'"),
    "nothing to freeze": (lambda p: words(p, freeze=","), "freeze is empty; expected a comma-separated list"),
    "noise below zero": (lambda p: words(p, neftune_noise_alpha=-1), "neftune_noise_alpha is -1.0; expected 0 or more"),
    "a ratio below one": (lambda p: words(p, use_peft_lora=True, loraplus_lr_ratio=0.5), "loraplus_lr_ratio is 0.5; expected 1 or more"),
    "unknown reporter": (lambda p: words(p, report_to="mlflow"), "report_to names mlflow, which is not installed; pip install mlflow"),
    "impossible number of processes": (lambda p: [*words(p), "--num_processes", "none at all"], "--num_processes: expected a whole number"),
    "unknown strategy": (lambda p: [*words(p), "--num_processes", "2", "--fsdp_sharding_strategy", "SHARD_ALL"], "expected FULL_SHARD"),
}  # fmt: skip


@pytest.mark.parametrize("case", EARLY)
def test_found_before_anything_starts(case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = EARLY[case]
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=said) as error:
        sft(make(place))
    assert "\n" not in str(error.value).strip()
    assert sorted(place.rglob("*")) == before, "something was written"


def test_a_folder_that_cannot_be_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"output_dir: .* cannot be written; choose another"):
        sft(words(place))


def test_one_line_exit_code_2_and_no_torch(place: Path) -> None:
    program = (
        "import sys, fullshard.cli as c\ntry: c.main()\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    arguments = words(place, dataset_name=place / "nowhere")
    ran = subprocess.run([sys.executable, "-c", program, "sft", *arguments], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and ran.stdout.split() == ["False", "False"]
    assert ran.stderr.startswith("fullshard: the data") and len(ran.stderr.splitlines()) == 1


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "malformed row": ({"dataset_name": "bad"}, r"bad.train\.jsonl, line 3: the text is 5; expected a string"),
    "empty data": ({"dataset_name": "blank"}, r"no documents with tokens \(left out: 1 empty\)"),
    "conversation without template": ({"dataset_name": "chats"}, "line 1: the row is a conversation, but the tokenizer has no chat"),
    "bad template": ({"chat_template_path": "bad.jinja"}, r"bad\.jinja is not valid Jinja: line 2: "),
    "wrong tokenizer": ({"model_name_or_path": "small"}, "the tokenizer has 400 tokens, the model's embedding 300 rows"),
    "documents too long": ({"model_name_or_path": "short"}, "documents of .* tokens, LlamaForCausalLM has 8 positions"),
    "unknown target": ({"use_peft_lora": True, "lora_target_modules": "query"}, "lora_target_modules: .*Linear layers of LlamaFor.*q_proj"),
    "no weights": ({"model_name_or_path": "hollow"}, "contains no safetensors files"),
    "not a language model": ({"model_name_or_path": "vision"}, "expected a causal language model"),
    "nothing to resume": ({"resume": True}, "there is no checkpoint in .* to resume from"),
    "unknown layer class": ({"fsdp_config": "layers.json"}, "no module of class BertLayer in LlamaForCausalLM.*LlamaDecoderLayer"),
    "unknown metric": (
        {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "bleu", "early_stopping_patience": 1},
        "there is no eval_bleu; evaluation has eval_loss",
    ),
}  # fmt: skip


PATHS = ("dataset_name", "model_name_or_path", "fsdp_config", "chat_template_path")


@pytest.fixture(scope="module")
def late_place(place: Path) -> Path:
    write_rows(place / "bad" / "train.jsonl", [{"text": "a b"}, {"text": "c d"}, {"text": 5}])  # type: ignore[list-item]
    for name, changes in {"small": {"vocab_size": 300}, "short": {"max_position_embeddings": 8}}.items():
        make_model(**changes).save_pretrained(place / name)
        make_tokenizer().save_pretrained(place / name)
    for name in ("hollow", "vision"):
        shutil.copytree(place / "model", place / name)
    (place / "hollow" / "model.safetensors").unlink()
    (place / "vision" / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    (place / "bad.jinja").write_text("{% for m in messages %}\n{{ m }{% endfor %}")
    (place / "layers.json").write_text('{"transformer_layer_cls_to_wrap": "BertLayer"}')
    return place


@ranks(2)
@pytest.mark.parametrize("case", LATE)
def test_found_on_every_rank(case: str, late_place: Path) -> None:
    """Every rank raises the same error: none is left waiting for another."""
    changes, said = LATE[case]
    local = {k: str(late_place / v) if isinstance(v, str) and k in PATHS else v
             for k, v in changes.items()}  # fmt: skip
    out = late_place / f"out {case}"
    flags = words(late_place, **{"output_dir": out, "progress": "quiet", **local})
    with pytest.raises(UserError, match=said):
        train_run(check_command(parse(flags)))
    left = [p.name for p in out.rglob("*")] if out.exists() else []
    assert not [n for n in left if n.endswith((".safetensors", ".part"))]
