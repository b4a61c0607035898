"""The third sample of the FSDPv2 guide: the layout of an output that is not a tensor.

torchrun --nproc_per_node 4 examples/xla/fsdp_shard_output.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla/fsdp_shard_output.py
"""

import numpy as np
import torch
from decoder_only_model import DecoderWithOutput, draw_batch
from results import show

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard import FSDPv2

# What the sample leaves open.
xr.use_spmd()
num_devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.array(range(num_devices)), (num_devices, 1), ("fsdp", "model"))
torch.manual_seed(0)

my_module = DecoderWithOutput().to(xm.xla_device())


# --- the sample ---
# fmt: off
def shard_output(output, mesh):
    xs.mark_sharding(output.logits, mesh, ('fsdp', None, None))

model = FSDPv2(my_module, mesh, shard_output)
# fmt: on
# --- end of the sample ---

x = xs.mark_sharding(draw_batch()[0].to(xm.xla_device()), mesh, ("fsdp", None))
output = model(x)
output.logits.square().mean().backward()
xr.print0(output.logits.sharding_spec)
show(logits=output.logits, **{f"grad.{name}": p.grad for name, p in model.named_parameters()})
