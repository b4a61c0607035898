"""Which layers are quantized and which get adapters, compared with transformers and PEFT; what is refused."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from fullshard import load_pretrained, lora, save_pretrained
from fullshard.config.errors import ConfigError, QuantizationError
from fullshard.distributed import runtime
from fullshard.lora.targets import DEFAULT_TARGETS
from fullshard.quant import config as quant_config
from fullshard.quant.config import Quantization
from fullshard.quant.export import model_tensors
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantize import dequantize_model, quantize_model, quantized_layers
from fullshard.quant.sharded_groups import Scheme
from fullshard.weights.merge_adapter import merge_adapter
from tests.fsdp.programs import mesh_for
from tests.pool import ranks
from tests.quant.programs import batches, llama, train, with_lora

NF4_DOUBLE = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def test_the_layers_are_those_that_transformers_quantizes():
    config = BitsAndBytesConfig(**NF4_DOUBLE, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_storage="bfloat16")
    ours = quantize_model(llama(), config)
    theirs = llama()
    theirs = replace_with_bnb_linear(theirs, get_keys_to_not_convert(theirs), config)
    expected = {n for n, m in theirs.named_modules() if type(m).__name__ == "Linear4bit"}
    assert quantized_layers(ours).keys() == expected and len(expected) == 14
    layer = ours.model.layers[0].mlp.up_proj
    assert layer.scheme == Scheme("nf4", 64, True, torch.bfloat16) and layer.compute_dtype == torch.bfloat16
    assert not layer.bias.requires_grad if layer.bias is not None else True


def test_skipped_modules_and_the_head_stay():
    model = quantize_model(llama(), {**NF4_DOUBLE, "llm_int8_skip_modules": ["q_proj", "model.layers.1"]})
    names = quantized_layers(model)
    assert not any("q_proj" in n or "layers.1." in n or "lm_head" in n for n in names)
    assert len(names) == 6


def test_a_shared_layer_stays_shared():
    one = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": one, "b": nn.Sequential(one), "c": nn.Linear(64, 8)})
    quantize_model(model, Scheme())
    assert model["a"] is model["b"][0] and isinstance(model["a"], NF4Linear)


def test_on_the_meta_device_layers_are_only_laid_out():
    with torch.device("meta"):
        model = llama().bfloat16()
    quantize_model(model, NF4_DOUBLE)
    real = quantize_model(llama().bfloat16(), NF4_DOUBLE)
    assert all(p.is_meta for p in model.parameters())
    for (name, a), (other, b) in zip(model.named_parameters(), real.named_parameters(), strict=True):
        assert (name, a.shape, a.dtype, a.requires_grad) == (other, b.shape, b.dtype, b.requires_grad)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"load_in_8bit": True}, "8-bit weights .load_in_8bit. are not supported"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "both set"),
        ({"load_in_4bit": False}, "quantizes nothing"),
        ({"load_in_4bit": True, "bnb_4bit_quant_typ": "nf4"}, "bnb_4bit_quant_typ"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf8"}, "nf8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "int8"}, "int8"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.int8}, "floating-point"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        (BitsAndBytesConfig(load_in_8bit=True), "8-bit"),
        ("nf4", "str"),
    ],
)
def test_configurations_that_are_refused(config, words):
    with pytest.raises(QuantizationError, match=words):
        Quantization.of(config)


def test_models_that_are_refused():
    with pytest.raises(QuantizationError, match="already has adapters"):
        quantize_model(with_lora(llama()), Scheme())
    with pytest.raises(QuantizationError, match="already quantized"):
        quantize_model(quantize_model(llama(), Scheme()), Scheme())
    with pytest.raises(QuantizationError, match="Sequential has no weight to quantize"):
        quantize_model(nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8)), Scheme())


# --- layers of other classes ------------------------------------------------------------------------------------------


def gpt2():
    """Weights stored as (in, out), of more than one group."""
    torch.manual_seed(5)
    shape = {"vocab_size": 131, "n_positions": 32, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(
        GPT2Config(**shape, bos_token_id=1, eos_token_id=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.02)
    return model


def falcon():
    torch.manual_seed(5)
    shape = {"vocab_size": 131, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**shape, bos_token_id=1, eos_token_id=2))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Checked(nn.Linear):
    def forward(self, x):
        assert x.shape[-1] == self.in_features
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


def test_subclasses_of_linear_layers_are_tried():
    held = {
        "plain": nn.Linear(64, 64),
        "same": Checked(64, 8),
        "bare": Checked(64, 8, bias=False),
        "other": Doubled(64, 64),
    }
    model = quantize_model(nn.ModuleDict(held), Scheme())
    assert quantized_layers(model).keys() == {"plain", "same", "bare"} and type(model["other"]) is Doubled
    assert quantized_layers(quantize_model(falcon(), Scheme())).keys() == {
        f"transformer.h.{i}.{layer}"
        for i in range(2)
        for layer in (
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
    }


def test_conv1d_layers_are_those_that_transformers_quantizes(tmp_path):
    """Bytes, keys and results of a GPT-2 that transformers loads with bitsandbytes; adapters go on and off it alike."""
    gpt2().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**NF4_DOUBLE, bnb_4bit_compute_dtype="float32")
    theirs = GPT2LMHeadModel.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    ours = quantize_model(gpt2(), config)
    for name, tensors in model_tensors(ours):
        weight = theirs.get_submodule(name).weight
        assert torch.equal(tensors[f"{name}.weight"], weight.data)
        state = weight.quant_state.as_dict(packed=True)
        assert all(torch.equal(tensors[f"{name}.weight.{key}"], value) for key, value in state.items()), name
    assert len(quantized_layers(ours)) == 8
    rows = batches(1)[0]
    lora_config = LoraConfig(r=4, target_modules="all-linear", fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(7)
    adapted = get_peft_model(ours, lora_config)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        dense = gpt2()
        for name, layer in quantized_layers(ours).items():
            where = name.removesuffix(".base_layer")
            dense.get_submodule(where).weight.data = layer.dequantize().T.contiguous()
        loaded = PeftModel.from_pretrained(dense, tmp_path / "adapter")
        torch.testing.assert_close(adapted(rows).logits, loaded(rows).logits, rtol=1e-4, atol=1e-5)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(rows).logits, loaded(rows).logits, atol=1e-3)


@ranks(2)
@pytest.mark.parametrize("family", [gpt2, pytest.param(falcon, marks=pytest.mark.slow)])
def test_layers_of_other_classes_from_files_and_back(tmp_path, family):
    """Ranks read their own part of a transposed weight; files and merges are those of bitsandbytes and PEFT."""
    if runtime.is_main():
        family().save_pretrained(tmp_path / "base")
    runtime.barrier()
    scheme, mesh = Scheme(double=True), mesh_for("FULL_SHARD")
    adapt = lambda model: get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))  # noqa: E731
    model = load_pretrained(tmp_path / "base", mesh, quantization_config=scheme, adapt=adapt, progress=False)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    expected = dict(model_tensors(quantize_model(family(), scheme)))
    for name, tensors in model_tensors(model):
        plain = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        assert all(torch.equal(v, expected[plain][k.replace(name, plain)]) for k, v in tensors.items()), name
    dense = dequantize_model(quantize_model(family(), scheme))
    alone = PeftModel.from_pretrained(dense, tmp_path / "first", is_trainable=True)
    assert train(model, 4, sharded=True) == pytest.approx(train(alone, 4, sharded=False), abs=1e-5)

    whole = load_pretrained(tmp_path / "base", mesh, quantization_config=scheme, progress=False)
    save_pretrained(whole, tmp_path / "packed", progress=False)
    model.save_pretrained(tmp_path / "adapter")
    runtime.barrier()
    again = load_pretrained(tmp_path / "packed", mesh, progress=False)
    rows = batches(1)[0]
    with torch.no_grad():
        assert torch.equal(again(input_ids=rows).logits, whole(input_ids=rows).logits)
    if runtime.is_main():
        kinds = {"dense": (tmp_path / "base", scheme), "packed": (tmp_path / "packed", True)}
        merged = {}
        for kind, (base, how) in kinds.items():
            merge_adapter(tmp_path / "adapter", tmp_path / kind / "out", base=base, dequantized=how, progress=False)
            merged[kind] = AutoModelForCausalLM.from_pretrained(tmp_path / kind / "out").eval()
        model_alone = dequantize_model(quantize_model(family(), scheme))
        loaded = PeftModel.from_pretrained(model_alone, tmp_path / "adapter").merge_and_unload().eval()
        with torch.no_grad():
            for found in merged.values():
                torch.testing.assert_close(found(rows).logits, loaded(rows).logits, rtol=1e-4, atol=1e-5)


@ranks(1)
@pytest.mark.slow
def test_loftq_makes_up_for_what_a_transposed_weight_lost(tmp_path):
    gpt2().save_pretrained(tmp_path)
    config = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear")
    config.init_lora_weights = "loftq"  # given at once, PEFT would want scipy
    model = load_pretrained(
        tmp_path, mesh_for("FULL_SHARD"), quantization_config=Scheme(), progress=False,
        adapt=lambda m: lora.get_peft_model_on_meta(m, config),
    )  # fmt: skip
    dense = gpt2()
    with model.summon_full_params(writeback=False):
        for name, layer in quantized_layers(model).items():
            wrapper = model.get_submodule(name.removesuffix(".base_layer"))
            weight = dense.get_submodule(name.removeprefix("base_model.model.").removesuffix(".base_layer")).weight.T
            lost = weight - layer.dequantize()
            made_up = wrapper.lora_B["default"].weight @ wrapper.lora_A["default"].weight
            assert (lost - made_up).norm() < 0.95 * lost.norm(), name


def test_the_line_that_says_what_stays_dense():
    """Every byte of the model is in it, under the name of what it belongs to."""
    config = MixtralConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4,
    )  # fmt: skip
    model = quantize_model(MixtralForCausalLM(config), Scheme())
    four_bits, dense = lora.bytes_by_kind(model)
    assert four_bits + dense.total() == sum(p.numel() * p.element_size() for p in model.parameters())
    assert dense == {"embedding": 2**18, "head": 2**18, "norms and biases": 5 * 512, "mlp.gate.weight": 2 * 4 * 512}
    weights = 2 * (4 * 128 * 128 + 4 * 3 * 128 * 128)
    line = (
        f"4 bits: {weights:,} weights in 288.0 KiB; dense: 518.5 KiB (embedding 256.0 KiB, head 256.0 KiB, "
        "norms and biases 2.5 KiB, mlp.gate.weight 4.0 KiB)"
    )
    assert lora.dense_line(model) == line
    lora_config = LoraConfig(r=2, target_modules=["q_proj"])
    assert lora.dense_line(get_peft_model(model, lora_config)) == line, "an adapter is none of it"
    assert lora.dense_line(nn.Linear(2, 2)) is None


def test_full_fine_tuning_of_quantized_weights_is_refused():
    model = quantize_model(llama(), Scheme())
    with pytest.raises(QuantizationError, match="full fine-tuning"):
        lora.check_trains(model)
    lora.check_trains(with_lora(model))
    lora.check_trains(llama())
    with pytest.raises(ConfigError, match="no trainable parameters"):
        lora.check_trains(llama().requires_grad_(False))


def test_targets():
    assert lora.target_modules() == list(DEFAULT_TARGETS)
    assert lora.target_modules("all-linear") == lora.target_modules(" ALL-linear") == "all-linear"
    assert lora.target_modules("q_proj, v_proj") == lora.target_modules(["q_proj", "v_proj"]) == ["q_proj", "v_proj"]
    for wrong in ("", "q_proj,,", []):
        with pytest.raises(ConfigError, match="lora_target_modules"):
            lora.target_modules(wrong)
    with pytest.raises(ConfigError, match="no module named wq; its linear layers are down_proj, gate_proj"):
        lora.find_targets(llama(), "q_proj,wq")


@pytest.mark.parametrize("value", ["all-linear", "q_proj,v_proj", "mlp.up_proj", None])
def test_targets_are_those_that_peft_finds(value):
    config = LoraConfig(r=2, target_modules=lora.target_modules(value))
    model = get_peft_model(llama(), config)
    expected = {n.removeprefix("base_model.model.") for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert set(lora.find_targets(llama(), value)) == expected
    assert set(lora.find_targets(quantize_model(llama(), Scheme()), value)) == expected


def test_the_summary_counts_weights_not_bytes(capsys):
    plain, packed = with_lora(llama()), with_lora(quantize_model(llama(), Scheme(double=True)))
    plain.print_trainable_parameters()
    assert lora.summary(plain) == lora.summary(packed) == capsys.readouterr().out.strip()


def test_options_of_the_training_script():
    assert quant_config.quantization_from_options() is None
    found = quant_config.quantization_from_options(
        use_4bit_quantization=True, use_nested_quant=True, bnb_4bit_compute_dtype="bfloat16",
        bnb_4bit_quant_storage_dtype="bfloat16",
    )  # fmt: skip
    assert found == Quantization(Scheme("nf4", 64, True, torch.bfloat16), torch.bfloat16)
    with pytest.raises(QuantizationError, match="8-bit"):
        quant_config.quantization_from_options(use_8bit_quantization=True)
    with pytest.raises(QuantizationError, match="both set"):
        quant_config.quantization_from_options(use_8bit_quantization=True, use_4bit_quantization=True)
    with pytest.raises(ConfigError, match="needs use_4bit_quantization"):
        quant_config.quantization_from_options(use_nested_quant=True)
    assert quant_config.dense_dtype(torch.uint8) is None and quant_config.dense_dtype(torch.bfloat16) == torch.bfloat16
    assert (
        quant_config.storage_note(torch.bfloat16, "bf16") is None
        and quant_config.storage_note(torch.float32, "fp16") is None
    )
    assert "float32" in quant_config.storage_note(torch.uint8, "fp16")
