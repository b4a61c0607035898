"""The first sample of the SPMD guide: a mesh and a sharded tensor.

torchrun --nproc_per_node 4 examples/xla/spmd_basic.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla/spmd_basic.py
"""

import numpy as np
import torch
from results import show

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard.spmd import Mesh

# What the sample leaves open.
torch.manual_seed(0)

# --- the sample ---
# fmt: off
# Enable XLA SPMD execution mode.
xr.use_spmd()

# Device mesh, this and partition spec as well as the input tensor shape define the individual shard shape.
num_devices = xr.global_runtime_device_count()
mesh_shape = (num_devices, 1)
device_ids = np.array(range(num_devices))
mesh = Mesh(device_ids, mesh_shape, ('data', 'model'))

t = torch.randn(8, 4).to(xm.xla_device())

# Mesh partitioning, each device holds 1/8-th of the input
partition_spec = ('data', 'model')
xs.mark_sharding(t, mesh, partition_spec)
# fmt: on
# --- end of the sample ---

xr.print0(mesh.shape())  # the guide's second sample; OrderedDict([('data', 4), ('model', 1)]) on four devices
show(t=t, product=t @ t.T)
