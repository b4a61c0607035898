"""Small Hugging Face models annotated for tensor parallelism, and the one-device programs they must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fullshard.spmd as xs
from fullshard.distributed import runtime

VOCABULARY = 96


class InDouble(TorchFunctionMode):
    """Makes the models' own casts to fp32 (norms, rotary angles, loss) casts to fp64, so that fp64 means fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs or {}))
        return func(*args, **kwargs)


def llama(dtype: torch.dtype, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def gpt2(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


LLAMA_RULES = [
    ("embed_tokens.weight", ("model", None)),
    ("lm_head.weight", ("model", None)),
    ("q_proj.weight", ("model", None)),
    ("k_proj.weight", ("model", None)),
    ("v_proj.weight", ("model", None)),
    ("o_proj.weight", (None, "model")),
    ("gate_proj.weight", ("model", "data")),
    ("up_proj.weight", ("model", None)),
    ("down_proj.weight", (None, "model")),
]

GPT2_RULES = [
    ("wte.weight", ("model", None)),
    ("c_attn.weight", (None, "model")),
    ("attn.c_proj.weight", ("model", None)),
    ("c_fc.weight", (None, "model")),
    ("c_fc.bias", ("model",)),
    ("mlp.c_proj.weight", ("model", None)),
]


def annotate(module: nn.Module, mesh: xs.Mesh, rules: list[tuple[str, tuple[object, ...]]]) -> int:
    """Mark every parameter whose name ends as a rule says; the number of parameters marked."""
    marked = 0
    for name, parameter in module.named_parameters():
        for ending, spec in rules:
            if name.endswith(ending):
                xs.mark_sharding(parameter, mesh, spec)
                marked += 1
    return marked


def batch(rows: int = 4, length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels; the rows have different numbers of unmasked labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 * row] = -100
    return ids, labels


def assert_one_step_equals_one_device(build: Any, rules: Any, mesh: xs.Mesh) -> None:
    """Forward and backward with tensor parallelism, in fp64 on this rank's device: loss, logits, gradients."""
    device = runtime.device()
    reference, model = build(torch.float64).to(device), build(torch.float64).to(device)
    assert annotate(model, mesh, rules) >= len(rules)
    xs.distribute_module(model, mesh)
    ids, labels = (t.to(device) for t in batch())
    with InDouble():
        expected = reference(input_ids=ids, labels=labels)
        expected.loss.backward()
        for t in (ids, labels):
            xs.mark_sharding(t, mesh, ("data", None))
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
    torch.testing.assert_close(out.loss.full_tensor(), expected.loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(out.logits.full_tensor(), expected.logits, rtol=0, atol=1e-10)
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-10, msg=name)
