"""The second sample of the FSDPv2 guide: each decoder layer is a unit of its own.

torchrun --nproc_per_node 4 examples/xla/fsdp_auto_wrap.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla/fsdp_auto_wrap.py
"""

import functools

import decoder_only_model
import numpy as np
import torch
from results import show, show_model

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard import FSDPv2
from fullshard.fsdp.wrap import transformer_auto_wrap_policy

# What the sample leaves open.
xr.use_spmd()
num_devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.array(range(num_devices)), (num_devices, 1), ("fsdp", "model"))
torch.manual_seed(0)

model = decoder_only_model.Decoder().to(xm.xla_device())

# --- the sample ---
# fmt: off
# Apply FSDP sharding on each DecoderLayer layer.
auto_wrap_policy = functools.partial(
    transformer_auto_wrap_policy,
    transformer_layer_cls={
        decoder_only_model.DecoderLayer
    },
)
model = FSDPv2(
    model, mesh=mesh, auto_wrap_policy=auto_wrap_policy)
# fmt: on
# --- end of the sample ---

x, y = (xs.mark_sharding(t.to(xm.xla_device()), mesh, ("fsdp", None)) for t in decoder_only_model.draw_batch())
optim = torch.optim.Adam(model.parameters(), lr=0.001)
for step in range(3):
    loss = model(x, y).mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    show(**{f"loss{step}": loss})
show_model(model)
