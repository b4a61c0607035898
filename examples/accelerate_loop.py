"""A training loop written for Accelerate, with checkpoints; it knows nothing of fullshard.

    python examples/accelerate_loop.py --output_dir out                                      # Accelerate alone
    fullshard launch --num_processes 2 examples/accelerate_loop.py --output_dir out          # two ranks, sharded
    fullshard launch --num_processes 2 examples/accelerate_loop.py --output_dir out --resume out/checkpoint

The model is small and the data made up. `result.json` has the losses, which are those of one process.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), *(Block(width) for _ in range(3)), nn.Linear(width, 3))


def rows(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", help="a folder that save_state wrote: train from there on")
    options = parser.parse_args()

    set_seed(7)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
    train = DataLoader(rows(64, seed=1), batch_size=8, shuffle=True)
    test = DataLoader(rows(21, seed=2), batch_size=8)
    scheduler, train, test, optimizer, model = accelerator.prepare(scheduler, train, test, optimizer, model)
    if options.resume:
        accelerator.load_state(options.resume)

    losses, norms = [], []
    for epoch in range(1 if options.resume else 0, options.epochs):
        train.set_epoch(epoch)
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
        if epoch == 0:
            accelerator.save_state(str(options.output_dir / "checkpoint"))

    right = []
    with torch.no_grad():
        for x, y in test:
            right += accelerator.gather_for_metrics(model(x).argmax(-1) == y).tolist()
    accelerator.save_model(model, str(options.output_dir / "model"))
    if accelerator.is_main_process:
        found = {"losses": losses, "norms": norms, "rows": len(right), "right": sum(right)}
        (options.output_dir / "result.json").write_text(json.dumps(found))
    accelerator.print(f"loss {losses[-1]:.4f}, {sum(right)} of {len(right)} right")


if __name__ == "__main__":
    main()
