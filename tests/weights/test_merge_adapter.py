"""An adapter merged into its base equals PEFT's own merge on the whole model, bit for bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    BOFTConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fullshard.config.errors import ConfigError, QuantizationError, WeightsError
from fullshard.weights.merge_adapter import merge_adapter
from tests.weights.models import save

KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "head": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding": {"target_modules": ["embed_tokens", "gate_proj"]},
}


def make_adapter(base: Path, place: Path, **options: Any) -> Path:
    return save_adapter(base, place, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))


def save_adapter(base: Path, place: Path, config: Any) -> Path:
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, p in model.named_parameters():
        if p.requires_grad and "magnitude" not in name:
            p.data.normal_(std=0.3)
    model.save_pretrained(place)
    return place


def assert_merged(base: Path, adapter: Path, out: Path, dtype: torch.dtype | None) -> None:
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=dtype if dtype is not None else "auto")
    expected = PeftModel.from_pretrained(whole, adapter).merge_and_unload()
    got = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype if dtype is not None else "auto").state_dict()
    assert got.keys() == plain.keys()
    changed = 0
    for name, value in expected.state_dict().items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
        changed += not torch.equal(value, plain[name])
    assert changed, "an adapter that changes nothing shows nothing"


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_peft_s_merge(kind: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    base = save("llama", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    merge_adapter(adapter, tmp_path / "out", dtype=dtype, progress=False)
    assert_merged(base, adapter, tmp_path / "out", dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral"])
def test_other_families_and_files(name: str, tmp_path: Path) -> None:
    base = save(name, tmp_path / "base", torch.bfloat16)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "o_proj"]
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=targets, fan_in_fan_out=name == "gpt2")
    merge_adapter(adapter, tmp_path / "out", max_shard_size="10KB", progress=False)
    assert_merged(base, adapter, tmp_path / "out", None)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert names_in(tmp_path / "out") == names_in(base), "in the form that this family's files have"


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OTHERS: dict[str, tuple[str, Any]] = {
    "fused experts": ("mixtral", LoraConfig(r=4, target_modules="all-linear")),
    "one of two": ("qwen2-moe", LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS[1:])),
    "every bias": ("gpt2", LoraConfig(r=4, target_modules=["c_attn"], bias="all", fan_in_fan_out=True)),
    "a bias of its own": ("qwen2", LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)),
    "pissa": ("llama", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")),
    "olora": ("llama", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora")),
    "vera": ("llama", VeraConfig(r=4, target_modules=["q_proj"])),
    "ia3": ("qwen2", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": ("llama", LoHaConfig(r=4, target_modules=["q_proj"])),
    "norms": ("llama", LNTuningConfig(target_modules=["input_layernorm"])),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "fused experts" else pytest.mark.slow) for kind in OTHERS]
)
def test_kinds_that_change_more_than_a_weight(kind: str, tmp_path: Path) -> None:
    family, config = OTHERS[kind]
    base = save(family, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", copy.deepcopy(config))
    merge_adapter(adapter, tmp_path / "out", progress=False)
    assert_merged(base, adapter, tmp_path / "out", None)
    assert names_in(tmp_path / "out") == names_in(base)


UNKNOWN = {
    "replicated layers": (
        LoraConfig(r=4, target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]]),
        r"does not support 2 tensor\(s\).*layers.2.self_attn.q_proj.lora_A",
    ),
    "projections left out": (VeraConfig(r=4, target_modules=["q_proj"], save_projection=False), "does not support"),
    "rotations": (OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]), "does not support.*oft_R"),
    "butterflies": (
        BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
        "BOFT adapters cannot be merged layer by",
    ),
    "prompts": (PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PROMPT_TUNING adapters change the"),
    "random starts": (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa_niter_4"), "'pissa_niter_4'"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "replicated layers" else pytest.mark.slow) for kind in UNKNOWN]
)
def test_what_a_merge_does_not_know_stops_it(kind: str, tmp_path: Path) -> None:
    config, words = UNKNOWN[kind]
    base = save("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", copy.deepcopy(config))
    with pytest.raises(WeightsError, match=words):
        merge_adapter(adapter, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_an_embedding_that_was_resized_beside_the_adapter(tmp_path: Path) -> None:
    """PEFT writes it into the adapter's files; the rows that files of the base do not have are those."""
    base = save("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.vocab_size + 3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", progress=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys() and all(torch.equal(merged[n], v) for n, v in expected.items())


def names_in(directory: Path) -> set[str]:
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    base = save("llama", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(WeightsError, match=r"base contains no adapter: it has no adapter_model.safetensors"):
        merge_adapter(base, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        merge_adapter(adapter, base)
    with pytest.raises(WeightsError, match=r"base '.*nowhere' was not found; set its folder with base="):
        merge_adapter(adapter, tmp_path / "out", base=tmp_path / "nowhere")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizationError, match="would lose the adapter"):
        merge_adapter(adapter, tmp_path / "out")
    tied = save("llama-tied", tmp_path / "tied")
    adapter = make_adapter(tied, tmp_path / "tied adapter", target_modules=["embed_tokens"])
    with pytest.raises(WeightsError, match=r"embed_tokens.weight, which is tied"):
        merge_adapter(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
