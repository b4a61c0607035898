"""What `test_gpu.py` runs on every rank: tensors, models and random numbers on CUDA against one device."""

import numpy as np
import torch

import fullshard.runtime as xr
import fullshard.spmd as xs
from tests.spmd.models import (
    GPT2_RULES,
    LLAMA_RULES,
    annotate,
    assert_one_step_equals_one_device,
    batch,
    gpt2,
    llama,
)


def bf16_step(mesh) -> None:
    """Half precision takes the fused attention kernels; exactness is not to be had, agreement is."""
    reference, model = llama(torch.bfloat16).cuda(), llama(torch.bfloat16).cuda()
    annotate(model, mesh, LLAMA_RULES)
    xs.distribute_module(model, mesh)
    ids, labels = (t.cuda() for t in batch())
    expected = reference(input_ids=ids, labels=labels).loss
    for t in (ids, labels):
        xs.mark_sharding(t, mesh, ("data", None))
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected, rtol=0.02, atol=0.02)


def layouts(mesh) -> None:
    for shape in [(8, 4), (6, 7), (1, 3)]:
        value = torch.randn(shape, device="cuda")
        for spec in [("data", "model"), ("model", "data"), (("data", "model"), None), (None, ("data", "model"))]:
            try:
                t = xs.mark_sharding(value.clone(), mesh, spec)
            except NotImplementedError:
                continue  # a device order that this torch cannot keep
            assert torch.equal(t.full_tensor(), value)
            torch.testing.assert_close((t @ value.T).softmax(-1).full_tensor(), (value @ value.T).softmax(-1))
    t = xs.mark_sharding(torch.ones(64, 64, device="cuda"), mesh, ("data", "model"))
    dropped = torch.nn.functional.dropout(t, 0.5).full_tensor()
    assert 0.4 < (dropped == 0).float().mean() < 0.6
    t[0] = 5.0
    assert torch.equal(t.full_tensor()[:2, 0].cpu(), torch.tensor([5.0, 1.0]))


def main() -> None:
    xr.use_spmd()
    n = xr.world_size()
    mesh = xs.Mesh(np.arange(n), (2, 2) if n == 4 else (1, n), ("data", "model"))
    torch.manual_seed(0)
    layouts(mesh)
    for build, rules in ((llama, LLAMA_RULES), (gpt2, GPT2_RULES)):
        assert_one_step_equals_one_device(build, rules, mesh)
    bf16_step(mesh)
    fallbacks = sorted(key for key in xr.warned() if key.startswith("fallback"))
    print(f"rank {xr.rank()}: equal to one device; fallbacks: {fallbacks}", flush=True)


if __name__ == "__main__":
    main()
