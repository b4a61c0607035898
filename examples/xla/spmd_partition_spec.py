"""The third sample of the SPMD guide: tensors with more or fewer dims than the mesh has axes.

torchrun --nproc_per_node 4 examples/xla/spmd_partition_spec.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla/spmd_partition_spec.py
"""

import numpy as np
import torch
from results import show

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard.spmd import Mesh

# What the sample leaves open.
xr.use_spmd()
num_devices = xr.global_runtime_device_count()
mesh = Mesh(np.array(range(num_devices)), (num_devices // 2, 2), ("data", "model"))
device = xm.xla_device()
torch.manual_seed(0)

# --- the sample ---
# fmt: off
t1 = torch.randn(8, 8, 16).to(device)
t2 = torch.randn(8).to(device)

# First dimension is being replicated.
xs.mark_sharding(t1, mesh, (None, 'data', 'model'))

# First dimension is being sharded at data dimension.
# model dimension is used for replication when omitted.
xs.mark_sharding(t2, mesh, ('data',))

# First dimension is sharded across both mesh axes.
xs.mark_sharding( t2, mesh, (('data', 'model'),))
# fmt: on
# --- end of the sample ---

xr.print0(t1.sharding_spec, t2.sharding_spec)
show(t1=t1, t2=t2, product=(t1 @ t1.transpose(1, 2)).softmax(-1) @ t2)
