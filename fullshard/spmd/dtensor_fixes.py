"""Corrections to torch's own `DTensor`, which parameters of FSDPv2 are: its optimizer steps are the fastest.

`import fullshard.spmd` applies all but the last. `torch_private.py` lists them among the patches.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from fullshard import accelerator, runtime
from fullshard.spmd.foreach_ops import fused_update, unscale
from fullshard.spmd.rule_table import RULES, aten
from fullshard.spmd.rules import draw_global
from fullshard.spmd.tensor import DATA
from fullshard.torch_private import custom_op_handlers

# `parameter.data = value` changes the shard; torch changes the outer tensor only, whose memory is never read.
DTensor.data = DATA

# torch's handler for `GradScaler` uses the layout of the first gradient for all of them and fails on lists that also
# hold plain tensors (the gradients of FSDPv2 with ignored modules).
custom_op_handlers()[aten._amp_foreach_non_finite_check_and_unscale_.default] = unscale

# torch finds the layout of every tensor of a fused optimizer's lists, and looks each up again for the result.
for _update in (aten._fused_adamw_.default, aten._fused_adam_.default):
    custom_op_handlers()[_update] = fused_update


def draw_global_where_needed() -> None:
    """Let random operators on DTensors draw what one device draws, if torch does not do so on this device.

    torch has one random stream for all shards only on some accelerators; on CPUs each rank draws the same numbers.
    """
    if not accelerator.draws_by_offset(runtime.device()):
        for op in [op for op, rule in RULES.items() if rule is draw_global]:
            custom_op_handlers().setdefault(op, draw_global)
