"""Compiled units: how many graphs a model has, that they compute what the plain units do, and what happens where they
cannot be compiled."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fullshard.fsdp import checkpoint_module
from fullshard.fsdp.compile import compile_modules
from fullshard.lora.fused import fuse_lora
from fullshard.lora.gated_mlp import fuse_mlps
from fullshard.models.attention import use_own_attention
from fullshard.models.layer_groups import gated_mlps, shared_inputs
from fullshard.models.packed_inputs import Packed, PackingMethod

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}), "qwen3": (1, {}), "phi3": (1, {}), "gpt_neox": (1, {}), "qwen2": (1, {}), "gemma2": (1, {}),
    "gemma3_text": (2, {"sliding_window": 8}), "starcoder2": (1, {}), "cohere": (1, {}),
    "mixtral": (1, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen3_moe": (1, {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}),
}  # fmt: skip
"""The number of graphs, one per kind of layer, and changes of the configuration."""


class Graphs:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()


def family(name: str, layers: int) -> Any:
    changes = {**FAMILIES[name][1], "num_hidden_layers": layers}
    if name == "gemma3_text":
        changes["layer_types"] = (["sliding_attention", "full_attention"] * layers)[:layers]
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**SMALL, **changes}))


def step(model: Any, rows: int = 2, length: int = 16, **more: Any) -> torch.Tensor:
    """The logits of a batch, after a backward pass."""
    logits = model(torch.randint(3, 64, (rows, length)), use_cache=False, **more).logits
    if torch.is_grad_enabled():
        logits.square().mean().backward()
    return logits.detach()


def compiled(model: Any, backend: Any) -> list[str]:
    said: list[str] = []
    layers = model.model.layers if hasattr(model, "model") else model.gpt_neox.layers
    compile_modules(layers, said.append, backend=backend)
    return said


GUARDED = ("llama",)


@pytest.mark.parametrize("name", [n if n in GUARDED else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_layers_of_a_kind_share_a_graph(name: str) -> None:
    model, graphs = family(name, 2 * FAMILIES[name][0]), Graphs()
    model.get_input_embeddings().requires_grad_(False)  # as under an adapter: the first layer's input has no gradient
    plain = copy.deepcopy(model)
    said = compiled(model, graphs)
    torch.manual_seed(1)
    found = step(model)
    torch.manual_seed(1)
    torch.testing.assert_close(found, step(plain))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad)
    step(model)
    assert graphs.count == FAMILIES[name][0] and said == ["compiling the layers (first step)."]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_fused_adapters_in_recomputed_layers_share_a_graph_and_have_the_gradients_of_plain_ones(kept: int) -> None:
    model, graphs = family("llama", 3), Graphs()
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    plain = copy.deepcopy(adapted)
    fuse_lora(adapted, shared_inputs(adapted))
    fuse_mlps(adapted, gated_mlps(adapted))
    for layer in model.model.layers[kept:]:
        checkpoint_module(layer)
    compiled(model, graphs)
    for length in (16, 24, 40):
        torch.manual_seed(length)
        found = step(adapted, 2, length)
        torch.manual_seed(length)
        torch.testing.assert_close(found, step(plain, 2, length), rtol=1e-4, atol=1e-5)
    for p, q in zip(plain.parameters(), adapted.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    assert graphs.count == (4 if kept else 2), "for each size, of layers that are recomputed and of others"


@pytest.mark.slow
def test_other_sizes_compile_once_more_and_a_single_row_not_at_all() -> None:
    model, graphs, counts = family("llama", 1), Graphs(), []
    use_own_attention(model)
    compiled(model, graphs)
    batches = Packed(model, PackingMethod())
    for rows, length in ((3, 16), (3, 24), (3, 40), (2, 8), (1, 16), (3, 16)):
        with batches.rows({"input_ids": torch.empty(rows, length)}):
            step(model, rows, length)
        counts.append(graphs.count)
    assert counts == [1, 2, 2, 2, 2, 2]
    model.eval()
    with torch.no_grad():
        for rows, length in ((2, 16), (3, 48)):
            with batches.rows({"input_ids": torch.empty(rows, length)}):
                step(model, rows, length)
    assert graphs.count == 3, "one for evaluation"


@pytest.mark.slow
def test_packed_batches_share_a_graph() -> None:
    """With any number of documents; a row that is one block of the mask long runs uncompiled."""
    model, graphs, counts = family("llama", 1), Graphs(), []
    use_own_attention(model)
    compiled(model, graphs)
    packed = Packed(model, PackingMethod(masks=True))
    for rows, length, document in ((2, 256, 50), (2, 256, 7), (2, 128, 50), (3, 384, 50), (2, 256, 200)):
        batch = {"position_ids": torch.arange(length).expand(rows, -1) % document}
        with packed.rows(batch):
            step(model, rows, length, **batch)
        counts.append(graphs.count)
    assert counts == [1, 1, 1, 2, 2]


def test_generation_with_a_cache_runs_uncompiled() -> None:
    model, graphs = family("llama", 2), Graphs()
    compiled(model, graphs)
    with torch.no_grad():
        model(torch.randint(3, 64, (2, 9)), past_key_values=DynamicCache(config=model.config), use_cache=True)
    assert graphs.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["backend", pytest.param("limit", marks=pytest.mark.slow)])
def test_a_failure_is_reported_once_and_the_layers_run_uncompiled(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        if fault == "backend":
            raise ValueError("no C++ compiler here\nand more")
        return graph.forward

    model = family("llama", 2)
    plain = copy.deepcopy(model)
    if fault == "limit":
        monkeypatch.setattr("fullshard.fsdp.compile.KINDS", 1)
    compiled(model, backend)
    monkeypatch.setattr(logging.getLogger("fullshard"), "propagate", True)
    for length in (16, 24, 40):
        torch.manual_seed(length)
        found = step(model, 2, length)
        torch.manual_seed(length)
        torch.testing.assert_close(found, step(plain, 2, length))
    ours = [record for record in caplog.records if record.name == "fullshard.fsdp.compile"]
    (warning,) = [record.getMessage() for record in ours if record.levelno == logging.WARNING]
    reason = "no C++ compiler here" if fault == "backend" else "compiled one of them 1 times"
    assert reason in warning and "uncompiled on this rank" in warning and "and more" not in warning


def test_a_failure_is_an_error_where_one_graph_is_asked_for() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no compiler")

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = Doubled()
    compile_modules([module], None, backend=broken, fullgraph=True)
    with pytest.raises(RuntimeError, match="no compiler"):
        module(torch.ones(1, 2))
