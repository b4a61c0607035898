"""Checkpoints of models that were loaded from files: only what trains is written, and resuming is exact."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import fullshard.spmd as xs
from fullshard import CheckpointManager, load_pretrained
from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from tests.checkpoint.resume_programs import assert_same_bits
from tests.fsdp.programs import build
from tests.pool import ranks


def _load(base):
    torch.manual_seed(6)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = load_pretrained(
        base, xs.get_1d_mesh("fsdp"), adapt=lambda plain: get_peft_model(plain, lora), progress=False
    )
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        ids = torch.arange(12).view(2, 6) + step + runtime.rank()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _values(model):
    return {n: getattr(t, "_local_tensor", t).detach().clone() for n, t in model.state_dict().items()}


@ranks(2)
def test_an_adapter_is_saved_without_its_base_and_resumes_exactly(tmp_path):
    for name, seed in (("base", 3), ("other", 4)):
        plain = build("llama-tied", torch.float32)
        with torch.no_grad():
            plain.model.norm.weight.mul_(seed)
        if runtime.is_main():
            plain.save_pretrained(tmp_path / name)
    torch.distributed.barrier()
    model, optimizer = _load(tmp_path / "base")
    _train(model, optimizer, 3)
    with CheckpointManager(tmp_path / "run", 3) as manager:
        manager.save_async(3, {"model": model, "optimizer": optimizer})
        values = _values(model)
        losses = _train(model, optimizer, 2)
        manager.join()
        manifest = read_manifest(tmp_path / "run/step-3")
        written = [n for n in manifest.tensors if n.startswith("model/")]
        assert written and all("lora_" in name for name in written)
        assert manifest.states["model"]["base"]["path"] == str(tmp_path / "base")
        again, fresh = _load(tmp_path / "base")
        manager.restore(None, {"model": again, "optimizer": fresh})
        assert_same_bits(_values(again), values)
        assert _train(again, fresh, 2) == losses
        wrong, fresh = _load(tmp_path / "other")
        before = _values(wrong)
        with pytest.raises(CheckpointError, match="the files differ"):
            manager.restore(None, {"model": wrong, "optimizer": fresh})
        assert_same_bits(_values(wrong), before)
        manager.save(4, {"model": again}, force=True)  # after a restore still without the base
        assert all("lora_" in n for n in read_manifest(tmp_path / "run/step-4").tensors if n.startswith("model/"))
