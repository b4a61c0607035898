"""Models of transformers on 4 XLA devices: equal to one device, and to the torch engine on 2 ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla")

import torch
from torch import nn

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.fsdp import FSDPv2, checkpoint_module, transformer_auto_wrap_policy
from tests.xla import parity_program
from tests.xla.parity_program import made, sharded_batch, tokens, train
from tests.xla.torch_engine import torch_python

NAMES = ("llama", "gpt2")


@pytest.fixture(scope="module")
def mesh() -> xs.Mesh:
    n = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(n), (n,), ("fsdp",))


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of the torch engine."""
    python = torch_python()
    folder = tmp_path_factory.mktemp("torch")
    for name in NAMES:
        np.savez(folder / f"{name}-initial.npz", **{k: v.numpy() for k, v in made(name).state_dict().items()})
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k not in ("PJRT_DEVICE", "FULLSHARD_ENGINE")}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, parity_program.__file__, str(folder), *NAMES],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def assert_same(found: dict[str, np.ndarray], expected: Any, atol: float = 1e-5) -> None:
    assert sorted(found) == sorted(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_four_devices_equal_one_device_and_the_torch_engine(mesh, on_torch, name):
    one = made(name)
    expected = train(one, tokens())
    model = FSDPv2(made(name), mesh, auto_wrap_policy=transformer_auto_wrap_policy)
    found = train(model, sharded_batch(mesh))
    assert_same(found, expected)
    assert_same(found, np.load(on_torch / f"{name}-torch.npz"))
    values = model.full_state_dict()
    for key, value in one.state_dict().items():
        torch.testing.assert_close(values[key], value, rtol=0, atol=1e-5)
    assert list(model.state_dict()) == list(one.state_dict())
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight  # tied


def test_hybrid_with_recomputed_layers_equals_one_device():
    n = xr.global_runtime_device_count()
    hybrid = xs.Mesh(np.arange(n), (2, n // 2), ("replica", "fsdp"))
    model = made("llama")
    for layer in model.model.layers:
        checkpoint_module(layer)
    FSDPv2(model, hybrid, strategy="HYBRID_SHARD", auto_wrap_policy=transformer_auto_wrap_policy)
    assert_same(train(model, sharded_batch(hybrid)), train(made("llama"), tokens()))


def test_gradient_checkpointing_of_transformers(mesh):
    model = FSDPv2(made("gpt2"), mesh, auto_wrap_policy=transformer_auto_wrap_policy)
    model.gradient_checkpointing_enable()
    assert_same(train(model.train(), sharded_batch(mesh)), train(made("gpt2"), tokens()))


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(made("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.02)
    return model


def test_lora_through_peft_equals_one_device(mesh, tmp_path):
    from safetensors.torch import load_file

    one, model = with_lora(), FSDPv2(with_lora(), mesh, auto_wrap_policy=transformer_auto_wrap_policy)
    assert_same(train(model, sharded_batch(mesh)), train(one, tokens()))
    frozen = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert not frozen.requires_grad and xs.sharding_of(frozen).spec == ("fsdp", None)
    model.save_pretrained(tmp_path / "sharded")
    one.save_pretrained(tmp_path / "one")
    sharded, whole = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("sharded", "one"))
    assert sorted(sharded) == sorted(whole)
    for key, value in whole.items():
        torch.testing.assert_close(sharded[key], value, rtol=0, atol=1e-5)


def test_save_pretrained_and_generate(mesh, tmp_path):
    from transformers import LlamaForCausalLM

    one = made("llama")
    model = FSDPv2(made("llama"), mesh, auto_wrap_policy=transformer_auto_wrap_policy)
    model.save_pretrained(tmp_path)
    read = LlamaForCausalLM.from_pretrained(tmp_path)
    for key, value in one.state_dict().items():
        assert torch.equal(read.state_dict()[key], value)
    prompt = tokens()[:4, :4]
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    expected = one.generate(prompt, **options)
    options["attention_mask"] = options["attention_mask"].to(xr.device())
    assert torch.equal(model.generate(prompt.to(xr.device()), **options).cpu(), expected)
