"""The example of the SPMD guide: a mesh, three sharded tensors, and which device holds which part.

One process:     python examples/spmd_basic.py
Four processes:  torchrun --nproc_per_node 4 examples/spmd_basic.py
"""

import numpy as np
import torch

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard.spmd import Mesh


def main() -> dict[str, torch.Tensor]:
    # Start one SPMD program over all devices.
    xr.use_spmd()

    # Mesh, partition spec and tensor shape determine the shard of each device.
    num_devices = xr.global_runtime_device_count()
    mesh_shape = (num_devices, 1)
    device_ids = np.array(range(num_devices))
    mesh = Mesh(device_ids, mesh_shape, ("data", "model"))
    xr.print0(f"mesh.shape() = {mesh.shape()}\n")

    t = torch.randn(8, 4).to(xm.xla_device())

    # Shard dim 0 over `data` and dim 1 over `model`.
    partition_spec = ("data", "model")
    xs.mark_sharding(t, mesh, partition_spec)
    xs.visualize_tensor_sharding(t)

    # A tensor may have more dims than the mesh has axes, or fewer.
    device = xm.xla_device()
    t1 = torch.randn(8, 8, 16).to(device)
    t2 = torch.randn(8).to(device)

    # The first dim is not sharded.
    xs.mark_sharding(t1, mesh, (None, "data", "model"))
    xs.visualize_tensor_sharding(t1)

    # Sharded over `data`, replicated over `model`.
    xs.mark_sharding(t2, mesh, ("data",))
    xs.visualize_tensor_sharding(t2)

    # Sharded over both axes.
    xs.mark_sharding(t2, mesh, (("data", "model"),))
    xs.visualize_tensor_sharding(t2)

    # Operators work on global values.
    total = (t @ t.T).sum() + t1.mean() + t2.norm()
    xr.print0(f"\nevery rank agrees on the total: {total.item():.4f}")
    return {"t": t, "t1": t1, "t2": t2, "total": total}


if __name__ == "__main__":
    main()
