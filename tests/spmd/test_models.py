"""Hugging Face models, unmodified, with annotated parameters: equal to one device."""

import contextlib

import numpy as np
import pytest
import torch

import fullshard.spmd as xs
from fullshard.distributed import runtime
from tests.pool import ranks
from tests.spmd.models import GPT2_RULES, LLAMA_RULES, InDouble, annotate, batch, gpt2, llama

MODELS = {"llama": (llama, LLAMA_RULES), "gpt2": (gpt2, GPT2_RULES)}


def _tensor_parallel(name, dtype):
    build, rules = MODELS[name]
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    model = build(dtype)
    assert annotate(model, mesh, rules) > 10
    xs.distribute_module(model, mesh)
    ids, labels = batch()
    xs.mark_sharding(ids, mesh, ("data", None))
    xs.mark_sharding(labels, mesh, ("data", None))
    return model, ids, labels


@ranks(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["fp64", "fp32"]
)
def test_loss_logits_and_gradients_equal_one_device(name, dtype):
    with InDouble() if dtype == torch.float64 else contextlib.nullcontext():
        _compare_one_step(name, dtype)


def _compare_one_step(name, dtype):
    reference = MODELS[name][0](dtype)
    ids, labels = batch()
    expected = reference(input_ids=ids, labels=labels)
    expected.loss.backward()

    runtime.forget_warnings()
    model, ids, labels = _tensor_parallel(name, dtype)
    out = model(input_ids=ids, labels=labels)
    out.loss.backward()
    if name == "llama":
        assert not [key for key in runtime.warned() if key.startswith("fallback")]

    exact = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.loss.full_tensor(), expected.loss, rtol=0, atol=exact)
    torch.testing.assert_close(out.logits.full_tensor(), expected.logits, rtol=0, atol=exact)
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    largest = max(g.abs().max().item() for g in gradients.values())
    for n, p in model.named_parameters():
        assert p.grad.sharding_spec == p.sharding_spec, n
        difference = (p.grad.full_tensor() - gradients[n]).abs().max().item()
        assert difference <= exact * largest, f"{n}: {difference}"


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ten_adamw_steps_equal_one_device(name):
    reference = MODELS[name][0](torch.float64)
    model, sharded_ids, sharded_labels = _tensor_parallel(name, torch.float64)
    ids, labels = batch()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
    for _ in range(10):
        losses = []
        for m, optimizer, x, y in zip(
            (reference, model), optimizers, (ids, sharded_ids), (labels, sharded_labels), strict=True
        ):
            with InDouble():
                loss = m(input_ids=x, labels=y).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-8
    for (n, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (p - q.full_tensor()).abs().max() < 1e-8, n
    assert model.get_input_embeddings().weight.sharding_spec == ("model", None)
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight
