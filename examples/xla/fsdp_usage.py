"""The first sample of the FSDPv2 guide: shard a module and train one step.

torchrun --nproc_per_node 4 examples/xla/fsdp_usage.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla/fsdp_usage.py
"""

import numpy as np
import torch
from decoder_only_model import Decoder, draw_batch
from results import show, show_model

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard import FSDPv2

# What the sample leaves open.
xr.use_spmd()
torch.manual_seed(0)
my_module = Decoder().to(xm.xla_device())
x, y = (t.to(xm.xla_device()) for t in draw_batch())

# --- the sample ---
# fmt: off
# Define the mesh following common SPMD practice
num_devices = xr.global_runtime_device_count()
mesh_shape = (num_devices, 1)
device_ids = np.array(range(num_devices))
# To be noted, the mesh must have an axis named 'fsdp', which the weights and activations will be sharded on.
mesh = xs.Mesh(device_ids, mesh_shape, ('fsdp', 'model'))

# Shard the input, and assume x is a 2D tensor.
x = xs.mark_sharding(x, mesh, ('fsdp', None))

# As normal FSDP, but an extra mesh is needed.
model = FSDPv2(my_module, mesh)
optim = torch.optim.Adam(model.parameters(), lr=0.0001)
output = model(x, y)
loss = output.sum()
loss.backward()
optim.step()
# fmt: on
# --- end of the sample ---

show(output=output, loss=loss)
show_model(model)
