"""Saves and resumes on a GPU, run under torchrun: bit for bit, with nothing allocated on the GPU by a save."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fullshard.runtime as xr
from fullshard import CheckpointManager, FSDPv2
from tests.fsdp.programs import mesh_for


class Training:
    """Layers with dropout on this rank's GPU."""

    def __init__(self, seed: int, offload: bool):
        torch.manual_seed(seed)
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Dropout(0.1)) for _ in range(4)]
        model = torch.nn.Sequential(*layers).to(xr.device())
        self.model = FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy={torch.nn.Linear}, cpu_offload=offload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=not offload)
        self.losses: list[float] = []

    @property
    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "losses": self.losses}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(8, 512, device=xr.device())).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def values(self) -> list[torch.Tensor]:
        found = [t._local_tensor for t in self.model.state_dict().values()]
        for own in self.optimizer.state.values():
            found += [getattr(v, "_local_tensor", v) for v in own.values()]
        return [t.detach().cpu().clone() for t in found]


def main(folder: Path) -> None:
    xr.use_spmd()
    for offload in (False, True):
        for background in (False, True):
            xr.seed(3, per_rank=True)
            straight = Training(5, offload)
            xr.seed(7, per_rank=True)
            straight.run(6)
            half = Training(5, offload)
            xr.seed(7, per_rank=True)
            half.run(3)
            with CheckpointManager(folder / f"{offload}-{background}", 1) as manager:
                for step in (2, 3):  # the second one with buffers that exist already
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
                    (manager.save_async if background else manager.save)(step, half.state)
                    manager.join()
                    after = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
                    assert after == before, f"a save allocated on the GPU: {before} before, {after} after"
                if background:
                    assert manager._buffer._memory.is_pinned(), "the host buffer is not page-locked"
                resumed = Training(99, offload)
                state = resumed.state
                assert manager.restore(None, state) == 3
                resumed.losses = state["losses"]
            resumed.run(3)
            assert resumed.losses == straight.losses, (resumed.losses, straight.losses)
            for got, expected in zip(resumed.values(), straight.values(), strict=True):
                assert torch.equal(got, expected)
    xr.print0("checkpoints on", torch.cuda.get_device_name(), "with", xr.world_size(), "rank(s): the same to the bit")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
