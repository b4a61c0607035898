"""Tensor parallelism by the plans of transformers' models: losses, gradients and weights are those of one device."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GptOssConfig

import fullshard.spmd as xs
from fullshard.config.errors import ConfigError
from fullshard.distributed import data_ranks
from fullshard.distributed.ranks import exchange
from fullshard.fsdp import FSDPv2
from fullshard.fsdp.local_axes import local_axes_of
from fullshard.lora.fused import fuse_lora
from fullshard.lora.fused_dropout import Dropout, seed_of_slice
from fullshard.lora.gated_mlp import fuse_mlps
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.layer_groups import gated_mlps, shared_inputs
from fullshard.parallel.model import join_ranks, shard_model
from fullshard.parallel.settings import EngineSettings
from fullshard.parallel.tensor_parallel import split_model
from fullshard.spmd.mesh import VirtualMesh
from tests.pool import ranks

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi3": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
IN_FP32 = {"gemma2": 1e-6, "gemma3_text": 1e-6, "qwen3": 1e-6}
"""Families that compute norms in fp32, whatever the model's dtype: sums of other parts are rounded differently."""
ROWS, LENGTH = 8, 10


def model(family, **changes):
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in made.parameters():  # biases and norms that are not all zero or one
            p.add_(torch.randn_like(p), alpha=0.1)
    return made.double().train()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 96, (ROWS, LENGTH), generator=generator)
    ids[0, 3] = 0  # a padding token: its vector gets no gradient
    return ids


def own_rows():
    each = ROWS // data_ranks.data_size()
    return slice(data_ranks.data_rank() * each, (data_ranks.data_rank() + 1) * each)


def whole(t):
    return t.full_tensor() if xs.is_sharded(t) else t


def trained(module, rows=slice(None), steps=3, head=None, accumulates=1):
    """Losses, gradients of the first step, norms, and weights after a few steps."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer, losses, norms, first = torch.optim.SGD(trainable, lr=0.5), [], [], {}
    for step in range(steps):
        ids, total = batch(step)[rows], 0.0
        for part in range(accumulates):
            some = ids[part::accumulates]
            if head is None:
                loss = module(input_ids=some, labels=some).loss
            else:
                with head.loss_pass(1 / (some.shape[0] * (LENGTH - 1)), some.shape[0] * (LENGTH - 1)) as measured:
                    loss = module(input_ids=some, labels=some)["loss"]
                assert 0 <= measured.sums[1] <= some.shape[0] * (LENGTH - 1) and measured.sums[2] > 0
            (loss / accumulates).backward()
            total += loss.detach() / accumulates
        losses.append(
            data_ranks.sum_over_rows("loss", total.clone().double().reshape(1)).item() / data_ranks.data_size()
        )
        if rows == slice(None):
            losses[-1] = total.item()
        if not first:
            first = {name: whole(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}
        clipped = module.clip_grad_norm_ if isinstance(module, FSDPv2) else None
        norms.append((clipped(0.5) if clipped else nn.utils.clip_grad_norm_(trainable, 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, first, {name: whole(p).detach() for name, p in module.named_parameters()}


def same(found, expected, close=1e-10):
    assert found[0] == pytest.approx(expected[0], rel=close) and found[1] == pytest.approx(expected[1], rel=close)
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        assert ours.keys() == theirs.keys()
        largest = max(float(value.abs().max()) for value in theirs.values())
        for name, value in theirs.items():
            difference = float((ours[name] - value).abs().max())
            assert difference <= close * largest, f"{name}: {difference:.1e} of {largest:.1e}"


def sharded(module, **settings):
    engine = EngineSettings(use_cpu=True, tp_size=2, **settings)
    join_ranks(engine)
    return shard_model(module, engine)


def some(names, kept):
    """The names; those that are not kept are slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


@ranks(2)
@pytest.mark.parametrize("family", some(FAMILIES, ("qwen3", "phi3", "starcoder2")))
def test_two_ranks_are_one_device(family):
    expected = trained(model(family))
    ours = sharded(model(family))
    assert ours.mesh.shape() == {"fsdp": 1, "tp": 2}
    same(trained(ours, own_rows()), expected, IN_FP32.get(family, 1e-10))


@ranks(4)
@pytest.mark.parametrize("replicas", some([1, 2], [2]))
@pytest.mark.parametrize("family", some(["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"], ["qwen2"]))
def test_with_fsdp_and_replicas_it_is_one_device(family, replicas):
    plain, ours = model(family), model(family)
    expected = trained(plain, head=ChunkedLossHead(plain, chunk_tokens=7, entropy=True), accumulates=2)
    head = ChunkedLossHead(ours, chunk_tokens=7, entropy=True)  # transformers' own loss is in fp32
    seen, layer = [], head.head
    found = sharded(ours, dp_replicate_size=replicas)
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.shape))
    same(trained(found, own_rows(), head=head, accumulates=2), expected, IN_FP32.get(family, 1e-10))
    assert set(seen) == {(48, 32)}, "each rank has the rows of its tokens"


def with_lora(family, targets, dropout=0.0, fused=False):
    peft_model = get_peft_model(
        model(family),
        LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM"),
    )
    torch.manual_seed(5)
    for name, p in peft_model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn_like(p, dtype=torch.float64) / 4
    if fused:
        fuse_lora(peft_model, shared_inputs(peft_model))
        fuse_mlps(peft_model, gated_mlps(peft_model))
    return peft_model


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@ranks(4)
@pytest.mark.parametrize(
    ("family", "targets", "fused"),
    [
        pytest.param("llama", ALL_LINEAR, False, marks=pytest.mark.slow),
        ("qwen2", ALL_LINEAR, True),
        pytest.param("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], False, marks=pytest.mark.slow),
        pytest.param("llama", ["q_proj", "lm_head"], False, marks=pytest.mark.slow),
    ],
)
def test_lora_is_split_with_its_layers(family, targets, fused):
    plain, ours = with_lora(family, targets), with_lora(family, targets, fused=fused)
    expected = trained(plain, head=ChunkedLossHead(plain, entropy=True))
    head = ChunkedLossHead(ours, entropy=True)
    found = sharded(ours)
    same(trained(found, own_rows(), head=head), expected)
    plan = found.plan.parameters
    prefix = "base_model.model.model.layers.0."
    if "o_proj" in targets:
        a, b = (plan[f"{prefix}self_attn.o_proj.lora_{matrix}.default.weight"] for matrix in "AB")
        assert (a.whole, a.summed_axes, b.summed_axes) == ((4, 16), (), ("tp",))
    if "q_proj" in targets:
        a, b = (plan[f"{prefix}self_attn.q_proj.lora_{matrix}.default.weight"] for matrix in "AB")
        assert (b.whole, a.summed_axes, b.summed_axes) == ((16, 4), ("tp",), ())


@ranks(2)
def test_dropout_of_adapters_is_that_of_one_device():
    results = []
    for tp in (1, 2):
        peft_model = with_lora("llama", ALL_LINEAR, dropout=0.3)
        head = ChunkedLossHead(peft_model, entropy=True)
        if tp == 2:
            peft_model = sharded(peft_model)
        torch.manual_seed(11)
        results.append(trained(peft_model, head=head))
    same(results[1], results[0])


@ranks(2)
def test_fused_dropout_draws_a_mask_for_each_slice():
    ours = sharded(with_lora("llama", ALL_LINEAR, dropout=0.5, fused=True))
    layers = ours.base_model.model.model.layers[0]
    down, gate = layers.mlp.down_proj, layers.mlp.gate_proj
    seed = torch.tensor([5])
    kept = [Dropout(seed_of_slice(seed, layer), 0.5).kept(torch.Size([50, 24]), 0) for layer in (down, gate)]
    both = [exchange(one.tolist(), "masks") for one in kept]
    assert both[0][0] != both[0][1] and both[1][0] == both[1][1]


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("kind", ["full", "fused LoRA"])
def test_compiled_recomputed_and_offloaded(kind):
    """Graphs without breaks hold the sums between layers."""
    full = kind == "full"
    plain = model("llama") if full else with_lora("llama", ALL_LINEAR)
    ours = model("llama") if full else with_lora("llama", ALL_LINEAR, fused=True)
    expected = trained(plain, head=ChunkedLossHead(plain, entropy=True))
    head = ChunkedLossHead(ours, entropy=True)
    found = sharded(
        ours, backend="aot_eager", use_fullgraph=True, offload_params=True, activation_checkpointing=True,
        sharding_strategy="SHARD_GRAD_OP",
    )  # fmt: skip
    same(trained(found, own_rows(), head=head), expected)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(made, text, size=2, **settings):
    mesh = VirtualMesh((4 // size, size), ("fsdp", "tp"))
    with pytest.raises(ConfigError, match=text):
        split_model(made, mesh, settings.pop("tp_plan", None))


def test_models_that_cannot_be_split_so():
    with torch.device("meta"):
        refused(model("llama"), r"tp_size 4: LlamaForCausalLM has 2 key/value heads, .* expected one of 1, 2$", size=4)
        refused(model("llama", vocab_size=97), r"97 tokens or outputs in lm_head, .* expected one of 1$")
        refused(model("llama", attention_dropout=0.1), r"attention_dropout is 0\.1")
    torch.manual_seed(0)
    adapted = get_peft_model(model("llama"), LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]))
    refused(adapted, r"adapter on model\.layers\.0\.self_attn\.q_proj is a Linear that tensor parallelism does not")
    prefix = get_peft_model(model("llama"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    refused(prefix, "prefix tuning gives every rank the keys of all heads")


def test_families_without_a_plan_and_plans_of_the_user():
    plain = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=96))
    refused(plain, "GPT2LMHeadModel has no tensor-parallel plan; give one with tp_plan")
    with torch.device("meta"):  # transformers adds the embedding alone to an empty plan
        refused(AutoModelForCausalLM.from_config(GptOssConfig(num_hidden_layers=1)), "GptOssForCausalLM has no tensor")
    plan = {"model.layers.*.mlp.up_proj": "columns"}
    refused(model("llama"), r"up_proj has the style 'columns'.* Expected one of colwise", tp_plan=plan)
    refused(model("llama"), r"no module of LlamaForCausalLM matches 'model\.layer'", tp_plan={"model.layer": "colwise"})
    plan = {"model.layers.*.mlp.down_proj": "replicate"}  # the MLP then has a slice where the whole is expected
    refused(model("llama"), r"two ranks compute something else than one: a rank fails: .*shapes", tp_plan=plan)
    plan = {"model.layers.*.self_attn.q_norm": "replicate", "model.layers.*.self_attn.k_norm": "replicate"}
    made = model("qwen3")
    split_model(made, VirtualMesh((2, 2), ("fsdp", "tp")), plan)  # the trial shows that ranks have terms
    assert local_axes_of(made.model.layers[0].self_attn.q_norm.weight).summed == ("tp",)


@ranks(2)
def test_a_plan_in_the_settings_is_applied():
    plan = {"lm_head": "replicate", "model.embed_tokens": "replicate"}
    expected = trained(model("llama"))
    ours = sharded(model("llama"), tp_plan=plan)
    assert ours.plan.parameters["lm_head.weight"].whole == (96, 32)
    same(trained(ours, own_rows()), expected)
