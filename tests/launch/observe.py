"""Runs a script as the launcher would and writes down, on rank 0, what the engine was really told.

observe.py FACTS.json SCRIPT ARGUMENTS…
"""

import json
import os
import runpy
import sys

facts_path, script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]

from fullshard.fsdp import build  # noqa: E402
from fullshard.parallel.settings import EngineSettings, resolved_launch  # noqa: E402

seen = {}
plain = build.assemble


def observed(root, options, *rest):
    plain(root, options, *rest)
    seen.update(
        strategy=options.strategy.name,
        units=[unit.plan.module for unit in root._fullshard_engine.units],
        offload=options.cpu_offload,
        forward_prefetch=root._fullshard_engine.settings.forward_prefetch,
        backward_prefetch=root._fullshard_engine.settings.backward_prefetch.name,
        computes_in=str(options.precision.param_dtype),
        stored_in=sorted({str(p.dtype) for p in root.parameters()}),
        mesh=dict(options.mesh.shape()),
        device=root._fullshard_engine.units[0].parameters[0].local.device.type,
    )


build.assemble = observed
runpy.run_path(script, run_name="__main__")
if os.environ.get("RANK", "0") == "0":
    seen["saved_as"] = EngineSettings.from_environment().saved_as
    seen["resolved"] = resolved_launch()
    with open(facts_path, "w") as file:
        json.dump(seen, file)
