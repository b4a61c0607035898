"""One rank that trains until something ends it. `FAST`, `NODES` and `LOST_AFTER` change how the watch looks at it."""

import os
import sys
import time
from pathlib import Path

import torch

import fullshard.runtime as xr
from fullshard.config.errors import UserError
from fullshard.distributed import processes
from fullshard.distributed.watchdog import heartbeat, investigate, rank_state, threads, watch
from fullshard.fsdp import FSDPv2
from tests.fsdp.programs import Block, Stack, mesh_for

how, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
heartbeat.LOST_AFTER = float(os.environ.get("LOST_AFTER", heartbeat.LOST_AFTER))
if os.environ.get("FAST"):
    heartbeat.BEAT, heartbeat.SILENT_AFTER, investigate.REPORT_AFTER, threads.POLL = 0.1, 0.6, 1.0, 0.1
    investigate.REPEAT_AFTER = 1e9
if os.environ.get("NODES") == "several":
    processes.node_id = lambda: f"node {rank}".replace(" ", "-")  # process numbers say nothing of other ranks then


class Never:
    """A work that is never done."""

    def is_completed(self) -> bool:
        return False


xr.use_spmd()
model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
steps = 0
try:
    while steps < 100_000:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if rank_state.current.failure is not None:
            print("STEPPED AFTER", rank_state.current.failure, flush=True)
        if steps > 20:
            with open(folder / f"ready-{rank}", "a") as file:
                file.write(".")
            if how == "exit" and rank == 1:
                sys.exit(0)
            if how == "late" and rank == 2:
                time.sleep(60)
            if how == "device" and rank == 0:
                # As on NCCL: the operation is issued, and the host is held up elsewhere, in a wait that nothing ends.
                follower = model._fullshard_engine.context.gather_link.watch
                watch.at(steps + 1, "", "gather")
                follower.follow(follower.issue(), [Never()])
                time.sleep(100)
            if how == "device":
                time.sleep(100 if os.environ.get("STAYS") else 0)
                sys.exit(0)
        time.sleep(0.02)
except UserError as error:
    print("RAISED", time.time(), error, flush=True)
    sys.exit(error.exit_code)
