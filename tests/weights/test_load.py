"""Loading equals `from_pretrained`, on any number of ranks, in any layout, dtype and strategy."""

import hashlib

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from fullshard import FSDPv2, MixedPrecision, load_pretrained
from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.weights.fill import fill
from fullshard.weights.source_files import base_of, fingerprint_of
from tests.pool import ranks
from tests.weights.models import (
    CLASSES,
    FAMILIES,
    assert_equal,
    mesh_for,
    reference,
    save,
    split_for_tensors,
    tensor_mesh,
)

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every family's files, in one file or several."""
    made = {}
    for i, name in enumerate(FAMILIES):
        options = {"max_shard_size": "20KB"} if i % 2 else {}
        made[name] = save(name, tmp_path_factory.mktemp(name), **options)
    return made


def _check(files, name, strategy, **options):
    model = load_pretrained(
        files[name], mesh_for(strategy), model_class=CLASSES.get(name), strategy=strategy, **options
    )
    assert_equal(model, reference(name, files[name]))


@ranks(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_from_pretrained(files, name):
    _check(files, name, "FULL_SHARD")


@ranks(4)
@pytest.mark.parametrize(("name", "strategy"), [("llama-tied", "HYBRID_SHARD"), ("mixtral", "NO_SHARD")])
def test_equals_from_pretrained_by_strategy(files, name, strategy):
    _check(files, name, strategy)


@pytest.mark.slow
@ranks(1, 2, 4)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not name.startswith("HYBRID")])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_from_pretrained_everywhere(files, name, strategy):
    _check(files, name, strategy)


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name.startswith("HYBRID")])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_from_pretrained_on_replicas(files, name, strategy):
    _check(files, name, strategy)


@ranks(4)
@pytest.mark.parametrize("name", ["llama-tied", pytest.param("t5", marks=pytest.mark.slow), "mixtral"])
def test_tensor_parallel_layouts(files, name):
    mesh = tensor_mesh()
    model = load_pretrained(files[name], mesh, model_class=CLASSES.get(name), annotate=split_for_tensors)
    assert any("model" in str(p.spec) for p in model.plan.parameters.values())
    assert_equal(model, reference(name, files[name]))


@ranks(2)
def test_the_loaded_model_computes_what_one_device_computes(files):
    model = load_pretrained(files["llama"], cpu_offload=True)  # offload is host memory here too
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = reference("llama", files["llama"])(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-6)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("dtype", [None, "auto", "float16", torch.float32])
def test_dtypes(dtype, tmp_path):
    directory = tmp_path / "t5"
    if runtime.is_main():
        save("t5", directory, torch.bfloat16)
    runtime.barrier()
    model = load_pretrained(directory, torch_dtype=dtype)  # the config names the class
    assert_equal(model, reference("t5", directory, **({} if dtype is None else {"dtype": dtype})))
    kept = model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype
    assert kept == (torch.float32 if dtype == "float16" else model.shared.weight.dtype)  # T5 keeps it so in fp16


@ranks(2)
def test_masters_are_read_from_the_files_and_frozen_parameters_keep_their_dtype(files):
    def freeze(model):
        model.model.embed_tokens.requires_grad_(False)

    model = load_pretrained(files["llama"], dtype="bf16", adapt=freeze, mixed_precision="bf16")
    plain = reference("llama", files["llama"])
    assert torch.equal(model.lm_head.weight.full_tensor(), plain.lm_head.weight)  # fp32, never rounded on the way
    frozen = model.model.embed_tokens.weight
    assert frozen.dtype == torch.bfloat16
    assert torch.equal(frozen.full_tensor(), plain.model.embed_tokens.weight.bfloat16())
    stored = load_pretrained(files["llama"], dtype="bf16", mixed_precision=MixedPrecision("bf16", master_dtype=None))
    assert stored.lm_head.weight.dtype == torch.bfloat16


# --- names, ties, buffers ---------------------------------------------------------------------------------------------


@ranks(2)
def test_a_base_model_without_its_head_and_old_names(files, tmp_path):
    """Files of the bare model (no prefix), BERT's old gamma and beta, and buffers that are computed nowadays."""
    if runtime.is_main():
        values = reference("bert", files["bert"]).state_dict()
        del values["cls.predictions.decoder.weight"], values["cls.predictions.decoder.bias"]  # tied
        old = {k.removeprefix("bert."): v for k, v in values.items()}
        old = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in old.items()}
        old = {k.replace("LayerNorm.bias", "LayerNorm.beta"): v for k, v in old.items()}
        old["embeddings.position_ids"] = torch.arange(32)[None]
        save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((files["bert"] / "config.json").read_text())
    runtime.barrier()
    assert_equal(load_pretrained(tmp_path), reference("bert", tmp_path))


@ranks(2)
def test_tied_weights_that_the_files_hold_twice(files, tmp_path):
    """Equal values stay tied; different ones are untied with a warning, as `from_pretrained` does."""
    for kind, change in (("same", 0.0), ("different", 1.0)):
        if runtime.is_main():
            (tmp_path / kind).mkdir()
            save("llama-tied", tmp_path / kind)
            values = load_file(tmp_path / kind / "model.safetensors")
            values["lm_head.weight"] = values["model.embed_tokens.weight"] + change
            save_file(values, tmp_path / kind / "model.safetensors", metadata={"format": "pt"})
        runtime.barrier()
        model, plain = load_pretrained(tmp_path / kind), reference("llama-tied", tmp_path / kind)
        assert_equal(model, plain)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "same")
        assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == (kind == "same")


# --- the base ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_base_knows_what_it_still_provides(files):
    model = load_pretrained(files["llama"])
    base = base_of(model)
    assert base.path == str(files["llama"]) and base.fingerprint == fingerprint_of(files["llama"])
    assert all(base.provides(name, p) for name, p in model.named_parameters())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    torch.optim.AdamW([model.model.norm.weight], foreach=True).step()
    changed = [name for name, p in model.named_parameters() if not base.provides(name, p)]
    assert changed == ["model.norm.weight", "lm_head.weight"]
    assert not base.provides("no.such.parameter", model.lm_head.weight)


def test_fingerprints_see_small_changes(tmp_path):
    torch.manual_seed(0)
    values = {"a": torch.randn(40, 50), "b": torch.randn(3)}
    seen = set()
    for change in ({}, {"b": values["b"] + 1}, {"a": -values["a"]}, {"c": torch.zeros(1)}):
        save_file({**values, **change}, tmp_path / "model.safetensors")
        seen.add(fingerprint_of(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    seen.add(fingerprint_of(tmp_path))
    assert len(seen) == 5


# --- adapters and new parameters --------------------------------------------------------------------------------------


def _lora(model, **options):
    config = LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], r=4, **options)
    return get_peft_model(model, config)


def _drawn(seed, name, shape):
    """PEFT's default for A, from a generator that depends on nothing but seed and name."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        return nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5)


@ranks(1, 2, 4)
def test_adapters(files):
    """Base weights under PEFT's names; adapters by (seed, name), whatever the number of ranks."""
    model = load_pretrained(files["llama"], adapt=_lora, seed=7)
    plain = reference("llama", files["llama"]).state_dict()
    full = {name.removeprefix("base_model.model."): value for name, value in model.full_state_dict().items()}
    query = "model.layers.{}.self_attn.q_proj"
    assert torch.equal(full[f"{query.format(0)}.base_layer.weight"], plain[f"{query.format(0)}.weight"])
    for copy_of_head in ("original_module", "modules_to_save.default"):
        assert torch.equal(full[f"lm_head.{copy_of_head}.weight"], plain["lm_head.weight"])
    for layer in (0, 1):
        name = f"{query.format(layer)}.lora_A.default.weight"
        assert torch.equal(full[name], _drawn(7, f"base_model.model.{name}", (4, 32)))
        assert not full[f"{query.format(layer)}.lora_B.default.weight"].any()
    assert not full["model.embed_tokens.lora_embedding_A.default"].any()
    assert full["model.embed_tokens.lora_embedding_B.default"].std() > 0.5
    base = base_of(model)
    provided = {name for name, p in model.named_parameters() if base.provides(name, p)}
    assert provided == {name for name in dict(model.named_parameters()) if "lora_" not in name}


@ranks(2)
def test_an_adapters_values_are_loaded_after_the_model(files, tmp_path):
    if runtime.is_main():
        torch.manual_seed(0)
        trained = _lora(reference("llama", files["llama"]))
        for name, p in trained.named_parameters():
            if "lora_" in name:
                nn.init.normal_(p)
        trained.save_pretrained(tmp_path)
    runtime.barrier()
    with pytest.raises(WeightsError, match="would be lost"):
        load_pretrained(files["llama"], adapt=lambda model: PeftModel.from_pretrained(model, tmp_path))
    model = load_pretrained(
        files["llama"], adapt=lambda model: get_peft_model(model, LoraConfig.from_pretrained(tmp_path))
    )
    set_peft_model_state_dict(model, load_file(tmp_path / "adapter_model.safetensors"))
    expected = PeftModel.from_pretrained(reference("llama", files["llama"]), tmp_path)
    for loaded in (model, load_pretrained(files["llama"], adapter=tmp_path)):
        full = loaded.full_state_dict()
        for name, value in expected.state_dict().items():
            assert torch.equal(full[name], value), name


@ranks(2)
def test_what_files_lack_is_initialized_if_not_strict(files, tmp_path):
    if runtime.is_main():
        values = load_file(files["llama"] / "model.safetensors")
        del values["lm_head.weight"], values["model.norm.weight"]
        save_file({**values, "extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((files["llama"] / "config.json").read_text())
    runtime.barrier()
    model = load_pretrained(tmp_path, strict=False)
    assert torch.equal(model.model.norm.weight.full_tensor(), torch.ones(32))
    head = model.lm_head.weight.full_tensor()
    assert 0.015 < head.std() < 0.025  # the config's initializer_range
    assert not base_of(model).provides("lm_head.weight", model.lm_head.weight)


@ranks(1, 2)
def test_new_token_rows_start_at_the_mean(files):
    model = load_pretrained(files["llama"], resize_vocab=75)
    plain = reference("llama", files["llama"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, got = plain.get_parameter(name), model.get_parameter(name)
        full = got.full_tensor()
        assert torch.equal(full[:67], old)
        assert torch.equal(full[67:], old.double().mean(0).float().expand(8, -1))
        assert not base_of(model).provides(name, got)
    assert model.config.vocab_size == 75
    tied = load_pretrained(files["llama-tied"], resize_vocab=70)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight and tied.lm_head.weight.shape == (70, 32)


# --- changing values on the way in ------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear layer stored as int8 with one scale per group of rows, relative to the largest scale of all."""

    GROUP = 8

    def __init__(self, linear):
        super().__init__()
        self.shape = tuple(linear.weight.shape)
        groups = -(-self.shape[0] * self.shape[1] // self.GROUP)
        self.packed = nn.Parameter(torch.empty(groups, self.GROUP, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(groups), requires_grad=False)
        self.bias = linear.bias

    def file_tensors(self):
        return {"weight": self.shape}

    def made_parameters(self):
        return ("packed", "scale")

    def read_files(self, readers, pieces):
        rows = pieces["packed"].rows
        stop = min(rows.stop * self.GROUP, self.shape[0] * self.shape[1])
        values = readers["weight"].flat(rows.start * self.GROUP, stop) if rows.start < rows.stop else torch.empty(0)
        padded = nn.functional.pad(values.float(), (0, (rows.stop - rows.start) * self.GROUP - values.numel()))
        return padded.view(-1, self.GROUP)

    def finish_reading(self, read, pieces):
        largest = read.abs().max() if read.numel() else torch.zeros(())
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)  # a step that all ranks take together
        scale = read.abs().amax(1).clamp(min=1e-9)
        pieces["packed"].local.copy_((read / scale[:, None] * 127).round())
        pieces["scale"].local.copy_(scale / largest)

    def forward(self, x):
        raise NotImplementedError


def _quantize(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("q_proj", "up_proj"):
                setattr(module, name, Int8Linear(child))


@ranks(1, 2, 4)
def test_a_module_reads_the_files_itself(files):
    model = load_pretrained(files["qwen2"], adapt=_quantize)
    plain = reference("qwen2", files["qwen2"]).state_dict()
    full = model.full_state_dict()
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        weight = plain[f"{name}.weight"]
        groups = weight.reshape(-1, 8)
        scale = groups.abs().amax(1)
        assert torch.equal(full[f"{name}.packed"], (groups / scale[:, None] * 127).round().to(torch.int8))
        assert torch.equal(full[f"{name}.scale"], scale / weight.abs().max())
    assert torch.equal(full["model.layers.0.self_attn.q_proj.bias"], plain["model.layers.0.self_attn.q_proj.bias"])
    assert base_of(model).provides(
        "model.layers.0.self_attn.q_proj.packed", model.model.layers[0].self_attn.q_proj.packed
    )


@ranks(2)
def test_transform_changes_slices(files):
    seen = []

    def halve_norms(name, value, piece):
        seen.append(name)
        assert piece.shape == model_shapes[name] and value.shape == piece.local.shape
        return value / 2 if "norm" in name else None

    plain = reference("llama", files["llama"])
    model_shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    model = load_pretrained(files["llama"], transform=halve_norms)
    assert sorted(seen) == sorted(model_shapes)
    for name, p in model.named_parameters():
        expected = plain.get_parameter(name)
        assert torch.equal(p.full_tensor(), expected / 2 if "norm" in name else expected)
        assert base_of(model).provides(name, p) == ("norm" not in name)


# --- the lower level --------------------------------------------------------------------------------------------------


@ranks(2)
def test_fill_a_model_that_transformers_does_not_know(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    torch.manual_seed(1)
    plain = build()
    plain[1].running_mean.normal_()
    if runtime.is_main():
        save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    runtime.barrier()
    with torch.device("meta"):
        empty = build()
    model = FSDPv2(empty, mesh_for("FULL_SHARD"))
    report = fill(model, tmp_path / "weights.safetensors", threads=3)
    full = model.full_state_dict()
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    assert sorted(report.read) == sorted(plain.state_dict())


@ranks(2)
def test_each_rank_reads_its_slices_only(files):
    mesh = mesh_for("FULL_SHARD")
    config = reference("llama", files["llama"]).config
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    model = FSDPv2(empty, mesh)
    report = fill(model, files["llama"])
    assert report.bytes == sum(p.to_local().numel() * 4 for p in model.parameters())
