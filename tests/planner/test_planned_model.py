"""The planned model is the run's: the same plan, whether layers that are alike are built once or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig

from fullshard.config.errors import ConfigError, MeshError
from fullshard.distributed import runtime
from fullshard.fsdp.plan import ShardingPlan
from fullshard.lora.model_size import count_parameters
from fullshard.parallel.model import shard_model
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.batch import BatchShape
from fullshard.planner.layer_dedup import condense, may_name_a_layer
from fullshard.planner.planned_model import PlannedModel, planned_model
from fullshard.planner.tracer import trace_step
from fullshard.sft import adapter
from fullshard.sft.base_model import read_model
from fullshard.sft.model_steps import adapt_model, ready_model
from fullshard.spmd.mesh import Mesh, VirtualMesh
from tests.pool import ranks
from tests.sft.runs import settings, train
from tests.sft.tiny import make_folder

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 7, "n_head": 4, "n_positions": 64}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "windows": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {"sliding_window_pattern": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixed": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0, 3]}),
    "sparse": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "neox": ("GPTNeoX", {}),
}
LORA = {"use_peft_lora": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
QLORA = {**LORA, "use_4bit_quantization": True, "use_nested_quant": True}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "lora": (LORA, {"mixed_precision": "bf16"}),
    "qlora": ({**QLORA, "bnb_4bit_quant_storage_dtype": "bfloat16"}, {"mixed_precision": "bf16"}),
    "packed qlora": ({**QLORA, "packing": True}, {}),
    "fp8": ({**LORA, "base_dtype": "fp8"}, {"mixed_precision": "bf16"}),
    "dora": ({**LORA, "use_dora": True}, {}),
    "vera": ({**LORA, "peft_type": "vera"}, {}),
    "prompts": ({"peft_type": "prefix_tuning"}, {}),
    "saved": ({**LORA, "modules_to_save": "embed_tokens,lm_head"}, {}),
    "saved model": ({**LORA, "lora_target_modules": "lm_head", "modules_to_save": "model"}, {}),
    "tokens": ({**LORA, "trainable_token_indices": "3,5,<|im_start|>"}, {}),
    "frozen": ({"freeze": "embed_tokens,self_attn"}, {}),
    "frozen layers": ({"freeze": "layers.[0-2]"}, {"mixed_precision": "bf16"}),
    "one layer": ({**LORA, "lora_target_modules": "layers.3.self_attn.q_proj"}, {}),
    "pattern": ({**LORA, "lora_target_modules": "q_proj,v_proj"}, {"auto_wrap_policy": "NO_WRAP"}),
    "by size": ({}, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 40000}),
    "by class": ({}, {"transformer_layer_cls_to_wrap": ("LlamaMLP", "LlamaDecoderLayer")}),
    "whole model": ({}, {"transformer_layer_cls_to_wrap": ("LlamaModel",)}),
    "no wrap": (QLORA, {"auto_wrap_policy": "NO_WRAP", "sharding_strategy": "SHARD_GRAD_OP"}),
    "no shard": ({}, {"sharding_strategy": "NO_SHARD"}),
    "hybrid": (LORA, {"sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2}),
    "zero2": ({}, {"sharding_strategy": "HYBRID_SHARD_ZERO2", "mixed_precision": "bf16", "dp_replicate_size": 2}),
    "ignored": ({}, {"ignored_modules": r".*\.input_layernorm"}),
    "one ignored": ({}, {"ignored_modules": r"model\.layers\.4\.mlp"}),
    "offload": (QLORA, {"offload_params": True}),
}
WHOLE = ("vera", "prompts", "saved model", "frozen layers", "one layer", "by size", "one ignored")
"""The settings with which layers that are alike are not treated alike, or parameters belong to several."""


def write_config(folder: Path, name: str) -> Path:
    """The configuration of a model; each rank writes its own."""
    folder = folder / str(runtime.rank())
    kind, changes = MODELS[name]
    sizes = {k: v for k, v in SIZES.items() if kind != "GPT2" or k == "vocab_size"}
    made = getattr(transformers, f"{kind}Config")(**{**sizes, **changes}, dtype="bfloat16")
    made.architectures = [f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel"]
    made.save_pretrained(folder)
    return folder


def plan(folder: Path, model: str, name: str, processes: int = 8, nodes: int = 1, **more: Any) -> PlannedModel:
    values, sharding = SETTINGS[name]
    config, engine = settings(folder, **values), EngineSettings(**sharding)
    return planned_model(config, engine, write_config(folder / model, model), processes, nodes, **more)


def differences(one: ShardingPlan, other: ShardingPlan) -> list[Any]:
    """What differs, shortest first, for a readable failure."""
    found = [(a, b) for a, b in zip(one.units, other.units, strict=False) if a != b][:1]
    names = [unit.name for unit in one.units], [unit.name for unit in other.units]
    return [*([names] if names[0] != names[1] else []), *found, *([] if one == other else ["plans differ"])]


def compare(folder: Path, model: str, name: str, **more: Any) -> PlannedModel:
    """Plan with and without leaving layers out; everything about the whole model must be the same."""
    whole = plan(folder, model, name, condensed=False, **more)
    condensed = plan(folder, model, name, **more)
    assert not differences(condensed.plan, whole.plan)
    for what in ("layers", "buffers", "ignored", "parameters", "engine", "precision"):
        assert getattr(condensed, what) == getattr(whole, what), what
    assert whole.parameters == count_parameters(whole.model)[1]
    assert set(condensed.kinds) == set(whole.layers)
    modules = dict(condensed.model.named_modules())
    assert all(name in modules for name in condensed.kinds.values())
    return condensed


@pytest.mark.parametrize(
    ("model", "built"),
    [
        ("gemma3", 5), ("mixed", 5),
        *(pytest.param(name, built, marks=pytest.mark.slow) for name, built in (
            ("llama", 3), ("tied", 3), ("qwen3", 3), ("gemma2", 5), ("mixtral", 3), ("sparse", 5), ("opt", 3),
            ("neox", 3), ("gpt2", 3), ("windows", 5),
        )),
    ],
)  # fmt: skip
def test_two_of_each_kind_of_layer_and_the_last_are_built(model: str, built: int, tmp_path: Path) -> None:
    planned = compare(tmp_path, model, "qlora", processes=48, nodes=6, device="cpu")
    assert len(set(planned.kinds.values())) == built
    assert len(planned.layers) == 7


def test_a_condensed_configuration_describes_the_layers_that_are_left() -> None:
    """Of three dense layers and four with experts, two and three: trials on a small copy begin with it."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(
        **latent, **experts, **sizes, vocab_size=64, topk_group=1, num_hidden_layers=7, first_k_dense_replace=3
    )
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
        condense(model)
        again = transformers.DeepseekV3ForCausalLM(model.config)
    kinds = [[type(layer.mlp).__name__ for layer in one.model.layers] for one in (model, again)]
    assert kinds[0] == kinds[1] == ["DeepseekV3MLP"] * 2 + ["DeepseekV3MoE"] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [n if n in ("no wrap", "one layer") else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS]
)
def test_settings_that_tell_layers_apart_get_the_whole_model(name: str, device: str, tmp_path: Path) -> None:
    planned = compare(tmp_path, "llama", name, device=device, nodes=2)
    built = [m for m in planned.model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
    assert len(built) == {"saved model": 14}.get(name, 7 if name in WHOLE else 3)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gemma3", "lora"),
        *(pytest.param(model, name, marks=pytest.mark.slow) for model, name in (
            ("llama", "full"), ("llama", "frozen"), ("llama", "packed qlora"), ("llama", "by class"), ("tied", "dora"),
            ("gpt2", "lora"), ("windows", "qlora"), ("gemma2", "fp8"), ("opt", "full"), ("neox", "lora"),
        )),
    ],
)  # fmt: skip
def test_layers_that_stand_for_others_run_like_them(model: str, name: str, tmp_path: Path) -> None:
    made = [plan(tmp_path, model, name, device="cpu", condensed=condensed) for condensed in (True, False)]
    assert made[0].kinds != made[1].kinds
    few, every = (segments(one) for one in made)
    assert {layer: few[made[0].kinds[layer]] for layer in made[0].layers} == every


def segments(planned: PlannedModel) -> dict[str, list[Any]]:
    """What each layer does in a step."""
    layers: dict[str, list[Any]] = {}
    for one in trace_step(planned, BatchShape(2, 32)).segments:
        if one.unit:
            layers.setdefault(one.unit, []).append((one.moment, one.peak, one.kept, one.gradients, one.flops))
    return layers


def real_plan(folder: Path, model: str, name: str) -> ShardingPlan:
    """The plan of the model that `FSDPv2` has sharded."""
    values, sharding = SETTINGS[name]
    config, engine, device = settings(folder, **values), EngineSettings(**sharding), runtime.device()
    made: Any = read_model(config, write_config(folder / model, model), device, print, present=False)
    requested = adapter.requested_adapter_config(config, None)
    if requested is not None:
        requested = adapter.fit_adapter_config(config, requested, made, print, from_settings=True)
    if requested is not None and config.trainable_token_indices:
        requested = adapter.train_tokens(requested, made, [3, 5, 7])
    made, packing = adapt_model(config, engine, made, None, requested, None, device, print)
    ready = ready_model(config, engine, made, packing, 1, device, print)
    return shard_model(made, ready.engine, mixed_precision=ready.precision).plan


@ranks(2)
def test_the_plan_is_that_of_the_engine(tmp_path: Path) -> None:
    for model, name in (("mixed", "qlora"), ("tied", "ignored")):
        planned = plan(tmp_path, model, name, runtime.world_size(), device="cpu")
        assert not differences(planned.plan, real_plan(tmp_path, model, name))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@ranks(1, 2)
def test_the_plan_is_that_of_the_engine_for_every_model(model: str, tmp_path: Path) -> None:
    for name in ("full", "lora", "qlora", "fp8"):
        planned = plan(tmp_path, model, name, runtime.world_size(), device="cpu")
        assert not differences(planned.plan, real_plan(tmp_path, model, name)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@ranks(2)
def test_the_plan_is_that_of_the_engine_for_all_settings(name: str, tmp_path: Path) -> None:
    planned = plan(tmp_path, "llama", name, 2, device="cpu")
    assert not differences(planned.plan, real_plan(tmp_path, "llama", name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, num_hidden_layers=4)


@pytest.mark.slow
@ranks(2)
def test_the_plan_is_that_of_a_run(folder: Path) -> None:
    for changes in ({}, {**QLORA, "lora_r": 4}, {**LORA, "bf16": True, "packing": True}):
        config = settings(folder / str(len(changes)), **{"max_steps": 1, "use_cpu": True, **changes})
        trainer = train(str(folder / "model"), config)
        planned = planned_model(trainer.args, trainer.parts.engine, folder / "model", 2, steps=1)
        assert not differences(planned.plan, trainer.model.plan)


def test_nothing_is_needed_but_the_settings(tmp_path: Path) -> None:
    joined = dist.is_initialized()
    planned = plan(tmp_path, "llama", "packed qlora", 4096, 512, steps=10**9)
    assert dist.is_initialized() == joined
    assert all(p.is_meta for p in planned.model.parameters())
    assert planned.device == torch.device("cuda") and planned.engine.backend == "inductor"
    assert planned.plan.axes == (("fsdp", 4096),)
    assert planned.plan.parameters["base_model.model.model.embed_tokens.weight"].on_host, "as on GPUs"
    assert not plan(tmp_path, "llama", "packed qlora", 2, device="cpu").plan.host_bytes


def test_a_folder_a_file_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config(tmp_path / "llama", "llama")
    config, engine = settings(tmp_path), EngineSettings()
    expected = planned_model(config, engine, folder, 2).plan
    assert planned_model(config, engine, folder / "config.json", 2).plan == expected
    asked = []

    def download(name: str, file: str, revision: str | None = None) -> str:
        asked.append((name, file))
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert planned_model(config, engine, "somebody/llama", 2).plan == expected
    assert asked == [("somebody/llama", "config.json")], "weights are not fetched"


def test_dtypes_come_from_the_files_where_there_are_some(tmp_path: Path) -> None:
    make_folder(tmp_path)
    config_file = tmp_path / "model" / "config.json"
    stated = json.loads(config_file.read_text())
    stated.pop("dtype", None)
    config_file.write_text(json.dumps(stated))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float16)
    model.config.dtype = None
    model.save_pretrained(tmp_path / "half")
    config_file = tmp_path / "half" / "config.json"
    stated = json.loads(config_file.read_text())
    stated.pop("dtype", None)
    config_file.write_text(json.dumps(stated))
    planned = planned_model(settings(tmp_path), EngineSettings(), tmp_path / "half", 2)
    assert {p.dtype for unit in planned.plan.units for p in unit.parameters} == {"float16"}
    (tmp_path / "half" / "model.safetensors").unlink()
    planned = planned_model(settings(tmp_path), EngineSettings(), tmp_path / "half", 2)
    assert {p.dtype for unit in planned.plan.units for p in unit.parameters} == {"float32"}


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"model_type": "nosuch", "hidden_size": 8}, "knows no model of type 'nosuch'"),
        ({"model_type": "llama"}, "not the model's width"),
        ({"model_type": "llama", "hidden_size": 64}, "not the model's number of layers"),
        ({**SIZES, "model_type": "llama", "num_attention_heads": 0}, "no model configuration could be read"),
        ({**SIZES, "model_type": "llama", "vocab_size": -1}, "no llama model can be built"),
        ({"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 2}, "expected a causal language model"),
        ({"hidden_size": 64}, "no model configuration could be read"),
        ("{", "no model configuration could be read"),
    ],
)
def test_bad_configurations(stated: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(stated if isinstance(stated, str) else json.dumps(stated))
    with pytest.raises(ConfigError, match=message) as raised:
        planned_model(settings(tmp_path), EngineSettings(), file, 2)
    assert "\n" not in str(raised.value)


def test_bad_places(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    for place, message in (
        (tmp_path / "empty", "has no config.json; it holds nothing"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "notes.txt", "is no config.json"),
        ("nobody/nothing", "neither a local folder nor a model on the hub"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned_model(settings(tmp_path), EngineSettings(), place, 2)


@pytest.mark.parametrize(
    ("pattern", "may"),
    [
        ("q_proj", False), ("all-linear", False), ("fc1", False), ("w1|w2", False), ("dense_4h_to_h", False),
        ("self_attn.q_proj", False), ("*.mlp.*", False), (r".*\.(q_proj|v_proj)$", False), ("layers.*.mlp", False),
        ("layers.3.mlp", True), ("layers.[0-7]", True), (r"layers\.\d\.mlp", True), (r"layers\..\.mlp", True),
        ("layers...mlp", True), ("*1.mlp", True), ("layers.1*", True), ("layers.?.mlp", True),
        (r"layers\.(1|2)\.", True), (r"(?!.*q_proj).*", True), (".{3}", True),
    ],
)  # fmt: skip
def test_patterns_that_may_name_a_layer(pattern: str, may: bool) -> None:
    assert may_name_a_layer(pattern) is may


def test_adapters_that_name_layers_get_the_whole_model(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "llama", "llama")
    for changes in (
        {"layers_to_transform": [1]}, {"rank_pattern": {"layers.1.self_attn.q_proj": 4}},
        {"exclude_modules": r".*layers\.2\..*"},
    ):  # fmt: skip
        given = LoraConfig(target_modules="all-linear" if "exclude_modules" in changes else ["q_proj"], **changes)
        planned = planned_model(settings(tmp_path), EngineSettings(), folder, 2, peft_config=given)
        assert len(set(planned.kinds.values())) == 7, changes


def test_an_absent_mesh_refuses_to_communicate() -> None:
    mesh = VirtualMesh((512, 8), ("replica", "fsdp"))
    assert mesh.size() == 4096 and mesh.coordinate(9) == (1, 1) and str(mesh) == "Mesh(replica=512, fsdp=8)"
    assert mesh == VirtualMesh((512, 8), ("replica", "fsdp")) and VirtualMesh((1,)) != Mesh([0], (1,))
    for ask in (lambda: mesh.device_mesh, lambda: mesh.get_group("fsdp")):
        with pytest.raises(MeshError, match="is for plans"):
            ask()
