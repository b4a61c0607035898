"""Every option of the engine changes what the engine does; the options that do not are in one table."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fullshard.activations import checkpointing, offload
from fullshard.config.errors import ConfigError, FSDPError
from fullshard.config.options import options_of
from fullshard.distributed import runtime
from fullshard.fsdp import ShardingStrategy, build
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.launch.config import ProcessSettings, RunSettings
from fullshard.parallel import settings as engine
from fullshard.parallel.fsdp_flags import settings_from_trainer_flags
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.model import absent_mesh, experts_mesh, shard_model
from fullshard.parallel.settings import EngineSettings
from tests.pool import ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


CHANGES = {
    "mixed_precision": "bf16", "use_cpu": True, "debug": True, "version": 2, "sharding_strategy": "SHARD_GRAD_OP",
    "reshard_after_forward": "false", "offload_params": True, "auto_wrap_policy": "NO_WRAP",
    "transformer_layer_cls_to_wrap": ("Linear",), "min_num_params": 70, "backward_prefetch": "BACKWARD_POST",
    "forward_prefetch": False, "state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": True,
    "activation_checkpointing_offload": True, "ignored_modules": r"layers\.0.*", "sync_module_states": False,
    "dp_replicate_size": 2, "dp_shard_size": 1, "backend": "eager", "mode": "reduce-overhead", "use_fullgraph": True,
    "use_dynamic": True,
}  # fmt: skip
BESIDES = {
    "activation_checkpointing_offload": {"activation_checkpointing": True},
    "dp_shard_size": {"sharding_strategy": "HYBRID_SHARD"},
    "mode": {"backend": "inductor"}, "use_fullgraph": {"backend": "inductor"}, "use_dynamic": {"backend": "inductor"},
}  # fmt: skip
"""What else must be set for an option to matter."""
ON_XLA = {"xla_fsdp_v2", "xla_fsdp_grad_ckpt"}
"""Options that matter on the XLA engine only: `test_xla_settings.py`."""
REFUSED = {"xla": True, "xla_fsdp_settings": "no file", "tp_size": 2, "ep_size": 2, "cp_size": 2, "sp_size": 2,
           "tp_plan": {"layers.0": "colwise"}}  # fmt: skip


def facts(settings: EngineSettings) -> dict[str, object]:
    """What the engine does with these settings: read off the engine and the model, not off the settings."""
    told: dict[str, object] = {}
    plain, compiled = build.assemble, []

    def observed(root, options, *rest):
        plain(root, options, *rest)
        told.update(
            strategy=options.strategy, offload=options.cpu_offload, mesh=tuple(options.mesh.shape().items()),
            computes_in=options.precision.param_dtype, prefetch=root._fullshard_engine.settings,
            units=[unit.plan.name for unit in root._fullshard_engine.units],
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "assemble", observed)
        patch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(options))
        torch.manual_seed(runtime.rank())
        model = shard_model(Model(), settings)
    told["compiled"] = compiled
    told["plain"] = [name for name, p in model.named_parameters() if not hasattr(p, "full_tensor")]
    ways = [getattr(m.__dict__.get("forward"), "__func__", None) for m in model.modules()]
    told["checkpointed"] = [way.__name__ for way in ways if way in checkpointing._ways()]
    told["saved_as"] = settings.saved_as
    told["initial"] = model.full_state_dict()["layers.1.inner.weight"].flatten().tolist()
    told["environment"] = {
        k: v for k, v in settings.to_environment().items() if not k.startswith(("FSDP_", "PARALLEL"))
    }
    return told


@ranks(2)
def test_every_option_changes_the_run():
    covered = set(CHANGES) | set(REFUSED)
    for one in options_of(EngineSettings):
        if one.name in ON_XLA:
            continue
        if one.name in REFUSED:
            with pytest.raises(ConfigError, match=one.name):
                facts(EngineSettings(**{one.name: REFUSED[one.name]}))
            continue
        besides = BESIDES.get(one.name, {})
        before = facts(EngineSettings(**besides))
        after = facts(EngineSettings(**besides, **{one.name: CHANGES[one.name]}))
        assert before != after, f"{one.key} changes nothing"
        covered.discard(one.name)
    assert not covered - set(REFUSED), "options that are gone"


@ranks(2)
def test_what_the_options_mean():
    def of(**values):
        return facts(EngineSettings(**values))

    assert of()["units"] == ["", "layers.0", "layers.1"]
    assert of(auto_wrap_policy="NO_WRAP")["units"] == [""]
    assert of(transformer_layer_cls_to_wrap=("Linear",))["units"] == ["", "layers.0.inner", "layers.1.inner", "head"]
    assert of(min_num_params=70)["units"] == ["", "layers.0.inner", "layers.1.inner"]
    for strategy in ShardingStrategy:
        assert of(sharding_strategy=strategy.name)["strategy"] is strategy
    assert of(sharding_strategy="HYBRID_SHARD")["mesh"] == (("replica", 1), ("fsdp", 2))  # one node
    assert of(dp_replicate_size=2)["mesh"] == (("replica", 2), ("fsdp", 1))
    assert of(mixed_precision="fp16")["computes_in"] is torch.float16
    assert of(ignored_modules=r"layers\.0.*")["plain"] == ["layers.0.inner.weight", "layers.0.inner.bias"]
    assert of(backward_prefetch="NO_PREFETCH")["prefetch"].backward_prefetch is BackwardPrefetch.NONE
    assert of(activation_checkpointing=True)["checkpointed"] == ["recomputed"] * 2
    # A policy that chooses no unit: the model's own layers.
    assert of(activation_checkpointing=True, min_num_params=10**9)["checkpointed"] == ["recomputed"] * 2
    with pytest.raises(ConfigError, match=r"Linear neither names its layers \(_no_split_modules\) nor repeats any"):
        shard_model(nn.Linear(4, 4), EngineSettings(activation_checkpointing=True))
    hosted = of(activation_checkpointing=True, activation_checkpointing_offload=True)["checkpointed"]
    assert hosted == ["from_host", "recomputed"], "the last layer's input is needed at once"
    assert of(backend="EAGER")["compiled"] == [{"backend": "eager", "fullgraph": False, "dynamic": None}] * 2
    assert of(sync_module_states=False)["initial"] != of()["initial"]
    assert of(debug=True)["environment"]["FULLSHARD_CHECK_GLOBAL"] == "1"


@ranks(2)
def test_checkpointed_inputs_on_the_host_give_the_same_gradients():
    def gradients(**values):
        torch.manual_seed(0)
        model = shard_model(Model(), EngineSettings(**values))
        model(torch.randn(4, 8)).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    plain, moved = gradients(), []
    with pytest.MonkeyPatch.context() as patch:
        to_host = offload.to_host

        def counted(t):
            moved.append(t.shape)
            return to_host(t)

        patch.setattr(offload, "to_host", counted)
        patch.setattr(offload, "_movable", lambda t: t.is_floating_point())
        offloaded = gradients(activation_checkpointing=True, activation_checkpointing_offload=True)
    assert moved == [(4, 8)], "the input of the first of two layers"
    for a, b in zip(plain, offloaded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@ranks(2)
def test_a_layer_class_that_the_model_does_not_have():
    with pytest.raises(
        FSDPError, match=r"no module of class BertLayer in Model\. Candidates found in the model: Block"
    ):
        shard_model(Model(), EngineSettings(transformer_layer_cls_to_wrap=("BertLayer",)))
    with pytest.raises(ConfigError, match="no module's full name matches 'nothing'"):
        shard_model(Model(), EngineSettings(ignored_modules="nothing"))


def test_names_are_the_engines_own():
    assert [(s.name, s.value) for s in ShardingStrategy] == [(name, i) for i, name in enumerate(engine.STRATEGIES, 1)]


def test_trainer_flags_lie_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    made = settings_from_trainer_flags(fsdp="full_shard auto_wrap", fsdp_config={"backward_prefetch": "backward_post"})
    assert (made.strategy, made.offload_params, made.backward_prefetch) == ("FULL_SHARD", True, "BACKWARD_POST")
    whole, notes = tmp_path / "c.yaml", []
    whole.write_text("num_processes: 2\nmixed_precision: bf16\nfsdp_config:\nfsdp_offload_params: false\n")
    made = settings_from_trainer_flags(fsdp_config=whole, notes=notes)
    assert (made.strategy, made.offload_params, made.mixed_precision) == ("NO_SHARD", False, "bf16")
    assert any("num_processes" in note for note in notes)
    with pytest.raises(ConfigError, match="did you mean backward_prefetch"):
        settings_from_trainer_flags(fsdp_config={"backward_prefetc": 1})


def test_every_option_has_a_text_and_a_place():
    assert {one.name for one in options_of(EngineSettings)} == {f.name for f in dataclasses.fields(EngineSettings)}
    for one in options_of(EngineSettings):
        assert one.help.endswith("."), one.name
        assert one.env and not one.no_op, one.name


def test_ignored_options_are_read_and_belong_to_no_configuration():
    taken = {one.key for config in (EngineSettings, ProcessSettings, RunSettings) for one in options_of(config)}
    assert not taken & {one.key for one in IGNORED_OPTIONS}
    assert all(len(one.no_op) > 20 for one in IGNORED_OPTIONS)
    section = {"use_orig_params": False, "fsdp_limit_all_gathers": False}
    assert settings_from_trainer_flags(fsdp_config=section) == EngineSettings()
    with pytest.raises(ConfigError, match="use_orig_params: expected true or false, got 'perhaps'"):
        settings_from_trainer_flags(fsdp_config={"use_orig_params": "perhaps"})


def mesh_of(world=8, nodes=1, **sizes):
    return EngineSettings(**sizes).mesh_shape(world, nodes)


def test_the_sizes_of_the_mesh():
    assert mesh_of() == {"fsdp": 8}
    assert list(mesh_of(tp_size=2).items()) == [("fsdp", 4), ("tp", 2)]
    assert mesh_of(tp_size=8) == {"fsdp": 1, "tp": 8}
    assert mesh_of(tp_size=2, dp_replicate_size=2) == {"replica": 2, "fsdp": 2, "tp": 2}
    assert mesh_of(tp_size=2, dp_replicate_size=2, dp_shard_size=2) == {"replica": 2, "fsdp": 2, "tp": 2}
    assert mesh_of(nodes=2, tp_size=2, sharding_strategy="HYBRID_SHARD") == {"replica": 2, "fsdp": 2, "tp": 2}
    assert mesh_of(ep_size=4) == {"fsdp": 8}, "ep divides the same ranks"


def test_the_mesh_of_experts():
    def experts_of(world=8, **sizes):
        settings = EngineSettings(**sizes)
        return dict(experts_mesh(settings, absent_mesh(settings, world)).shape())

    assert experts_of() == {"ep": 1, "fsdp": 8}
    assert experts_of(ep_size=4) == {"ep": 4, "fsdp": 2}
    assert experts_of(ep_size=8, tp_size=2) == {"ep": 8, "fsdp": 1}
    assert experts_of(ep_size=4, dp_replicate_size=2) == {"replica": 2, "ep": 4, "fsdp": 1}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp_size": 3}, "tp_size 3 on 8 processes: expected a size that divides their number: 1, 2, 4, 8"),
        ({"tp_size": 0}, "tp_size: expected 1 or more, got 0"),
        ({"dp_shard_size": 3, "tp_size": 2}, "dp_shard_size 3 .* on 8 processes with tp_size 2: expected 4"),
        ({"dp_replicate_size": 3, "tp_size": 2}, "need 6 processes .* but there are 8; .*as 1 of 4, 2 of 2, 4 of 1"),
        ({"ep_size": 3}, "ep_size 3 with 8 ranks per replica: expected a size that divides their number: 1, 2, 4, 8"),
        ({"ep_size": 8, "dp_replicate_size": 2}, "ep_size 8 with 4 ranks per replica: .* 1, 2, 4"),
        ({"ep_size": 2, "backend": "inductor"}, "ep_size 2 with dynamo_backend inductor .*; use dynamo_backend no"),
        ({"cp_size": 2}, "cp_size 2: context parallelism is not supported yet; use 1"),
    ],
)
def test_sizes_that_do_not_fit(sizes, text):
    with pytest.raises(ConfigError, match=text):
        mesh_of(**sizes)


def test_the_sizes_of_the_mesh_are_variables():
    settings = EngineSettings(tp_size=2, dp_replicate_size=2)
    variables = settings.to_environment()
    assert variables["PARALLELISM_CONFIG_TP_SIZE"] == "2" and EngineSettings.from_environment(variables) == settings
