"""Two ranks that part in the way named: none of them may be left hanging."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import fullshard.runtime as xr

xr.SHUTDOWN_PATIENCE = 2.0
xr.use_spmd(init_timeout=20)
way, first = sys.argv[1], xr.rank() == 0
one, other = dist.new_group(), dist.new_group()

if way == "one raises while one waits":
    if not first:
        raise ValueError("rank 1 gave up")
    dist.all_reduce(torch.ones(3))
elif way == "one is killed":
    if not first:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError:
        xr.shutdown()
elif way == "both raise with unlike work pending":
    work = dist.all_reduce(torch.ones(1000), group=one if first else other, async_op=True)
    raise ValueError(f"rank {xr.rank()} gave up")
elif way == "one raises while the other is elsewhere":
    if not first:
        time.sleep(120)
        sys.exit()
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    raise ValueError("rank 0 gave up")
