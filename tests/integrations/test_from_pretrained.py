"""What `from_pretrained` returns under the launcher: mapped weights, our 4-bit layers, values that the ranks share."""

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from fullshard import runtime
from fullshard.integrations import four_bit, loaded_values
from fullshard.parallelize.settings import EngineSettings
from fullshard.quant.quantize import quantized_layers
from tests.fsdp.programs import mesh_for
from tests.integrations.launched import alone, launched, result
from tests.pool import ROOT, ranks

SCRIPTS = ROOT / "tests" / "integrations"


def small(folder, hidden=64, layers=2, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def loaded(model_class, folder, **options):
    """As under the launcher."""
    seam = four_bit.from_pretrained(PreTrainedModel.from_pretrained.__func__)
    return seam(model_class, folder, **options)


def four_bits(**options):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **options
    )


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_four_bit_layers_are_those_of_bitsandbytes(double, stored, tmp_path):
    folder = small(tmp_path, dtype=stored)
    config = four_bits(bnb_4bit_use_double_quant=double)
    torch.set_num_threads(1)  # bitsandbytes' nested statistics depend on it
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    ours = loaded(LlamaForCausalLM, folder, dtype=torch.float32, quantization_config=config)
    assert ours.is_loaded_in_4bit and ours.dtype == theirs.dtype == torch.float32
    names = {name for name, module in theirs.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    layers = quantized_layers(ours)
    assert layers.keys() == names and all(layer.dense is not None for layer in layers.values())
    for name in names:
        weight = theirs.get_submodule(name).weight
        packed, _ = layers[name].quant_state()
        assert torch.equal(packed.reshape(-1), weight.data.reshape(-1)) and layers[name].dense is None
        whole = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(layers[name].dequantize(), whole)
    ids = torch.arange(12)[None]  # with gradients: without them bitsandbytes multiplies in bf16 on CPUs
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def test_weights_in_the_dtype_of_the_files_take_no_memory_of_their_own(tmp_path):
    folder = small(tmp_path, dtype=torch.bfloat16)
    model = loaded(LlamaForCausalLM, folder)
    start = model.lm_head.weight.data_ptr()
    with open("/proc/self/maps") as maps:
        spans = [line.split() for line in maps]
    inside = [s for s in spans if int(s[0].split("-")[0], 16) <= start < int(s[0].split("-")[1], 16)]
    assert inside[0][-1].endswith("model.safetensors")


def test_what_the_files_lack_does_not_count_as_loaded(tmp_path):
    model, info = loaded(
        LlamaForSequenceClassification, small(tmp_path), num_labels=2, output_loading_info=True
    )  # fmt: skip
    assert info["missing_keys"] == {"score.weight"} or list(info["missing_keys"]) == ["score.weight"]
    marked = {name for name, p in model.named_parameters() if hasattr(p, loaded_values.MARK)}
    assert marked == {name for name, _ in model.named_parameters()} - {"score.weight"}


@ranks(2)
def test_values_that_ranks_may_have_differently_become_the_first_rank_s():
    """Loaded parameters stay where they are, unless a script has changed them in any way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)), nn.BatchNorm1d(8))
    loaded_values.mark(model, {"3.weight"})
    rank = runtime.rank()
    with torch.no_grad():
        model[1].weight.add_(rank)  # seen by its version
    model[2].weight.data = model[2].weight.data + rank  # unseen
    model[3].weight.data.normal_(generator=torch.Generator().manual_seed(rank))
    model[4].running_mean.fill_(rank)
    expected = [layer.weight.detach().clone() for layer in model]
    before = [layer.weight.data_ptr() for layer in model]
    loaded_values.share(model, mesh_for("FULL_SHARD"), set())
    whole = [None, None]
    torch.distributed.all_gather_object(whole, [layer.weight.detach() for layer in model])
    assert all(torch.equal(a, b) for a, b in zip(*whole, strict=True))
    if rank == 0:
        assert all(torch.equal(a, b) for a, b in zip(whole[0], expected, strict=True))
    assert (model[0].weight.data_ptr() == before[0], model[1].weight.data_ptr() == before[1]) == (True, False)
    assert model[4].running_mean.eq(0).all()


@ranks(2)
@pytest.mark.parametrize("double", [False, True])
def test_each_rank_quantizes_its_slices_to_the_same_bytes(double, tmp_path):
    folder = small(tmp_path, hidden=128, layers=1)  # the first rank writes
    runtime.barrier()
    whole = loaded(LlamaForCausalLM, folder, quantization_config=four_bits(bnb_4bit_use_double_quant=double))
    model = loaded(LlamaForCausalLM, folder, quantization_config=four_bits(bnb_4bit_use_double_quant=double))
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.arange(12)[None]
    expected = whole(ids).logits.detach()
    four_bit.wrap(EngineSettings(), model, {})
    assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    layers = quantized_layers(model)
    assert all(layer.dense is None and layer.packed.placements[0].is_shard() for layer in layers.values())
    with model.summon_full_params():
        for name, layer in layers.items():
            plain = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            parts, other = layer.whole_parts(), quantized_layers(whole)[plain].whole_parts()
            assert all(torch.equal(parts[part], other[part]) for part in other)


@pytest.mark.slow
def test_a_4_bit_model_edited_before_training_has_the_losses_of_bitsandbytes(tmp_path):
    folder, script = small(tmp_path / "model"), SCRIPTS / "edited_qlora.py"
    for name in ("reference", "ours"):
        (tmp_path / name).mkdir()
    alone(script, folder, tmp_path / "reference")
    assert "served by fullshard" in launched(script, folder, tmp_path / "ours")
    assert result(tmp_path / "ours")["losses"] == pytest.approx(result(tmp_path / "reference")["losses"], abs=1e-4)
    files = [load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("ours", "reference")]
    assert files[0].keys() == files[1].keys() and {n: t.shape for n, t in files[0].items()} == {
        n: t.shape for n, t in files[1].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dense", "4bit"])
def test_all_ranks_together_hold_one_model_at_most(how, tmp_path):
    """Host memory of loading and sharding on two CPU ranks, whose shards lie there too."""
    folder = small(tmp_path / "model", hidden=1024, layers=8, dtype=torch.bfloat16)
    launched(SCRIPTS / "load_memory.py", folder, tmp_path / "out", "auto", how)
    found = result(tmp_path / "out")
    stored = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert found["peak"] * found["bytes"] <= 1.15 * stored, found
