"""What `FSDPv2` makes of a module: the same object, its units, its plan; and what it refuses."""

import copy
import functools
import json
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

import fullshard
import fullshard.fsdp.wrap
import fullshard.spmd as xs
from fullshard.config.errors import ConfigError, FSDPError, MeshError, UserError
from fullshard.distributed import runtime
from fullshard.fsdp import (
    BackwardPrefetch,
    FSDPv2,
    MixedPrecision,
    ShardingPlan,
    ShardingStrategy,
    SpmdFullyShardedDataParallel,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from tests.fsdp.programs import (
    Block,
    Stack,
    alone,
    batches,
    build,
    exact,
    llama,
    loss_of,
    mean_over_ranks,
    mesh_for,
    mine,
)
from tests.pool import ranks

DOUBLE = torch.float64


def _model(dtype=torch.float32, **options):
    options = {"auto_wrap_policy": transformer_auto_wrap_policy, "small_parameter_bytes": 2048, **options}
    return FSDPv2(build("llama", dtype), mesh_for("FULL_SHARD"), **options)


# --- the same object ------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_module_stays_itself():
    plain = build("llama", torch.float32)
    names, cls = list(plain.state_dict()), type(plain)
    calls = []
    plain.register_forward_hook(lambda *_: calls.append(1))
    plain.marker = object()
    model = FSDPv2(plain, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    assert model is plain and isinstance(model, cls) and isinstance(model, FSDPv2)
    assert type(model).__name__ == cls.__name__ and type(model).__qualname__ == cls.__qualname__
    assert list(model.state_dict()) == names and [n for n, _ in model.named_parameters()] == names
    assert model.config is plain.config and model.marker is plain.marker
    assert isinstance(model.model.layers[0], FSDPv2) and not isinstance(model.model, FSDPv2)
    loss_of(model, mine(batches(1, torch.float32)[0]))
    assert calls == [1]
    again = type(model)(model.config)
    assert type(again) is cls and not isinstance(again, FSDPv2)
    assert not hasattr(FSDPv2(Stack(), mesh_for("FULL_SHARD")), "save_pretrained")


def test_names_are_where_the_seeds_import_them():
    assert fullshard.FSDPv2 is FSDPv2 is SpmdFullyShardedDataParallel is fullshard.SpmdFullyShardedDataParallel
    assert fullshard.fsdp.wrap.transformer_auto_wrap_policy is fullshard.transformer_auto_wrap_policy
    for name in ("checkpoint_module", "ShardingStrategy", "MixedPrecision", "size_based_auto_wrap_policy"):
        assert getattr(fullshard, name) is getattr(fullshard.fsdp, name)


def test_strategies_by_name_number_and_member():
    for strategy in ShardingStrategy:
        for spelling in (strategy, strategy.name, strategy.name.lower(), strategy.value, str(strategy.value)):
            assert ShardingStrategy.of(spelling) is strategy
    for wrong in ("ZERO3", 0, 6, None, True, 2.5):
        with pytest.raises(FSDPError, match=r"FULL_SHARD \(1\)"):
            ShardingStrategy.of(wrong)
    assert BackwardPrefetch.of(None) is BackwardPrefetch.NONE is BackwardPrefetch.of("NO_PREFETCH")
    with pytest.raises(FSDPError, match=r"BACKWARD_PRE"):
        BackwardPrefetch.of("BACKWARD")


@ranks(2)
@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"strategy": "SHARD_GRAD_OP"}, 'strategy is "FULL_SHARD" on rank 0, "SHARD_GRAD_OP" on rank 1'),
        ({"mixed_precision": "bf16"}, "param_dtype of mixed_precision is .* on rank 0, .*bfloat16.* on rank 1"),
        ({"gathers_in_flight": 3}, "gathers_in_flight is 1 on rank 0, 3 on rank 1"),
        ({"auto_wrap_policy": {Block}}, "number of units is 1 on rank 0, 4 on rank 1"),
        ({"freeze": True}, "number of trainable parameters is 14 on rank 0, 13 on rank 1"),
        ({"wide": True}, "checksum of the sharding plan is "),
    ],
)
def test_ranks_that_wrap_differently_are_refused(options, difference):
    """On all of them, and the next model is not disturbed."""
    options = options if runtime.rank() == 1 else {}
    model = Stack()
    if options.pop("freeze", False):
        model.out.bias.requires_grad_(False)
    if options.pop("wide", False):
        model.out.weight = nn.Parameter(torch.zeros(model.out.weight.shape[0] + 2, model.out.weight.shape[1]))
    with pytest.raises(ConfigError, match=f"^the ranks would train differently: .*{difference}"):
        FSDPv2(model, mesh_for("FULL_SHARD"), **options)
    assert not isinstance(model, FSDPv2)
    FSDPv2(Stack(), mesh_for("FULL_SHARD"))


# --- policies -------------------------------------------------------------------------------------------------------


@ranks(2)
def test_policies_choose_units():
    def units(policy, make=Stack, **options):
        return [
            unit.name for unit in FSDPv2(make(), mesh_for("FULL_SHARD"), auto_wrap_policy=policy, **options).plan.units
        ]

    blocks = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert units(None) == [""]
    assert units({Block}) == units(Block) == units("Block") == units(["Block"]) == blocks
    assert units(functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})) == blocks
    assert units(functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={"Block"})) == blocks
    assert units(functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block))) == blocks
    assert units(functools.partial(size_based_auto_wrap_policy, min_num_params=200)) == blocks
    assert len(units(always_wrap_policy)) == 1 + 3 * 2 + 1  # every Linear; a Block has nothing left of its own
    assert units(transformer_auto_wrap_policy, llama) == ["", "model.layers.0", "model.layers.1"]
    # The root never goes through the policy, and has what is left.
    plan = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}).plan
    assert [p.name for p in plan.units[0].parameters] == ["out.weight", "out.bias"]


COMMON = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
}  # fmt: skip
WITHOUT_NAMED_LAYERS = {
    "distilbert": {
        "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
    },
    "deberta-v2": {**COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "albert": {**COMMON, "embedding_size": 8},
}  # fmt: skip
"""Models of transformers without `_no_split_modules`."""


def _classifier(kind):
    sizes = WITHOUT_NAMED_LAYERS[kind]
    config = AutoConfig.for_model(kind, vocab_size=31, max_position_embeddings=16, pad_token_id=0, **sizes)
    runtime.seed(0)
    return AutoModelForSequenceClassification.from_config(config).double()


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("distilbert", ["distilbert.transformer.layer.0", "distilbert.transformer.layer.1"]),
        ("deberta-v2", ["deberta.encoder.layer.0", "deberta.encoder.layer.1"]),
        ("albert", []),  # one layer, called twice
    ],
)
def test_models_that_do_not_name_their_layers(kind, layers):
    """The layers that repeat in the model's lists are units; a model without any is one unit."""
    plain = _classifier(kind)
    assert not any(getattr(m, "_no_split_modules", None) for m in plain.modules())
    model = FSDPv2(_classifier(kind), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    assert [unit.name for unit in model.plan.units] == ["", *layers]
    ids, labels = torch.arange(1, 29).reshape(4, 7), torch.tensor([0, 1, 1, 0])
    plain(input_ids=ids, labels=labels).loss.backward()
    rows = slice(2 * runtime.rank(), 2 * runtime.rank() + 2)
    model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)


@ranks(1)
def test_layers_are_the_members_of_the_outermost_lists():
    def units(model):
        return [
            unit.name
            for unit in FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy).plan.units
        ]

    def pair():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    with mock.patch.object(fullshard.fsdp.wrap, "_report") as report:
        assert units(Stack()) == ["", "blocks.0", "blocks.1", "blocks.2"]  # not the layers inside a block
        assert units(nn.Linear(4, 4)) == [""]
    said = [call.args[0] for call in report.call_args_list]
    assert [line.partition(": ")[2] for line in said] == [
        "Stack does not name its layers (_no_split_modules): its repeated layers are units (Block)",
        "Linear does not name its layers (_no_split_modules): it is one unit",
    ]
    assert units(nn.Sequential(nn.Linear(4, 4), pair(), pair())) == ["", "1", "2"]
    assert units(nn.Sequential(pair(), nn.Linear(4, 2))) == ["", "0.0", "0.2"]  # a list of one has its own inside
    renamed = Stack()
    renamed._no_split_modules = ["OfAnotherVariant"]
    assert units(renamed) == ["", "blocks.0", "blocks.1", "blocks.2"]


@ranks(1)
def test_policy_mistakes_name_the_candidates():
    mesh = mesh_for("FULL_SHARD")
    with pytest.raises(FSDPError, match=r"no module of class Blok in Stack.*Candidates.*Block"):
        FSDPv2(Stack(), mesh, auto_wrap_policy={"Blok"})
    with pytest.raises(FSDPError, match=r"LlamaDecoderLayer"):
        FSDPv2(
            llama(),
            mesh,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={"GPT2Block"}),
        )
    with pytest.raises(FSDPError, match=r"lambda_fn"):
        FSDPv2(Stack(), mesh, auto_wrap_policy=lambda_auto_wrap_policy)
    with pytest.raises(FSDPError, match=r"auto_wrap_policy=7"):
        FSDPv2(Stack(), mesh, auto_wrap_policy=7)


@ranks(2)
def test_nested_wrapping_by_hand_and_by_callable():
    def make():
        torch.manual_seed(0)
        return Stack().double()

    x = torch.randn(8, 8, dtype=DOUBLE)
    reference = make()
    reference(x).square().mean().backward()
    mesh = mesh_for("FULL_SHARD")
    seen = []

    def wrapper(module, *args, **kwargs):
        seen.append(module)
        return FSDPv2(module, *args, **kwargs)

    by_hand = make()
    for block in by_hand.blocks[:2]:
        FSDPv2(block, mesh, small_parameter_bytes=0)
    by_hand.blocks[0](x[:2])  # a wrapped part runs by itself, too
    models = [
        FSDPv2(by_hand, mesh),
        FSDPv2(make(), mesh, auto_wrap_policy={Block}, auto_wrapper_callable=wrapper),
        FSDPv2(make(), mesh, auto_wrap_policy={Block}, auto_wrapper_callable=lambda m, *_, **__: m),
    ]
    assert len(seen) == 3
    assert [len(m.plan.units) for m in models] == [3, 4, 1]
    assert [u.name for u in models[0].plan.units] == ["", "blocks.0", "blocks.1"]
    for model in models:
        assert "blocks.1.up.weight" in model.plan.parameters
        model(mine(x)).square().mean().backward()
        for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                q.grad.full_tensor(), p.grad, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(10, 8), Block()
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


@ranks(2)
@pytest.mark.parametrize(
    "parts", [("embed", ""), ("head", ""), ("embed", "head", ""), ("embed", "block", "head")], ids=lambda p: "+".join(p)
)
def test_a_weight_tied_to_a_part_wrapped_earlier_stays_tied(parts):
    """The empty name is the model around the parts."""
    torch.manual_seed(0)
    reference = Tied()
    torch.manual_seed(0)
    model = Tied()
    for part in parts:
        FSDPv2(model.get_submodule(part), mesh_for("FULL_SHARD"))
    assert model.head.weight is model.embed.weight
    ids = torch.arange(8)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (reference, model)]
    for _ in range(2):
        reference(ids).square().mean().backward()
        model(mine(ids)).square().mean().backward()
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), reference.embed.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.head.weight.full_tensor(), reference.head.weight, rtol=0, atol=1e-5)


@ranks(2)
def test_tied_parts_are_wrapped_alike():
    model = Tied()
    FSDPv2(model.embed, mesh_for("FULL_SHARD"))
    with pytest.raises(FSDPError, match="weight is tied to weight of a module that was wrapped with another mesh"):
        FSDPv2(model.head, mesh_for("FULL_SHARD"), mixed_precision="bf16")


# --- the plan -------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_plan_is_data():
    model = _model(mixed_precision="bf16")
    plan = model.plan
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan and json.loads(plan.to_json())["strategy"] == "FULL_SHARD"
    text = str(plan)
    assert "model.layers.1 [LlamaDecoderLayer]" in text and "float32→bfloat16" in text and "padded by 1" in text
    assert set(plan.parameters) == {n for n, _ in model.named_parameters()}
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    assert abs(plan.shard_bytes - held) <= 2 * 32 * 4  # padded rows: the last rank holds one less of each
    weight = plan.parameters["model.layers.0.mlp.down_proj.weight"]
    assert weight.spec == ("fsdp", None) and weight.direct and weight.piece == (16, 44)
    embedding = plan.parameters["model.embed_tokens.weight"]
    assert not embedding.direct and embedding.padding == 1


@ranks(2)
def test_tied_parameters_are_planned_once():
    model = FSDPv2(
        build("llama-tied", torch.float32), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy
    )
    tied = model.plan.parameters["lm_head.weight"]
    assert tied.names == ("model.embed_tokens.weight", "lm_head.weight")
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- refusals -------------------------------------------------------------------------------------------------------


@ranks(2)
def test_misuse_is_explained():
    mesh = mesh_for("FULL_SHARD")
    xs.set_global_mesh(None)
    with pytest.raises(MeshError, match=r"no mesh.*set_global_mesh"):
        FSDPv2(Stack())
    with pytest.raises(MeshError, match=r"no axis named 'fsdp'"):
        FSDPv2(Stack(), xs.Mesh(np.arange(2), (2,), ("data",)))
    with pytest.raises(MeshError, match=r"expected a fullshard.spmd.Mesh or a torch DeviceMesh, got int"):
        FSDPv2(Stack(), 2)
    with pytest.raises(MeshError, match=r"extra_data_axis='data'"):
        FSDPv2(Stack(), mesh, extra_data_axis="data")
    with pytest.raises(MeshError, match=r"HYBRID_SHARD replicates parameters.*'replica', 'fsdp'"):
        FSDPv2(Stack(), mesh, strategy="HYBRID_SHARD")
    with pytest.raises(FSDPError, match=r"unknown sharding strategy 'ZERO'"):
        FSDPv2(Stack(), mesh, strategy="ZERO")
    with pytest.raises(FSDPError, match=r"ModuleList has no forward"):
        FSDPv2(Stack().blocks, mesh)
    with pytest.raises(FSDPError, match=r"wraps an nn.Module, not function"):
        FSDPv2(lambda x: x, mesh)
    model = FSDPv2(Stack(), mesh)
    with pytest.raises(FSDPError, match=r"already wrapped"):
        FSDPv2(model, mesh)
    inner = Stack()
    FSDPv2(inner.blocks[0], mesh)
    with pytest.raises(FSDPError, match=r"contains a wrapped module \(blocks.0\)"):
        FSDPv2(inner, mesh, auto_wrap_policy={Block})
    with pytest.raises(FSDPError, match=r"cannot be deep-copied.*before wrapping"):
        copy.deepcopy(model)
    with pytest.raises(FSDPError, match=r"cannot be pickled.*full_state_dict"):
        pickle.dumps(model)
    with pytest.raises(FSDPError, match=r"is not a norm"):
        model.clip_grad_norm_(1.0, 0)
    with pytest.raises(FSDPError, match=r"unknown dtype"):
        FSDPv2(Stack(), mesh, mixed_precision="float17")
    with pytest.raises(FSDPError, match=r"floating-point"):
        MixedPrecision(param_dtype=torch.int8)
    assert issubclass(FSDPError, UserError)


@ranks(2)
def test_the_global_mesh_is_used():
    xs.set_global_mesh(mesh_for("FULL_SHARD"))
    try:
        assert FSDPv2(Stack()).mesh == mesh_for("FULL_SHARD")
    finally:
        xs.set_global_mesh(None)


@ranks(2)
def test_an_optimizer_built_before_wrapping_is_found_at_its_first_step():
    module = Stack()
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    model = FSDPv2(module, mesh_for("FULL_SHARD"))
    model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(FSDPError, match=r"SGD was built before.*blocks.0.up.weight.*after FSDPv2"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@ranks(2)
def test_parameters_added_after_wrapping_are_found():
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    model.extra = nn.Linear(8, 8)
    with pytest.raises(FSDPError, match=r"extra.weight was added after"):
        model(torch.randn(4, 8))


# --- torch.compile --------------------------------------------------------------------------------------------------


@ranks(2, timeout=240)
def test_compiled_units_train_alike_and_compile_once():
    import torch._dynamo

    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(0)
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    assert model.compile_units(backend=backend) is model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    counts = []
    for _ in range(4):
        x = torch.randn(8, 8)
        for m, optimizer, part in ((reference, optimizers[0], x), (model, optimizers[1], mine(x))):
            m(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(compiled))
    assert counts[1] == counts[-1] >= 1  # nothing compiles after the second step
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=0, atol=1e-6)


@ranks(2)
def test_the_norm_between_units_and_head_is_compiled():
    import torch._dynamo

    torch._dynamo.reset()
    made: list[list[str]] = []

    def backend(graph, inputs):
        made.append([node.name for node in graph.graph.nodes])
        return graph.forward

    model, reference = _model(dtype=DOUBLE).compile_units(backend=backend), build("llama", DOUBLE)
    for batch in batches(2, DOUBLE):
        for m, part in ((reference, batch), (model, mine(batch))):
            loss_of(m, part).backward()
    assert len(made) == 2  # a layer, and the norm: no product, but its root
    norms = [names for names in made if not any("linear" in name for name in names)]
    assert len(norms) == 1 and any("rsqrt" in name for name in norms[0])
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-9)


@pytest.mark.slow
@ranks(2, timeout=300)
def test_units_compiled_by_inductor():
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = _model(dtype=DOUBLE).compile_units()
    reference = build("llama", DOUBLE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    graphs = []
    for batch in batches(4, DOUBLE):
        for m, optimizer, part in ((reference, optimizers[0], batch), (model, optimizers[1], mine(batch))):
            loss_of(m, part).backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[-1] >= 1
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=0, atol=1e-6)


@ranks(2)
def test_optimizer_state_is_sharded_and_any_optimizer_works():
    for make in (
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
        functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
        functools.partial(torch.optim.Adagrad, lr=0.1),
    ):
        torch.manual_seed(0)
        reference = Stack()
        torch.manual_seed(0)
        model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
        optimizers = [make(m.parameters()) for m in (reference, model)]
        x = torch.randn(8, 8)
        for _ in range(3):
            for m, optimizer, part in ((reference, optimizers[0], x), (model, optimizers[1], mine(x))):
                m(part).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=0, atol=1e-4)
        for state in optimizers[1].state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert value.to_local().numel() < value.numel()


@ranks(2)
def test_losses_reported_by_ranks_average_to_the_global_loss():
    losses, _, _ = alone("llama", 1, DOUBLE)
    model = _model(DOUBLE)
    with exact(DOUBLE):
        assert abs(mean_over_ranks(loss_of(model, mine(batches(1, DOUBLE)[0]))) - losses[0]) < 1e-12
