"""4-bit models and files: quantized while loading, read from and written to bitsandbytes' form, resumed, exported."""

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from fullshard import load_pretrained, load_state, save_pretrained, save_state
from fullshard.config.errors import UserError
from fullshard.distributed import runtime
from fullshard.quant.export import model_tensors
from fullshard.quant.sharded_groups import Scheme
from tests.fsdp.programs import mesh_for, mine
from tests.pool import ranks
from tests.quant.programs import batches, llama, rounded
from tests.quant.unpacked import unpacked_by_bnb


def as_bytes(t):
    """Packed values seen as floats may be NaNs, which equal nothing."""
    return t.reshape(-1).view(torch.uint8)


def same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(as_bytes(a), as_bytes(b))


def read_by_bitsandbytes(model):
    """Every 4-bit weight of a model that transformers loaded, under bitsandbytes' keys."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            state = layer.weight.quant_state.as_dict(packed=True)
            found |= {f"{name}.weight": layer.weight.data} | {f"{name}.weight.{k}": v for k, v in state.items()}
    return found


def unpacked(model):
    """The model with dense layers of what bitsandbytes unpacks: the precision of its own product depends on the CPU."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            dense.weight.data = unpacked_by_bnb(layer.weight.data, layer.weight.quant_state)
            dense.bias = layer.bias
            model.set_submodule(name, dense)
    return model


def with_adapter(model):
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0))


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    ("strategy", "offload", "double"),
    [
        ("FULL_SHARD", False, True),
        pytest.param("FULL_SHARD", True, False, marks=pytest.mark.slow),
        pytest.param("NO_SHARD", False, True, marks=pytest.mark.slow),
    ],
)
def test_quantized_while_loading(tmp_path, strategy, offload, double):
    check_quantized_while_loading(tmp_path, strategy, offload, double)


@pytest.mark.slow
@ranks(2, 4)
def test_quantized_while_loading_on_replicas(tmp_path):
    check_quantized_while_loading(tmp_path, "HYBRID_SHARD", True, True)


def check_quantized_while_loading(tmp_path, strategy, offload, double):
    plain = llama(torch.bfloat16)
    if runtime.is_main():
        plain.save_pretrained(tmp_path)
    runtime.barrier()
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = load_pretrained(
        tmp_path, mesh_for(strategy), quantization_config=config, adapt=with_adapter, strategy=strategy,
        cpu_offload=offload, progress=False,
    )  # fmt: skip
    found = dict(model_tensors(model))
    assert len(found) == 14
    for name, tensors in found.items():
        where = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        weight = plain.get_submodule(where).weight.data
        packed, state = bnb.quantize_4bit(weight, compress_statistics=double, quant_type="nf4")
        expected = {"": packed} | {f".{k}": v for k, v in state.as_dict(packed=True).items()}
        assert {k.removeprefix(f"{name}.weight") for k in tensors} == expected.keys()
        assert all(torch.equal(tensors[f"{name}.weight{k}"], v) for k, v in expected.items()), name
    rows = batches(1)[0]
    dense = rounded(plain, Scheme(double=double)).eval()
    with torch.no_grad():
        logits, expected = model(input_ids=mine(rows)).logits, dense(input_ids=mine(rows)).logits
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize(
    ("double", "storage"), [(True, "bfloat16"), pytest.param(False, "uint8", marks=pytest.mark.slow)]
)
def test_files_that_bitsandbytes_wrote_are_loaded_as_they_are(tmp_path, double, storage):
    if runtime.is_main():
        llama().save_pretrained(tmp_path / "dense")
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
            bnb_4bit_quant_storage=storage, bnb_4bit_compute_dtype="float32",
        )  # fmt: skip
        theirs = LlamaForCausalLM.from_pretrained(
            tmp_path / "dense", quantization_config=config, device_map="cpu", dtype=torch.float32
        )
        theirs.save_pretrained(tmp_path / "packed")
    runtime.barrier()
    model = load_pretrained(tmp_path / "packed", mesh_for("FULL_SHARD"), progress=False)
    held = {}
    for path in (tmp_path / "packed").glob("*.safetensors"):
        held |= load_file(path)
    found = {key: value for _, tensors in model_tensors(model) for key, value in tensors.items()}
    assert len(found) == 14 * (6 if double else 4)
    assert all(torch.equal(as_bytes(value), as_bytes(held[key])) for key, value in found.items())
    rows = batches(1)[0]
    with torch.no_grad():
        logits, expected = (
            model(input_ids=rows).logits,
            rounded(llama(), Scheme(double=double)).eval()(input_ids=rows).logits,
        )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    other = Scheme(double=not double)
    with pytest.raises(UserError, match="configuration it was quantized with"):
        load_pretrained(tmp_path / "packed", mesh_for("FULL_SHARD"), quantization_config=other, progress=False)


@pytest.mark.slow
@ranks(4)
def test_resumes_bit_for_bit_and_its_adapter_works_in_peft(tmp_path):
    """Trained on four ranks, saved, resumed; the exported adapter on a plain model gives the same logits."""
    scheme = Scheme("nf4", double=True)
    if runtime.is_main():
        llama().save_pretrained(tmp_path / "base")
    runtime.barrier()

    def build():
        model = load_pretrained(
            tmp_path / "base", mesh_for("FULL_SHARD"), quantization_config=scheme, adapt=with_adapter, progress=False
        )
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def steps(model, optimizer, which):
        losses = []
        for batch in which:
            rows = mine(batch)
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    steps(model, optimizer, batches(4)[:2])
    save_state(tmp_path / "state", model=model, optimizer=optimizer)
    expected = steps(model, optimizer, batches(4)[2:])
    saved = [f.stat().st_size for f in (tmp_path / "state").rglob("*.safetensors")]
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert sum(saved) < 5 * trained  # parameters and two moments of what trains, no base

    again, optimizer = build()
    load_state(tmp_path / "state", model=again, optimizer=optimizer)
    assert steps(again, optimizer, batches(4)[2:]) == expected

    again.eval()
    again.save_pretrained(tmp_path / "adapter")
    rows = mine(batches(1)[0])
    plain = PeftModel.from_pretrained(rounded(llama(), scheme), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=rows).logits, plain(input_ids=rows).logits, rtol=1e-4, atol=1e-5)
        with plain.disable_adapter():
            assert not torch.allclose(again(input_ids=rows).logits, plain(input_ids=rows).logits, atol=1e-3)


@ranks(2)
@pytest.mark.parametrize(
    ("double", "storage"), [(True, torch.uint8), pytest.param(False, torch.float16, marks=pytest.mark.slow)]
)
def test_transformers_reads_what_is_exported(tmp_path, double, storage):
    if runtime.is_main():
        llama().save_pretrained(tmp_path / "dense")
    runtime.barrier()
    scheme = Scheme(double=double, storage=storage)
    model = load_pretrained(tmp_path / "dense", mesh_for("FULL_SHARD"), quantization_config=scheme, progress=False)
    save_pretrained(model, tmp_path / "packed", progress=False)
    expected = {key: value for _, tensors in model_tensors(model) for key, value in tensors.items()}
    rows = batches(1)[0]
    with torch.no_grad():
        logits = model(input_ids=rows).logits
    if runtime.is_main():
        held = load_file(tmp_path / "packed" / "model.safetensors")
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "packed", device_map="cpu", dtype=torch.float32)
        read = read_by_bitsandbytes(theirs)
        assert read.keys() == expected.keys() and len(read) == 14 * (6 if double else 4)
        for key, value in expected.items():
            assert same(read[key], value), key
            if "quant_state" in key:  # JSON, which the file pads with spaces
                assert bytes(held[key].tolist()).rstrip() == bytes(value.tolist()), key
            else:
                assert same(held[key], value), key
        with torch.no_grad():
            torch.testing.assert_close(unpacked(theirs)(input_ids=rows).logits, logits, rtol=1e-4, atol=1e-5)
    again = load_pretrained(tmp_path / "packed", mesh_for("FULL_SHARD"), progress=False)
    with torch.no_grad():
        assert torch.equal(again(input_ids=rows).logits, logits)
