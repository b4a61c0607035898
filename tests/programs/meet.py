"""Under a launcher: each rank writes down what the runtime tells it, and what it drew at random."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard.runtime as xr

torch.manual_seed(100 + int(os.environ["RANK"]))
before = xr.rank(), xr.world_size(), xr.is_spmd()
xr.use_spmd()
xr.use_spmd()
xr.get_logger().info("info from all")
xr.get_logger("louder", all_ranks=True).info("info asked of all")
xr.warn_once("k", "warned once")
xr.warn_once("k", "warned once")
xr.print0("printed by one")
xr.print_rank("printed by each")
facts = {
    "before": before,
    "now": (xr.rank(), xr.world_size(), xr.is_spmd()),
    "local": (xr.local_rank(), xr.local_world_size(), xr.node_count()),
    "aliases": (xr.global_runtime_device_count(), xr.global_device_count(), xr.process_index(), xr.process_count()),
    "main": xr.is_main(),
    "device": str(xr.xla_device()),
    "backend": dist.get_backend(),
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    "drawn": torch.rand(2).tolist(),
}
xr.seed(3)
facts["seeded"] = torch.rand(1).item()
xr.seed(3, per_rank=True)
facts["seeded per rank"] = torch.rand(1).item()
xr.barrier()
xr.shutdown()
xr.shutdown()
facts["after"] = xr.is_spmd(), dist.is_initialized()
xr.use_spmd()  # a second start in the same processes
total = torch.ones(1)
dist.all_reduce(total)
facts["total"] = total.item()
Path(sys.argv[1], f"{xr.rank()}.json").write_text(json.dumps(facts))
