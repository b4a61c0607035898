"""What `from_pretrained` returns under the launcher: mapped weights, our 4-bit layers, values that the ranks share."""

import copy
import functools
import pickle
from unittest import mock

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
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    core_model_loading,
)
from transformers.core_model_loading import _materialize_copy

from fullshard import FSDPv2, transformer_auto_wrap_policy
from fullshard.config.errors import QuantizationError
from fullshard.distributed import runtime
from fullshard.hf import four_bit, lazy_parameters, sync_values
from fullshard.hf.lazy_parameters import LazyTensor
from fullshard.parallel.settings import EngineSettings
from fullshard.quant.quantize import quantized_layers
from tests.fsdp.programs import mesh_for
from tests.hf.launched import alone, launched, result
from tests.pool import ROOT, ranks
from tests.quant.unpacked import unpacked_by_bnb

SCRIPTS = ROOT / "tests" / "hf"


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
    patch = four_bit.from_pretrained(PreTrainedModel.from_pretrained.__func__)
    convert = core_model_loading.WeightConverter.convert
    with (
        mock.patch.object(core_model_loading, "_materialize_copy", lazy_parameters.materialize(_materialize_copy)),
        mock.patch.object(core_model_loading.WeightConverter, "convert", lazy_parameters.convert(convert)),
    ):
        return patch(model_class, folder, **options)


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
    assert layers.keys() == names and all(layer.readers is not None for layer in layers.values())
    for name in names:
        weight = theirs.get_submodule(name).weight
        packed, _ = layers[name].quant_state()
        assert torch.equal(packed.reshape(-1), weight.data.reshape(-1)) and layers[name].readers is None
        whole = unpacked_by_bnb(weight.data, weight.quant_state)
        assert torch.equal(layers[name].dequantize(), whole)
    ids = torch.arange(12)[None]  # with gradients: without them bitsandbytes multiplies in bf16 on CPUs
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def mixture(folder, hidden=32, layers=2):
    """Experts that files store one by one, and the model in one parameter."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=3 * hidden // 2, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, num_local_experts=3,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size=f"{hidden}KB")
    return folder


def in_bin_files(folder):
    model = LlamaForCausalLM.from_pretrained(small(folder))
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


KINDS = {
    "as stored": (LlamaForCausalLM, lambda folder: small(folder, dtype=torch.bfloat16), {}),
    "fp32": (LlamaForCausalLM, lambda folder: small(folder, dtype=torch.bfloat16), {"dtype": torch.float32}),
    "bf16": (LlamaForCausalLM, small, {"dtype": torch.bfloat16}),
    "bin": (LlamaForCausalLM, in_bin_files, {"dtype": torch.float16, "device_map": "cpu"}),
    "experts": (MixtralForCausalLM, mixture, {"dtype": torch.float32}),
    "other head": (LlamaForSequenceClassification, small, {"num_labels": 2, "dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_in_the_files_until_they_are_used(kind, tmp_path):
    model_class, write, options = KINDS[kind]
    folder = write(tmp_path)
    torch.manual_seed(1)
    theirs = model_class.from_pretrained(folder, **options)
    torch.manual_seed(1)
    ours, info = loaded(model_class, folder, output_loading_info=True, **options)
    assert set(info["missing_keys"]) == ({"score.weight"} if kind == "other head" else set())
    kept = {name for name, p in ours.named_parameters() if isinstance(p, LazyTensor)}
    assert kept == {name for name, _ in ours.named_parameters()} - {"score.weight"}
    expected, before = dict(theirs.named_parameters()), {name: id(p) for name, p in ours.named_parameters()}
    about = {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in ours.named_parameters()}
    assert about == {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in expected.items()}
    assert kept == {name for name, p in ours.named_parameters() if isinstance(p, LazyTensor)}, "this needed no values"
    ids = torch.arange(12)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    for name, p in ours.named_parameters():
        assert (type(p), id(p)) == (nn.Parameter, before[name]) and torch.equal(p, expected[name])


def test_weights_in_the_dtype_of_the_files_take_no_memory_of_their_own(tmp_path):
    model = loaded(LlamaForCausalLM, small(tmp_path, dtype=torch.bfloat16))
    start = model.lm_head.weight.data_ptr()
    with open("/proc/self/maps") as maps:
        spans = [line.split() for line in maps]
    inside = [s for s in spans if int(s[0].split("-")[0], 16) <= start < int(s[0].split("-")[1], 16)]
    assert inside[0][-1].endswith("model.safetensors")


USES = {
    "data": lambda p: p.data.add_(1),
    "in place": lambda p: p.add_(1),
    "item": lambda p: p.__setitem__(0, 1.0),
    "init": lambda p: nn.init.normal_(p),
    "numpy": lambda p: p.detach().numpy().fill(2.0),
    "another": lambda p: setattr(p, "data", torch.ones_like(p)),
    "storage": lambda p: p.untyped_storage(),
    "list": lambda p: torch._foreach_mul_([p], 2.0),
    "copy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "text": repr,
    "compare": lambda p: p == 1,
}


@pytest.mark.parametrize("use", USES)
def test_a_weight_becomes_an_ordinary_parameter_whatever_a_script_does_with_it(use, tmp_path):
    folder = small(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ours = loaded(LlamaForCausalLM, folder, dtype=torch.float64)
    found = []
    for model in (theirs, ours):
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(USES[use](model.lm_head.weight))
    assert type(ours.lm_head.weight) is nn.Parameter and torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    if use in ("copy", "pickle"):
        assert type(found[1]) is nn.Parameter and torch.equal(*found)
    if use == "text":
        assert found[0] == found[1]
    assert isinstance(ours.model.norm.weight, LazyTensor), "the others stay where they are"


@pytest.mark.slow
def test_a_compiled_model_computes_with_the_values(tmp_path):
    folder = small(tmp_path, layers=1)
    ids, theirs = torch.arange(12)[None], LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ours = torch.compile(loaded(LlamaForCausalLM, folder, dtype=torch.float64), backend="eager")
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_tied_weights_stay_tied(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = loaded(LlamaForCausalLM, tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight and isinstance(model.lm_head.weight, LazyTensor)
    model.resize_token_embeddings(20)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape == (20, 16)


@ranks(2)
def test_each_rank_reads_its_slices(tmp_path):
    """In another dtype and put together from several tensors; edits of a script are in them."""
    folder = mixture(tmp_path)  # the first rank writes
    runtime.barrier()
    models = [
        load(folder, dtype=torch.float32)
        for load in (MixtralForCausalLM.from_pretrained, functools.partial(loaded, MixtralForCausalLM))
    ]
    for model in models:
        model.model.norm.weight.data += 1
        model.resize_token_embeddings(100, mean_resizing=False)
        model.lm_head.weight.data.fill_(0.5)
    theirs, ours = models
    ids, read = torch.arange(12)[None], []
    whole = LazyTensor.read
    with mock.patch.object(LazyTensor, "read", lambda p: (read.append(p), whole(p))):
        four_bit.wrap(EngineSettings(), ours, {})
    assert not read and not any(isinstance(p, LazyTensor) for p in ours.parameters())
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-6)
    with ours.summon_full_params():
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b) or "embed_tokens" in name, name  # its new rows are random


@ranks(2)
def test_values_that_ranks_have_differently_become_the_first_rank_s(tmp_path):
    """By whatever means a script has changed them, on one rank or on all, even a single bit."""
    folder = small(tmp_path, layers=1)
    runtime.barrier()
    rank = runtime.rank()
    model = loaded(LlamaForCausalLM, folder, dtype=torch.bfloat16)
    layer, inner = model.model.layers[0], model.model
    with torch.no_grad():
        layer.mlp.up_proj.weight.add_(rank)
        layer.mlp.gate_proj.weight.add_(1)  # on all: still alike
    layer.mlp.down_proj.weight.data.view(torch.int16)[7, 11] ^= rank  # seen by no version
    layer.self_attn.q_proj.weight.detach().view(torch.int16).numpy()[3, 5] ^= rank
    if rank:
        inner.norm.weight.sum()  # read on one rank only
    model.lm_head.weight = nn.Parameter(torch.randn(96, 64, generator=torch.Generator().manual_seed(rank)))
    inner.rotary_emb.inv_freq.fill_(rank)
    changed = [layer.mlp.up_proj, layer.mlp.gate_proj, layer.mlp.down_proj, layer.self_attn.q_proj, model.lm_head]
    mine, places = [p.weight.detach().clone() for p in changed], [p.weight.data_ptr() for p in changed]
    sync_values.share(model, mesh_for("FULL_SHARD"), set())
    assert isinstance(inner.embed_tokens.weight, LazyTensor) and type(inner.norm.weight) is nn.Parameter
    assert [a.weight.data_ptr() == b for a, b in zip(changed, places, strict=True)] == [
        False,
        True,
        False,
        False,
        False,
    ]
    whole = [None, None]
    torch.distributed.all_gather_object(whole, ([layer.weight.detach() for layer in changed], mine))
    for first, second, expected in zip(whole[0][0], whole[1][0], whole[0][1], strict=True):
        assert torch.equal(first, second) and torch.equal(first, expected)
    assert inner.rotary_emb.inv_freq.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_sees_any_bit_and_any_order(dtype):
    value = torch.randn(40_001).to(dtype) if dtype.is_floating_point else torch.arange(40_001).to(dtype)
    bits = value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    seen = {sync_values.checksum(value).item()}
    top = -(2 ** (8 * dtype.itemsize - 1)) if dtype.itemsize > 1 else 128
    changes = [{i: 1} for i in (0, 1, 20_000, 40_000)] + [{3: top, 7: top}, {1: top, 3: top, 5: top, 7: top}]
    for change in changes:
        other = bits.clone()
        for place, bit in change.items():
            other[place] ^= bit
        seen.add(sync_values.checksum(other).item())
    for first, second in ((0, 1), (5, 39_999), (8, 8 + 2**17)):
        if second < len(bits) and bits[first] != bits[second]:
            other = bits.clone()
            other[first], other[second] = bits[second], bits[first]
            seen.add(sync_values.checksum(other).item())
    seen |= {sync_values.checksum(part).item() for part in (value[1:], value[:-1])}
    assert len(seen) == len(changes) + 5
    assert sync_values.checksum(value[1:].clone()) == sync_values.checksum(value[1:]), "alignment changes nothing"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bit_weights_in_files_are_kept_bit_for_bit(double, quant_type, tmp_path):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=torch.bfloat16 if double else torch.uint8,
        llm_int8_skip_modules=["o_proj", "lm_head"],
    )  # fmt: skip
    torch.set_num_threads(1)
    LlamaForCausalLM.from_pretrained(
        small(tmp_path / "dense"), dtype=torch.float32, quantization_config=config
    ).save_pretrained(tmp_path / "stored")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "stored")
    ours = loaded(LlamaForCausalLM, tmp_path / "stored", device_map={"": "cpu"})
    layers = quantized_layers(ours)
    assert len(layers) == 12 and not any("o_proj" in name for name in layers)
    for name, layer in layers.items():
        weight = theirs.get_submodule(name).weight
        packed, state = layer.quant_state()
        assert torch.equal(packed.view(torch.uint8).reshape(-1), weight.data.view(torch.uint8).reshape(-1))
        assert torch.equal(state.absmax, weight.quant_state.absmax)
        assert layer.compute_dtype == torch.float32
    ids = torch.arange(12)[None]
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def test_bitsandbytes_own_layers_cannot_be_sharded():
    model = nn.Sequential(bnb.nn.Linear8bitLt(8, 8))
    with pytest.raises(
        QuantizationError, match=r"1 layer\(s\) of bitsandbytes \(0: Linear8bitLt\).*without load_in_8bit"
    ):
        four_bit.wrap(EngineSettings(), model, {})


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
    assert all(layer.readers is None and layer.packed.placements[0].is_shard() for layer in layers.values())
    with model.summon_full_params():
        for name, layer in layers.items():
            plain = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            parts, other = layer.whole_parts(), quantized_layers(whole)[plain].whole_parts()
            assert all(torch.equal(parts[part], other[part]) for part in other)


@ranks(2)
def test_a_4_bit_model_that_the_script_shards_itself_has_its_values(tmp_path):
    """`FSDPv2` and the trainer know nothing of layers that have not been read yet."""
    folder = small(tmp_path, hidden=128, layers=1)
    runtime.barrier()
    whole, model = (loaded(LlamaForCausalLM, folder, quantization_config=four_bits()) for _ in range(2))
    ids = torch.arange(12)[None]
    expected = whole(ids).logits.detach()
    sharded = FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    assert all(layer.packed.placements[0].is_shard() for layer in quantized_layers(sharded).values())
    for _ in range(2):  # values that are gathered again come from the shards
        assert torch.allclose(sharded(ids).logits, expected, atol=1e-5)


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
@pytest.mark.parametrize(
    ("kind", "dtype", "how"),
    [
        ("llama", "auto", "dense"), ("llama", "float32", "dense"), ("llama", "float16", "dense"),
        ("mixture", "auto", "dense"), ("mixture", "float32", "dense"), ("llama", "auto", "4bit"),
        ("4-bit files", "auto", "dense"),
    ],
)  # fmt: skip
def test_all_ranks_together_hold_one_model_at_most(kind, dtype, how, tmp_path):
    """Host memory of loading and sharding on two CPU ranks, whose shards lie there too."""
    folder = tmp_path / "model"
    if kind == "mixture":
        mixture(folder, hidden=512, layers=6)
    else:
        small(folder, hidden=1024, layers=8, dtype=torch.bfloat16)
    if kind == "4-bit files":
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits())
        model.save_pretrained(folder := tmp_path / "packed")
    launched(SCRIPTS / "load_memory.py", folder, tmp_path / "out", dtype, how)
    found = result(tmp_path / "out")
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found["peak"] * found["bytes"] <= 1.15 * max(stored, found["bytes"]), found


@pytest.mark.slow
def test_a_model_with_random_values_is_held_once_per_rank(tmp_path, monkeypatch):
    """Each rank makes its own; none is kept besides the shards."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))  # or glibc may keep what has been freed, as it happens
    folder = small(tmp_path / "model", hidden=1024, layers=8, dtype=torch.bfloat16)
    launched(SCRIPTS / "load_memory.py", folder, tmp_path / "out", "bfloat16", "config")
    assert result(tmp_path / "out")["peak"] < 2.1
