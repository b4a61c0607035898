"""Runs a script on Accelerate's own FSDP 2 (torch's `fully_shard`) over CPU ranks, as an oracle.

    fullshard launch --no_integrations --use_cpu -n 2 accelerate_fsdp2.py SCRIPT ARGUMENTS…

Accelerate offers FSDP on GPUs only, so its state is told that FSDP is on; nothing else is changed.
"""

import os
import runpy
import sys

from accelerate import state
from accelerate.utils import DistributedType

os.environ["FSDP_VERSION"] = "2"
os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
original = state.AcceleratorState.__init__


def with_fsdp(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if kwargs.get("fsdp_plugin") is not None:
        self.distributed_type = state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = kwargs["fsdp_plugin"]


state.AcceleratorState.__init__ = with_fsdp
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
