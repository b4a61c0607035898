"""Which layers are quantised and which get adapters, compared with transformers and PEFT; what is refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from fullshard.adapters import lora
from fullshard.adapters.groups import Scheme
from fullshard.adapters.linear import NF4Linear
from fullshard.adapters.quantize import Quantization, quantize_model, quantized_layers
from fullshard.errors import ConfigError, QuantizationError
from tests.adapters.programs import llama, with_lora

NF4_DOUBLE = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def test_the_layers_are_those_that_transformers_quantises():
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
        ({"load_in_8bit": True}, "8-bit weights are not supported yet"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "both set"),
        ({"load_in_4bit": False}, "quantises nothing"),
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
    with pytest.raises(QuantizationError, match="adapters already"):
        quantize_model(with_lora(llama()), Scheme())
    with pytest.raises(QuantizationError, match="quantised already"):
        quantize_model(quantize_model(llama(), Scheme()), Scheme())
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(QuantizationError, match="no linear layer"):
        quantize_model(gpt2, Scheme())


def test_full_fine_tuning_of_quantised_weights_is_refused():
    model = quantize_model(llama(), Scheme())
    with pytest.raises(QuantizationError, match="full fine-tuning"):
        lora.check_trains(model)
    lora.check_trains(with_lora(model))
    lora.check_trains(llama())
    with pytest.raises(ConfigError, match="no parameter"):
        lora.check_trains(llama().requires_grad_(False))


def test_targets():
    assert lora.target_modules() == list(lora.DEFAULT_TARGETS)
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
    assert lora.quantization() is None
    found = lora.quantization(
        use_4bit_quantization=True, use_nested_quant=True, bnb_4bit_compute_dtype="bfloat16",
        bnb_4bit_quant_storage_dtype="bfloat16",
    )  # fmt: skip
    assert found == Quantization(Scheme("nf4", 64, True, torch.bfloat16), torch.bfloat16)
    with pytest.raises(QuantizationError, match="8-bit"):
        lora.quantization(use_8bit_quantization=True)
    with pytest.raises(QuantizationError, match="both set"):
        lora.quantization(use_8bit_quantization=True, use_4bit_quantization=True)
    with pytest.raises(ConfigError, match="needs use_4bit_quantization"):
        lora.quantization(use_nested_quant=True)
    assert lora.dtype_beside(torch.uint8) is None and lora.dtype_beside(torch.bfloat16) == torch.bfloat16
    assert lora.storage_note(torch.bfloat16, "bf16") is None and lora.storage_note(torch.float32, "fp16") is None
    assert "float32" in lora.storage_note(torch.uint8, "fp16")
