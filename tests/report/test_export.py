"""`fullshard export`: what PEFT's own merge gives, from results and checkpoints; whole folders or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.checkpoint.consolidate import merge_weights
from fullshard.config.errors import CheckpointError, QuantizationError
from fullshard.launch.chat import FOUR_BITS
from fullshard.quant.quantize import quantized_layers
from fullshard.quant.sharded_groups import Scheme
from fullshard.weights.load import load_pretrained
from fullshard.weights.merge_adapter import merge_adapter
from tests.pool import ranks
from tests.quant.programs import rounded
from tests.quant.shipped_models import fp8, write
from tests.report.small_results import LORA, add_adapter, base_of_run, chat_model, command, run


def exported(*words: str) -> dict[str, Any]:
    code, out, error = command("export", *words, "--json")
    assert code == 0, error
    return json.loads(out)


def assert_same(folder: Path, expected: Any) -> None:
    got = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, value in expected.state_dict().items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@ranks(1)
def test_runs_with_an_adapter(tmp_path: Path) -> None:
    """LoRA and QLoRA, merged and alone, from the result and from a checkpoint; the base's rows for new tokens too."""
    out = run(tmp_path, "qlora", use_4bit_quantization=True, use_nested_quant=True, **LORA)
    merged = tmp_path / "merged"
    found = exported(str(out), str(merged), "--merge", "--dtype", "bfloat16")
    assert (found["kind"], found["dtypes"], found["bytes"]) == ("model", ["BF16"], sum(found["files"].values()))
    assert_same(
        merged, PeftModel.from_pretrained(base_of_run(tmp_path, out, dtype=torch.bfloat16), out).merge_and_unload()
    )
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(out).chat_template is not None
    assert (merged / "generation_config.json").exists() and len(tokenizer) == len(AutoTokenizer.from_pretrained(out))

    exported(str(out), str(tmp_path / "trained"), "--merge", "--dequantized", "--max_shard_size", "40KB")
    beside = rounded(base_of_run(tmp_path, out), Scheme(double=True))
    assert_same(tmp_path / "trained", PeftModel.from_pretrained(beside, out).merge_and_unload())
    assert len(list((tmp_path / "trained").glob("*.safetensors"))) > 1

    found = exported(str(out / "checkpoints" / "step-4"), str(tmp_path / "alone"))
    assert found["kind"] == "adapter" and "tokenizer.json" in found["files"] and "README.md" not in found["files"]
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "alone", out))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "alone")
    exported(str(out), str(tmp_path / "earlier"), "--checkpoint", "2", "--merge", "--dtype", "bfloat16")
    exported(str(out), str(tmp_path / "narrow"), "--dtype", "float16")
    narrow = load_file(tmp_path / "narrow" / "adapter_model.safetensors")
    assert all(torch.equal(narrow[name], value.half()) for name, value in theirs.items())
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("earlier", "merged"))
    assert any(not torch.equal(first[name], last[name]) for name in last), "another step, other weights"

    with pytest.raises(CheckpointError, match=r"checkpoint of an adapter .* fullshard export .*step-4 OUT --merge"):
        merge_weights(out / "checkpoints" / "step-4", tmp_path / "x")
    code, _, error = command("export", str(out), str(tmp_path / "y"), "--merge", "--base", str(tmp_path / "gone/x/y"))
    assert code == 2 and "--base: " in error and "does not exist" in error
    (out / "adapter_model.safetensors").write_bytes(b"damaged")
    code, _, error = command("export", str(out), str(tmp_path / "z"), "--merge")
    assert code == 2 and error.count("\n") == 1
    assert not list(tmp_path.glob("[xyz]")) and not list(tmp_path.glob(".*")), "nothing half-written"


@ranks(1)
def test_a_run_of_the_whole_model(tmp_path: Path) -> None:
    out = run(tmp_path, "full")
    expected = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    found = exported(str(out), str(tmp_path / "a"), "--dtype", "bfloat16", "--max-shard-size", "40KB")
    assert_same(tmp_path / "a", expected)
    assert {"model.safetensors.index.json", "chat_template.jinja", "tokenizer.json"} <= found["files"].keys()
    assert not {"settings.json", "metrics.jsonl", "report.html"} & found["files"].keys()
    words = (str(out), str(tmp_path / "b"), "--checkpoint", "latest", "--dtype", "bfloat16")
    code, printed, error = command("export", *words)
    assert code == 0, error
    assert_same(tmp_path / "b", expected)
    assert f'from_pretrained("{tmp_path / "b"}", dtype="auto")' in printed and "fullshard chat" in printed
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template
    code, _, error = command("chat", str(out), "--checkpoint", "4", "--prompt", "x")
    assert code == 2 and "is a training checkpoint of a full model" in error and "fullshard export" in error


@ranks(1)
def test_a_base_that_is_shipped_in_few_bits(tmp_path: Path) -> None:
    """It is unpacked, or the result is quantized into its format again; the errors of that are printed."""
    model = AutoModelForCausalLM.from_pretrained(chat_model(tmp_path / "base"))
    dense = write(model, fp8((16, 16)), tmp_path / "shipped")
    for name in ("shipped", "shipped-dense"):
        AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / name)
    adapter = add_adapter(tmp_path / "shipped-dense", tmp_path / "adapter")
    words = (str(adapter), "--merge", "--base", str(tmp_path / "shipped"))
    exported(words[0], str(tmp_path / "dense"), *words[1:])
    assert_same(tmp_path / "dense", PeftModel.from_pretrained(dense, adapter).merge_and_unload())
    found = exported(words[0], str(tmp_path / "again"), *words[1:], "--requantize")
    assert found["dtypes"] == ["F32", "F8_E4M3"] and len(found["rounding"]) >= 2
    assert all(0 < one["mean"] < one["largest"] < 1 for one in found["rounding"])
    code, printed, _ = command("export", words[0], str(tmp_path / "third"), *words[1:], "--requantize")
    assert code == 0 and f"{found['rounding'][0]['name']}" in printed and "largest" in printed
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"] == fp8((16, 16))
    chatting = load_pretrained(tmp_path / "again", progress=False)
    assert quantized_layers(chatting)
    for flags, message in (
        (["--merge", "--requantize", "--dtype", "float16"], "--requantize keeps the format of the base's files"),
        (["--requantize"], "set --merge too"),
    ):
        assert message in command("export", words[0], str(tmp_path / "x"), *flags)[2]
    error = command("export", str(tmp_path / "shipped"), str(tmp_path / "x"), "--dtype", "float16")[2]
    assert "contains fp8 weights" in error
    exported(str(tmp_path / "shipped"), str(tmp_path / "copy"))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("copy", "shipped"))
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)


@ranks(1)
def test_a_base_that_is_stored_in_4_bits(tmp_path: Path) -> None:
    """Its files hold packed weights: an adapter is added to what they stand for; alone they are copied as they are."""
    base = chat_model(tmp_path / "base")
    adapter = add_adapter(base, tmp_path / "adapter")
    load_pretrained(base, quantization_config=FOUR_BITS, progress=False).save_pretrained(tmp_path / "packed")
    words = (str(adapter), str(tmp_path / "out"), "--merge", "--base", str(tmp_path / "packed"))
    code, _, error = command("export", *words)
    assert code == 2 and "--dequantized" in error
    exported(*words, "--dequantized", "--dtype", "bfloat16")
    plain = rounded(AutoModelForCausalLM.from_pretrained(base), Scheme(double=True)).to(torch.bfloat16)
    assert_same(tmp_path / "out", PeftModel.from_pretrained(plain, adapter).merge_and_unload())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(QuantizationError, match="contains dense weights; set dequantized="):
        merge_adapter(adapter, tmp_path / "x", dequantized=True)
    error = command("export", str(adapter), str(tmp_path / "x"), "--merge", "--dequantized")[2]
    assert "did not train in 4 bits" in error
    exported(str(tmp_path / "packed"), str(tmp_path / "copy"))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("copy", "packed"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    error = command("export", str(tmp_path / "packed"), str(tmp_path / "x"), "--dtype", "float16")[2]
    assert "contains 4-bit weights" in error
