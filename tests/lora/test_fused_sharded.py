"""LoRA layers that run as groups, in sharded models: the same losses and adapters as PEFT's layers on one device."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, checkpoint_module, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from fullshard.lora.fused import fuse_lora, report_sharded
from fullshard.models.layer_groups import shared_inputs
from fullshard.quant.config import Quantization
from fullshard.quant.quantize import quantize_model
from fullshard.quant.sharded_groups import Scheme
from fullshard.sft.trainer import SFTTrainer
from tests.fsdp.programs import mean_over_ranks, mesh_for
from tests.lora.fused_models import IDS, adapted, bare
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings
from tests.sft.tiny import make_folder

CASES: dict[str, dict[str, Any]] = {
    "4 bits, checkpointing": {"four_bits": True, "recomputes": True},
    "dense": {},
    "no_sync": {"accumulates": True},
    "compiled": {"backend": "aot_eager"},
    "small units": {"policy": functools.partial(size_based_auto_wrap_policy, min_num_params=500)},
}


def train(model: Any, ids: torch.Tensor, accumulates: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(3):
        for more in (True, False) if accumulates else (False,):
            with model.no_sync() if more and hasattr(model, "no_sync") else torch.enable_grad():
                logits = model(input_ids=ids, use_cache=False).logits.double()
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(mean_over_ranks(loss.detach())))
    return found


@ranks(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if i else []) for i, n in enumerate(CASES)])
def test_two_ranks_train_as_peft_on_one_device(name: str) -> None:
    case = CASES[name]
    base = bare("qwen2", hidden_size=64)
    plain = adapted(quantize_model(base, Quantization(Scheme(double=True))) if case.get("four_bits") else base)
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused, shared_inputs(fused)).layers == 14
    policy = case.get("policy", transformer_auto_wrap_policy)
    made: Any = FSDPv2(fused, mesh_for("FULL_SHARD"), auto_wrap_policy=policy, small_parameter_bytes=0)
    if name == "small units":
        assert any(isinstance(m, FSDPv2) for m in made.modules() if hasattr(m, "_fullshard_lora"))
        assert "they are units of their own" in report_sharded(made, None).note()
    else:
        assert not report_sharded(made, None).note()
    if case.get("recomputes"):
        for layer in made.get_base_model().model.layers:
            checkpoint_module(layer)
    if backend := case.get("backend"):
        torch._dynamo.reset()
        made.compile_units(backend=backend)
    mine = IDS[runtime.rank() : runtime.rank() + 1]
    expected = train(plain, IDS, case.get("accumulates", False))
    assert train(made, mine, case.get("accumulates", False)) == pytest.approx(expected, abs=1e-5)
    assert expected[0] - expected[-1] > 1e-2


@ranks(1)
def test_a_run_with_fused_layers(tmp_path: Path) -> None:
    make_folder(tmp_path)
    found, changed = [], []
    for fused in (False, True):
        config = settings(
            tmp_path / str(fused), max_steps=3, use_peft_lora=True, lora_r=4, lora_dropout=0.0, fused_lora=fused,
            **global_batch(1, 4),
        )  # fmt: skip
        data = str(tmp_path / "data" / "train.jsonl")
        trainer = SFTTrainer(model=str(tmp_path / "model"), args=config, train_dataset=data)
        trainer.train()
        found.append(losses(trainer))
        changed.append(sum(hasattr(m, "_fullshard_lora") for m in trainer.model.modules()))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert changed[0] == 0 < changed[1]
