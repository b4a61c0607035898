"""Model files on 4 XLA devices: loading equals `from_pretrained` and PEFT, and what is written can be read by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard import FSDPv2, load_pretrained
from fullshard.checkpoint import load_state, save_state
from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import CheckpointError, UserError, WeightsError
from fullshard.weights.export import save_pretrained
from fullshard.weights.merge_adapter import merge_adapter
from fullshard.xla import shards
from tests.xla.resume_program import config


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config(num_hidden_layers=2)).save_pretrained(place, max_shard_size="8KB")
    return place


def grid(*shape: int) -> xs.Mesh:
    return xs.Mesh(np.arange(4), shape, ("replica", "fsdp")[-len(shape) :])


def assert_equal(model: Any, plain: nn.Module) -> None:
    values, expected = model.full_state_dict(), plain.state_dict()
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value) and values[name].dtype == value.dtype, name


def load(files: Path, *shape: int, **options: Any) -> Any:
    hybrid = {"strategy": "HYBRID_SHARD", "extra_data_axis": "replica"} if len(shape) == 2 else {}
    return load_pretrained(files, grid(*shape), progress=False, **hybrid, **options)


@pytest.mark.parametrize(("shape", "dtype"), [((4,), "float32"), ((2, 2), "float32"), ((4,), "bfloat16")])
def test_loading_equals_from_pretrained(files: Path, shape: tuple[int, ...], dtype: str) -> None:
    model = load(files, *shape, dtype=dtype)
    assert_equal(model, LlamaForCausalLM.from_pretrained(files, dtype=getattr(torch, dtype)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for unit in model.plan.units:
        for p in unit.parameters:
            assert xs.sharding_of(model.get_parameter(p.name)).spec == tuple(p.spec)


def test_the_default_mesh_has_all_devices(files: Path) -> None:
    model = load_pretrained(files, progress=False)
    assert dict(model.mesh.shape()) == {"fsdp": 4}


def test_values_go_through_host_memory_a_few_parameters_at_a_time(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.weights import fill

    staged: list[int] = []
    parts, commit = shards.Staging.parts, shards.Staging.commit
    held = 0

    def count(self: Any) -> Any:
        nonlocal held
        held += self.numel * 4
        staged.append(held)
        return parts(self)

    def release(self: Any) -> None:
        nonlocal held
        held -= self.numel * 4
        commit(self)

    monkeypatch.setattr(shards.Staging, "parts", count)
    monkeypatch.setattr(shards.Staging, "commit", release)
    monkeypatch.setattr(fill, "STAGED_BYTES", 6000)
    model = load(files, 4)
    assert held == 0
    assert max(staged) <= 6000 < sum(p.numel() * 4 for p in model.parameters())
    assert_equal(model, LlamaForCausalLM.from_pretrained(files))


def test_what_is_written_is_read_by_transformers(files: Path, tmp_path: Path) -> None:
    model = load(files, 2, 2)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    xr.sync()
    save_pretrained(model, tmp_path / "out", progress=False, max_shard_size="8KB")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(model, found)
    assert found.model.norm.weight.eq(2).all()
    model.save_pretrained(tmp_path / "same")
    assert_equal(model, LlamaForCausalLM.from_pretrained(tmp_path / "same"))
    assert_equal(load(tmp_path / "out", 4), found)


def test_a_larger_vocabulary(files: Path) -> None:
    model = load(files, 4, resize_vocab=70)
    plain = LlamaForCausalLM.from_pretrained(files)
    table = model.full_state_dict()["model.embed_tokens.weight"]
    old = plain.model.embed_tokens.weight.detach()
    assert torch.equal(table[:61], old)
    torch.testing.assert_close(table[61:], old.double().mean(0).float().expand(9, -1))


def test_transform_sees_every_part_once(files: Path) -> None:
    seen: dict[str, torch.Tensor] = {}

    def double(name: str, value: torch.Tensor, piece: Any) -> torch.Tensor | None:
        seen.setdefault(name, torch.zeros(piece.shape))[piece.cuts] += 1
        return value * 2 if name.endswith("q_proj.weight") else None

    model = load(files, 2, 2, transform=double)
    assert all(count.eq(1).all() for count in seen.values())
    expected = LlamaForCausalLM.from_pretrained(files)
    for layer in expected.model.layers:
        layer.self_attn.q_proj.weight.data *= 2
    assert_equal(model, expected)


def test_missing_tensors_are_one_error(files: Path) -> None:
    with pytest.raises(WeightsError, match="missing"):
        load(files, 4, config={"num_hidden_layers": 3})


# --- adapters ---------------------------------------------------------------------------------------------------------


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=3, target_modules=["q_proj", "down_proj"], **options)


def adapted(files: Path, *shape: int, **options: Any) -> Any:
    return load(files, *shape, adapt=lambda model: get_peft_model(model, lora(**options)))


def test_frozen_values_are_left_to_the_base(files: Path, tmp_path: Path) -> None:
    model = adapted(files, 4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.5)
    xr.sync()
    save_state(tmp_path / "c", model=model)
    manifest = read_manifest(tmp_path / "c")
    stored = [name for name in manifest.tensors if name.startswith("model/")]
    assert stored and all("lora_" in name for name in stored)
    assert manifest.states["model"]["left_out"]
    again = adapted(files, 2, 2)
    load_state(tmp_path / "c", model=again)
    assert_equal(again, _on_host(model))
    save_state(tmp_path / "all", model=model, save_frozen=True)
    assert not read_manifest(tmp_path / "all").states["model"]["left_out"]

    with torch.no_grad():
        changed = next(p for name, p in model.named_parameters() if "norm" in name)
        changed.mul_(2)
    save_state(tmp_path / "changed", model=model)  # a frozen value that was changed is not the base's any more
    extra = read_manifest(tmp_path / "changed").tensors.keys() - manifest.tensors.keys()
    assert len(extra) == 1 and "norm" in next(iter(extra))
    with pytest.raises(CheckpointError, match="changed here"):
        load_state(tmp_path / "c", model=model)


class _Values(nn.Module):
    def __init__(self, values: dict[str, torch.Tensor]):
        super().__init__()
        self.values = values

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.values


def _on_host(model: Any) -> nn.Module:
    return _Values(model.full_state_dict())


def test_adapter_files_and_merging_equal_peft(files: Path, tmp_path: Path) -> None:
    model = adapted(files, 4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(xr.device()))
    xr.sync()
    save_state(tmp_path / "c", model=model)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "c", tmp_path / "adapter")
    plain = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(files), str(tmp_path / "adapter"))
    assert_equal(model, plain)
    loaded = load(files, 2, 2, adapter=tmp_path / "adapter")
    assert_equal(loaded, plain)
    model.save_pretrained(tmp_path / "own")
    same = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(files), str(tmp_path / "own"))
    assert_equal(model, same)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=files, progress=False)
    expected = plain.merge_and_unload().state_dict()
    found = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}]
)
def test_adapters_computed_from_weights(files: Path, options: dict[str, Any]) -> None:
    model = adapted(files, 4, **options)
    plain = get_peft_model(LlamaForCausalLM.from_pretrained(files), lora(**options))
    values, expected = model.full_state_dict(), plain.state_dict()
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        if "use_dora" in options and "lora_A" in name:
            continue  # drawn with another seed
        torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)


def test_4_bit_weights_are_refused_by_name(files: Path) -> None:
    from transformers import BitsAndBytesConfig

    with pytest.raises(UserError, match="4-bit"):
        load(files, 4, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


def test_a_wrapped_module_on_the_meta_device_is_filled(files: Path) -> None:
    from fullshard.weights.fill import fill

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config(num_hidden_layers=2))
    model = FSDPv2(model, grid(4))
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, files, progress=False)
    assert_equal(model, LlamaForCausalLM.from_pretrained(files))
    assert {id(p) for p in model.parameters()} == {id(p) for group in optimizer.param_groups for p in group["params"]}
