"""The fourth sample of the FSDPv2 guide: activations are recomputed in backward.

torchrun --nproc_per_node 4 examples/xla/fsdp_gradient_checkpointing.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla/fsdp_gradient_checkpointing.py
"""

import numpy as np
import torch
from decoder_only_model import Decoder, draw_batch
from results import show

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard import FSDPv2
from fullshard.fsdp import checkpoint_module

# What the sample leaves open.
xr.use_spmd()
num_devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.array(range(num_devices)), (num_devices, 1), ("fsdp", "model"))
torch.manual_seed(0)

my_module = Decoder().to(xm.xla_device())

# --- the sample ---
# fmt: off
model = FSDPv2(checkpoint_module(my_module), mesh)
# fmt: on
# --- end of the sample ---

x, y = (xs.mark_sharding(t.to(xm.xla_device()), mesh, ("fsdp", None)) for t in draw_batch())
loss = model(x, y).mean()
loss.backward()
show(loss=loss, **{f"grad.{name}": p.grad for name, p in model.named_parameters()})
