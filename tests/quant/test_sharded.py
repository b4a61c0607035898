"""QLoRA on several ranks equals one device that holds the dense weights bitsandbytes makes."""

import itertools

import bitsandbytes.functional as bnb
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullshard.spmd as xs
from fullshard import lora
from fullshard.config.errors import QuantizationError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, MixedPrecision, transformer_auto_wrap_policy
from fullshard.quant.export import model_tensors
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantize import quantize_model, quantized_layers
from fullshard.quant.sharded_groups import Scheme, quantize_shard, shard_range
from tests.fsdp.programs import STRATEGIES, mesh_for, mine
from tests.pool import ranks
from tests.quant.programs import alone, batches, llama, sharded_qlora, train, with_lora

STEPS = 10
CASES = list(itertools.product(STRATEGIES, ["", "kept", "reentrant"], [False, True], [False, True]))
DEFAULT = {
    ("FULL_SHARD", "kept", True, True),
    ("FULL_SHARD", "", False, False),
    ("HYBRID_SHARD", "reentrant", False, True),
}


def _cases(world_size):
    for case in CASES:
        if world_size == 1 and case[0].startswith("HYBRID"):
            continue
        strategy, checkpointed, offload, double = case
        default = case in DEFAULT and (world_size == 4 and case[1] or world_size == 2 and not case[1])
        words = [strategy, checkpointed or "none", "offload" if offload else "device", "double" if double else "single"]
        yield pytest.param(*case, marks=[] if default else [pytest.mark.slow], id="-".join(words))


def _check(strategy, checkpointed, offload, double):
    scheme = Scheme(double=double)
    model = sharded_qlora(scheme, strategy, checkpointed, cpu_offload=offload, small_parameter_bytes=2048)
    losses = train(model, STEPS, sharded=True)
    expected = alone(scheme, STEPS)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5, (losses, expected)
    assert expected[0] - min(expected) > 1e-3  # it learns, so the comparison is not of a constant


@ranks(1)
@pytest.mark.parametrize(("strategy", "checkpointed", "offload", "double"), list(_cases(1)))
def test_one_rank(strategy, checkpointed, offload, double):
    _check(strategy, checkpointed, offload, double)


@ranks(2)
@pytest.mark.parametrize(("strategy", "checkpointed", "offload", "double"), list(_cases(2)))
def test_two_ranks(strategy, checkpointed, offload, double):
    _check(strategy, checkpointed, offload, double)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize(("strategy", "checkpointed", "offload", "double"), list(_cases(4)))
def test_four_ranks(strategy, checkpointed, offload, double):
    _check(strategy, checkpointed, offload, double)


# --- bytes ------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_scales_of_scales_do_not_depend_on_the_number_of_ranks():
    torch.manual_seed(0)
    for shape in [(300, 700), (64, 64), (128, 1024)]:
        w = torch.randn(shape).bfloat16()
        _, state = bnb.quantize_4bit(w, compress_statistics=True, quant_type="nf4")
        scheme, group = Scheme(double=True), torch.distributed.group.WORLD
        start, stop = shard_range(w.numel(), scheme, runtime.rank(), runtime.world_size())
        mine_ = quantize_shard(w.view(-1)[start:stop], w.numel(), scheme, group)
        everyone = [None] * runtime.world_size()
        torch.distributed.all_gather_object(everyone, mine_)
        whole = {name: torch.cat([parts[name] for parts in everyone]) for name in mine_}
        alone_ = quantize_shard(w.view(-1), w.numel(), scheme)
        assert all(torch.equal(whole[name], alone_[name]) for name in alone_)
        pairs = whole["nested"].view(torch.float32)
        assert torch.equal(pairs[:, 0], state.state2.absmax) and torch.equal(pairs[0, 1], state.offset)
        assert torch.equal(whole["absmax"].view(-1)[: state.absmax.numel()], state.absmax)


@ranks(2, 4)
def test_sharded_and_gathered_bytes_are_those_that_were_quantized():
    """Also where packed bytes would be NaNs in the storage dtype, and compute is in another."""
    scheme = Scheme(storage=torch.bfloat16)
    plain = quantize_model(llama(), scheme)
    layer = plain.model.layers[0].mlp.up_proj
    layer.packed.data.copy_(torch.arange(layer.packed.numel()).view_as(layer.packed).mul(7).to(torch.uint8) | 0x7F)
    expected = {name: p.clone() for name, p in plain.state_dict().items()}
    model = FSDPv2(
        plain, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision="fp16",
        small_parameter_bytes=2048,
    )  # fmt: skip
    seen = []
    layer.register_forward_pre_hook(lambda m, args: seen.append({n: p.clone() for n, p in m.parts.items()}))
    assert all(p.to_local().shape[0] < p.shape[0] for p in layer.parts.values())
    with torch.no_grad():
        model(input_ids=mine(batches(1)[0]))
    names = {n: f"model.layers.0.mlp.up_proj.{n}" for n in layer.parts}
    assert all(torch.equal(seen[0][n], expected[full]) for n, full in names.items())
    whole = model.full_state_dict()
    assert all(torch.equal(whole[full], expected[full]) for full in names.values())
    tensors = dict(model_tensors(model))["model.layers.0.mlp.up_proj"]
    packed = tensors["model.layers.0.mlp.up_proj.weight"]
    assert packed.dtype == torch.bfloat16 and packed.isnan().any()
    assert torch.equal(
        packed.view(-1).view(torch.uint8), expected[names["packed"]].view(-1)[: layer.weight.numel() // 2]
    )


@ranks(2)
def test_the_whole_weight_is_read_where_it_is_whole():
    model = sharded_qlora(Scheme(double=True), "FULL_SHARD")
    layer = next(m for m in model.modules() if isinstance(m, NF4Linear) and m.scheme.groups(m.weight.numel()) > 1)
    assert layer.weight.shape == layer.shape
    with pytest.raises(QuantizationError, match="summon_full_params"):
        layer.dequantize()
    expected = {n: m.dequantize() for n, m in quantized_layers(quantize_model(llama(), Scheme(double=True))).items()}
    with model.summon_full_params(writeback=False):
        for name, found in quantized_layers(model).items():
            plain = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            assert torch.equal(found.dequantize(), expected[plain])


# --- dtypes -----------------------------------------------------------------------------------------------------------


class Census(TorchDispatchMode):
    """Notes the dtype and shape of every tensor that an operator makes."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.made |= {(t.dtype, tuple(t.shape)) for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


@ranks(2)
@pytest.mark.parametrize("precision", [None, "bf16", MixedPrecision("bf16", master_dtype=None)])
def test_one_unit_holds_packed_base_narrow_norms_and_wide_adapters(precision):
    base = quantize_model(llama(torch.bfloat16), Scheme(double=True))
    model = with_lora(base, autocast_adapter_dtype=True)
    model = FSDPv2(
        model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy, mixed_precision=precision
    )
    unit = model.plan.units[1]
    stored = {}
    for p in unit.parameters:
        kind = "adapter" if "lora" in p.name else "norm" if "norm" in p.name else p.name.rpartition(".")[2]
        stored.setdefault(kind, set()).add((p.dtype, p.compute_dtype, p.trainable))
    wide = "float32" if precision is None else "bfloat16"
    assert stored == {
        "packed": {("uint8", "uint8", False)}, "absmax": {("uint8", "uint8", False)},
        "nested": {("uint8", "uint8", False)}, "bias": {("bfloat16", "bfloat16", False)},
        "norm": {("bfloat16", "bfloat16", False)}, "adapter": {("float32", wide, True)},
    }  # fmt: skip
    rows = mine(batches(1)[0])
    with Census() as census:
        model(input_ids=rows, labels=rows).loss.backward()
    shapes = {m.shape for m in quantized_layers(model).values()}
    dense = {dtype for dtype, shape in census.made if shape in shapes}
    assert dense == {torch.bfloat16}, census.made  # unpacked to the dtype of the activations, never wider
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in model.named_parameters() if "lora" in n} and len(trained) == 28
    assert lora.summary(model) == lora.summary(with_lora(llama()))


# --- programs ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_global_program():
    """Sharded inputs: the loss is over the global batch, and layers run piece by piece, without copies of the whole."""
    scheme = Scheme(double=True)
    model = sharded_qlora(scheme, "FULL_SHARD")
    mesh = mesh_for("FULL_SHARD")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    runtime.forget_warnings()
    for batch in batches(3):
        ids = xs.mark_sharding(batch, mesh, ("fsdp", None))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().item())
    assert max(abs(a - b) for a, b in zip(losses, alone(scheme, 3), strict=True)) < 1e-5
    assert not any("linear_4bit" in key for key in runtime.warned())


@ranks(2)
@pytest.mark.slow
def test_compiled_units():
    scheme = Scheme(double=True)
    model = sharded_qlora(scheme, "FULL_SHARD")
    model.compile_units(backend="aot_eager")
    assert max(abs(a - b) for a, b in zip(train(model, 3, True), alone(scheme, 3), strict=True)) < 1e-5
