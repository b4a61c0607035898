"""What `test_gpu.py` runs on every rank: loading to a GPU, training from there and back, export."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard.runtime as xr
from fullshard import CheckpointManager, load_pretrained, save_pretrained
from tests.weights.models import assert_equal, reference, save

OPTIONS = ({}, {"strategy": "SHARD_GRAD_OP"}, {"mixed_precision": "bf16"}, {"cpu_offload": True})


def shared_directory() -> Path:
    """One directory for all ranks."""
    made = [tempfile.mkdtemp() if xr.is_main() else None]
    if xr.world_size() > 1:
        dist.broadcast_object_list(made)
    return Path(made[0] or "")


class Run:
    """A model, its optimizer, and steps that depend on nothing but their number."""

    def __init__(self, files: Path, **options):
        self.model = load_pretrained(files, progress=False, **options)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def step(self, number: int) -> float:
        torch.manual_seed(100 * number + xr.rank())
        ids = torch.randint(0, self.model.config.vocab_size, (2, 16), device="cuda")
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] = number
        return loss.item()

    def values(self) -> dict[str, torch.Tensor]:
        """Every shard and every moment on this rank."""
        out = {n: p._local_tensor.detach().clone() for n, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state[p].items():
                local = getattr(value, "_local_tensor", value)
                out[f"{name}:{key}"] = local.detach().clone()
        return out


class Allocations:
    """Counts bytes that appear on the GPU inside."""

    def __enter__(self) -> "Allocations":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = torch.cuda.max_memory_allocated() - self.before


def resume(files: Path, place: Path, **options) -> None:
    """Six steps with a save in this thread and one in the background equal three, a restore, and three more."""
    whole = Run(files, **options)
    with CheckpointManager(place, save_interval=1) as manager:
        for number in (1, 2):
            whole.step(number)
        with Allocations() as made:
            manager.save(2, whole.state)
        assert made.bytes == 0, f"a save allocated {made.bytes} bytes on the GPU"
        whole.step(3)
        with Allocations() as made:
            manager.save_async(3, whole.state)
        assert made.bytes == 0, f"an asynchronous save allocated {made.bytes} bytes on the GPU"
        rest = [whole.step(number) for number in (4, 5, 6)]  # changes what is being written
        manager.join()
        again = Run(files, **options)
        assert manager.restore(None, again.state) == 3 and again.state["step"] == 3
        assert [again.step(number) for number in (4, 5, 6)] == rest
        expected, got = whole.values(), again.values()
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def main() -> None:
    xr.use_spmd()
    place = shared_directory()
    try:
        for name in ("llama", "llama-tied", "mixtral"):
            if xr.is_main():
                save(name, place / name)
            xr.barrier()
            model = load_pretrained(place / name, progress=False)
            assert all(p.device.type == "cuda" for p in model.parameters())
            assert_equal(model, reference(name, place / name))
            with Allocations() as made:
                save_pretrained(model, place / f"{name}-again")
            assert made.bytes == 0, f"an export allocated {made.bytes} bytes on the GPU"
            assert_equal(model, reference(name, place / f"{name}-again"))
        for number, options in enumerate(OPTIONS):
            resume(place / "llama", place / f"run-{number}", **options)
        print(f"rank {xr.rank()}: loaded, saved and resumed bit for bit", flush=True)
    finally:
        xr.barrier()
        if xr.is_main():
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
