"""Fused experts in 4 bits: the bytes of bitsandbytes for each expert, the results of a dense model with those weights.

The dense models are transformers' and PEFT's, whole on one device.
"""

import copy
import itertools

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

import fullshard.spmd as xs
from fullshard import load_pretrained, load_state, lora, save_pretrained, save_state
from fullshard.config.errors import QuantizationError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, checkpoint_module, transformer_auto_wrap_policy
from fullshard.models.experts import use_own_experts
from fullshard.quant.expert_adapters import LoraFactors
from fullshard.quant.experts import NF4Experts
from fullshard.quant.export import model_tensors
from fullshard.quant.quantize import dequantize_model, quantize_model, quantized_experts
from fullshard.quant.sharded_groups import Scheme
from fullshard.weights.merge_adapter import merge_adapter
from tests.fsdp.programs import STRATEGIES, mesh_for, mine
from tests.pool import ranks
from tests.quant.programs import batches, train
from tests.quant.unpacked import unpacked

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHAPE = {
    "vocab_size": 131, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "use_cache": False, "num_local_experts": 3, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def mixtral():
    """Experts of one and a half groups, so that ranks share them, and of less than one."""
    torch.manual_seed(5)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, intermediate_size=96))


def gpt_oss():
    """Weights as [experts, in, out], with biases, and a shape that is no multiple of a block."""
    torch.manual_seed(5)
    model = GptOssForCausalLM(GptOssConfig(**SHAPE, intermediate_size=88, head_dim=32))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name:
                p.normal_(std=0.05)
    return model


def with_lora(model):
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=PARAMETERS)
    model = get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.2)
    return model


def by_bitsandbytes(weight, scheme):
    return bnb.quantize_4bit(
        weight.contiguous(), blocksize=scheme.blocksize, compress_statistics=scheme.double, quant_type=scheme.quant_type
    )


def rounded(model, scheme):
    """The model with each linear weight and each expert replaced by what 4 bits leave of it."""
    return dequantize_model(quantize_model(model, scheme))


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        (mixtral, Scheme(double=True)),
        (gpt_oss, Scheme("fp4", 128)),
        pytest.param(mixtral, Scheme(), marks=pytest.mark.slow),
        pytest.param(gpt_oss, Scheme(double=True), marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_of_bitsandbytes_expert_by_expert(family, scheme):
    dense, model = family(), quantize_model(family(), scheme)
    found = {name: tensors for name, tensors in model_tensors(model) if "experts" in name}
    assert len(found) == 2 * 2 * 3
    for name, tensors in found.items():
        where, _, index = name.rpartition(".")
        packed, state = by_bitsandbytes(dense.get_parameter(where).data[int(index)], scheme)
        expected = {"": packed} | {f".{k}": v for k, v in state.as_dict(packed=True).items()}
        assert {key.removeprefix(name) for key in tensors} == expected.keys()
        assert all(torch.equal(tensors[name + key], value) for key, value in expected.items()), name
        module, _, own = where.rpartition(".")
        assert torch.equal(model.get_submodule(module).dequantize(own)[int(index)], unpacked(packed, state))
    assert lora.count_parameters(model) == (sum(p.numel() for p in model.parameters() if p.requires_grad),
                                            sum(p.numel() for p in dense.parameters()))  # fmt: skip


def run_experts(model, way):
    if way == "fullshard":
        assert use_own_experts(model)
    model.config._experts_implementation = way


WAYS = list(itertools.product([mixtral, gpt_oss], ["fullshard", "grouped_mm", "eager", "batched_mm"]))


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(
            f, w, marks=[] if w == "fullshard" or (f, w) == WAYS[1] else pytest.mark.slow, id=f"{f.__name__}-{w}"
        )
        for f, w in WAYS
    ],
)
def test_results_are_those_of_a_dense_model(family, way):
    """With adapters on the experts and without; every way in which transformers computes them."""
    scheme = Scheme(double=True)
    model, dense = with_lora(quantize_model(family(), scheme)), with_lora(rounded(family(), scheme))
    run_experts(model, way)
    dense.config._experts_implementation = "eager"
    rows = batches(1)[0]
    losses = []
    for one in (model, dense):
        loss = one(input_ids=rows, labels=rows).loss
        loss.backward()
        with one.disable_adapter(), torch.no_grad():
            losses.append((loss.item(), one(input_ids=rows, labels=rows).loss.item()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and abs(losses[1][0] - losses[1][1]) > 1e-3
    ours, theirs = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, dense))
    assert ours.keys() == theirs.keys() and sum("experts" in name for name in ours) == 8
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", ["fullshard", pytest.param("eager", marks=pytest.mark.slow), "grouped_mm"])
def test_nothing_dense_is_kept_for_backward(way):
    model = with_lora(quantize_model(mixtral(), Scheme()))
    run_experts(model, way)
    experts = next(iter(quantized_experts(model).values()))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(input_ids=batches(1)[0])
    shapes = {tuple(t.shape) for t in kept if t.is_floating_point()}
    for shape in experts.fused.values():
        assert not shapes & {shape, shape[1:], shape[:0:-1]}, "a dense expert"
    assert any(t.dtype == torch.uint8 for t in kept)


def test_dtypes_follow_the_input_or_the_configuration():
    for compute, given, expected in [
        (None, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
    ]:
        module = mixtral().bfloat16().model.layers[0].mlp.experts
        plain = copy.deepcopy(module)
        NF4Experts.of(module, ["gate_up_proj", "down_proj"], Scheme(), compute)
        for name in module.fused:
            getattr(plain, name).data = module.dequantize(name, torch.float32)
        x = torch.randn(10, 128, generator=torch.Generator().manual_seed(0)).to(given)
        index, weights = torch.arange(20).view(10, 2) % 3, torch.full((10, 2), 0.5)
        found = module(x, index, weights.to(given))
        close = plain(x.float(), index, weights)
        assert found.dtype == given
        torch.testing.assert_close(found.float(), close, rtol=2e-2, atol=2e-2 if expected != torch.float32 else 1e-3)


def test_a_weight_of_experts_can_be_read_but_not_changed():
    model = quantize_model(mixtral(), Scheme())
    experts = model.model.layers[0].mlp.experts
    weight = experts.gate_up_proj
    assert weight.shape == (3, 192, 128) and weight.dtype == torch.float32
    assert torch.equal(weight.sum(), experts.dequantize("gate_up_proj").sum())
    assert torch.equal(weight[1] + 0, experts.dequantize("gate_up_proj")[1])
    assert torch.equal(weight.mT[2] + 0, experts.dequantize("gate_up_proj")[2].T)
    with pytest.raises(QuantizationError, match="cannot be changed in place"):
        weight.add_(1)
    with pytest.raises(QuantizationError, match="cannot be changed in place"):
        with_lora(model).merge_adapter()
    with pytest.raises(QuantizationError, match="4-bit experts are frozen"):
        experts.requires_grad_(True)


def test_every_use_of_a_weight_counts_the_adapters_in_force():
    """Products are done expert by expert, anything else with the dense weight: the values are the same."""
    experts = quantize_model(mixtral(), Scheme()).model.layers[0].mlp.experts
    torch.manual_seed(1)
    left, right = torch.randn(3, 192, 4), torch.randn(3, 4, 128)
    for adapters in (
        [],
        [LoraFactors(left, right, 0.5)],
        [LoraFactors(left, right, 0.5), LoraFactors(-left, right, 0.25)],
    ):
        experts.adapters["gate_up_proj"] = adapters
        weight, dense = experts.gate_up_proj, experts.dequantize("gate_up_proj")
        for one in adapters:
            dense = dense + one.scale * one.left @ one.right
        x, tall, bias = torch.randn(5, 128), torch.randn(5, 192), torch.randn(192)
        uses = {
            "linear": lambda w: nn.functional.linear(x, w[torch.tensor(1)], bias),  # noqa: B023
            "matmul": lambda w: tall @ w[-1],  # noqa: B023
            "swapped": lambda w: x @ w[0].mT,  # noqa: B023
            "grouped": lambda w: torch.cat([x[:2] @ w[0].mT, x[2:4] @ w[2].mT]),  # noqa: B023
            "bmm": lambda w: torch.bmm(x.expand(3, 5, 128), w.transpose(1, 2)),  # noqa: B023
            "several": lambda w: w[torch.tensor([2, 0, 2])],
            "whole": lambda w: w.sum(0) + w[1].T.sum(),
        }
        for name, use in uses.items():
            torch.testing.assert_close(use(weight), use(dense), rtol=1e-4, atol=1e-4, msg=name)
        ends = torch.tensor([2, 2, 4], dtype=torch.int32)
        found = nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        torch.testing.assert_close(found[:4], uses["grouped"](dense), rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError):
        weight[3]


# --- on several ranks -------------------------------------------------------------------------------------------------


def saved(place, family=mixtral):
    if runtime.is_main():
        family().save_pretrained(place)
    runtime.barrier()
    return place


def from_files(place, scheme, strategy="FULL_SHARD", **options):
    return load_pretrained(
        place, mesh_for(strategy), quantization_config=scheme, adapt=with_meta_lora, strategy=strategy, progress=False,
        small_parameter_bytes=2048, **options,
    )  # fmt: skip


def with_meta_lora(model):
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", target_parameters=PARAMETERS)
    )


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    ("strategy", "offload"),
    [pytest.param(s, o, marks=[] if (s, o) == ("FULL_SHARD", False) else pytest.mark.slow)
     for s, o in itertools.product(STRATEGIES, [False, True])],
)  # fmt: skip
def test_trained_from_files_resumed_and_loaded_by_peft(tmp_path, strategy, offload):
    """Quantized while loading, by ranks that share experts; adapters on experts, router and the rest."""
    base, scheme = saved(tmp_path / "base"), Scheme(double=True)
    model = from_files(base, scheme, strategy, cpu_offload=offload)
    dense = mixtral()
    for name, tensors in model_tensors(model):
        if ".experts." in name:
            where, _, index = name.rpartition(".")
            plain = where.removeprefix("base_model.model.").replace(".base_layer", "")
            packed, state = by_bitsandbytes(dense.get_parameter(plain).data[int(index)], scheme)
            assert torch.equal(tensors[name], packed) and torch.equal(tensors[f"{name}.absmax"], state.absmax), name
    if strategy == "FULL_SHARD":
        packed = [p for n, p in model.named_parameters() if n.endswith("gate_up_proj")]
        assert packed and all(p.to_local().shape[0] == p.shape[0] // 2 for p in packed)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    alone = PeftModel.from_pretrained(rounded(mixtral(), scheme), tmp_path / "first", is_trainable=True)
    expected = train(alone, 6, sharded=False)
    assert train(model, 6, sharded=True) == pytest.approx(expected, abs=1e-5)
    assert expected[0] - min(expected) > 1e-3

    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    runtime.barrier()
    loaded = PeftModel.from_pretrained(rounded(mixtral(), scheme), tmp_path / "adapter").eval()
    rows = mine(batches(1)[0])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=rows).logits, loaded(input_ids=rows).logits, rtol=1e-4, atol=1e-5)
    save_state(tmp_path / "state", model=model)
    again = from_files(base, scheme, strategy, cpu_offload=offload)
    load_state(tmp_path / "state", model=again)
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=rows).logits, model(input_ids=rows).logits)
    size = sum(f.stat().st_size for f in (tmp_path / "state").rglob("*.safetensors"))
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert size < 2 * trained, "experts are not saved again"


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_and_compiled_units(tmp_path, reentrant):
    base, scheme = saved(tmp_path / "base"), Scheme()
    model = from_files(base, scheme)
    model.save_pretrained(tmp_path / "first")
    runtime.barrier()
    if reentrant:
        model.enable_input_require_grads()
    for layer in model.base_model.model.model.layers:
        checkpoint_module(layer, reentrant=reentrant)
    alone = PeftModel.from_pretrained(rounded(mixtral(), scheme), tmp_path / "first", is_trainable=True)
    assert train(model, 3, sharded=True) == pytest.approx(train(alone, 3, sharded=False), abs=1e-5)
    compiled = from_files(base, scheme)
    compiled.compile_units(backend="aot_eager")
    alone = PeftModel.from_pretrained(rounded(mixtral(), scheme), tmp_path / "first", is_trainable=True)
    assert train(compiled, 2, sharded=True) == pytest.approx(train(alone, 2, sharded=False), abs=1e-5)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["fullshard", "eager", "grouped_mm"])
def test_a_global_program(way):
    """Sharded inputs: the loss is over the global batch."""
    alone, model = with_lora(rounded(mixtral(), Scheme())), with_lora(quantize_model(mixtral(), Scheme()))
    alone.config._experts_implementation = "eager"
    run_experts(model, way)
    mesh, batch = mesh_for("FULL_SHARD"), batches(1)[0]
    model = FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy)
    ids = xs.mark_sharding(batch.clone(), mesh, ("fsdp", None))
    loss, expected = model(input_ids=ids, labels=ids).loss, alone(input_ids=batch, labels=batch).loss
    loss.backward()
    expected.backward()
    assert loss.full_tensor().item() == pytest.approx(expected.item(), abs=1e-5)
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-6)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", [mixtral, gpt_oss])
def test_transformers_reads_what_is_exported(tmp_path, family):
    """Linear layers in bitsandbytes' form; experts dense, as transformers holds them."""
    base = saved(tmp_path / "base", family)
    model = load_pretrained(base, mesh_for("FULL_SHARD"), quantization_config=Scheme(), progress=False)
    save_pretrained(model, tmp_path / "packed", progress=False)
    rows = batches(1)[0]
    with torch.no_grad():
        logits = model(input_ids=rows).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map="cpu", dtype=torch.float32)
        for name, module in quantized_experts(model).items():
            with model.summon_full_params(writeback=False):
                for own in module.fused:
                    assert torch.equal(theirs.get_parameter(f"{name}.{own}"), module.dequantize(own)), name
        again = load_pretrained(tmp_path / "packed", mesh_for("FULL_SHARD"), progress=False)
        torch.testing.assert_close(again(input_ids=rows).logits, logits)


def test_merged_on_the_weights_that_it_was_trained_beside(tmp_path):
    scheme = Scheme(double=True)
    mixtral().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with_lora(base).save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", dequantized=scheme, progress=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = PeftModel.from_pretrained(rounded(mixtral(), scheme), tmp_path / "adapter").merge_and_unload()
    for name, value in expected.state_dict().items():
        assert torch.equal(merged[name], value), name
