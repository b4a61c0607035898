"""Data parallelism by annotation: trains a ResNet on a batch that is sharded over the `data` axis.

Model and training loop are written for one device. Batch norm computes its statistics over the global batch, so the
result is the same on any number of devices.

One process:     python examples/resnet_data_parallel.py
Four processes:  torchrun --nproc_per_node 4 examples/resnet_data_parallel.py
"""

import numpy as np
import torch
from transformers import ResNetConfig, ResNetForImageClassification

import fullshard.runtime as xr
import fullshard.spmd as xs

STEPS, BATCH, CLASSES = 5, 16, 10


def build_model(dtype: torch.dtype = torch.float32) -> ResNetForImageClassification:
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )  # fmt: skip
    return ResNetForImageClassification(config).to(dtype)


def batches(dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, BATCH, 3, 32, 32, generator=generator).to(dtype)
    labels = torch.randint(CLASSES, (STEPS, BATCH), generator=generator)
    return [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]


def train(model: torch.nn.Module, loader) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> list[float]:
    xr.use_spmd()
    devices = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))
    model = xs.distribute_module(build_model().to(xr.device()), mesh)
    loader = xs.ShardedLoader(
        batches(),
        input_sharding={
            "pixel_values": xs.ShardingSpec(mesh, ("data", None, None, None)),
            "labels": xs.ShardingSpec(mesh, ("data",)),
        },
    )
    losses = train(model, loader)
    for step, loss in enumerate(losses):
        xr.print0(f"step {step}  loss {loss:.4f}")
    return losses


if __name__ == "__main__":
    main()
