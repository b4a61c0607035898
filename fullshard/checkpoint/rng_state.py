"""The random number generators of every rank: Python's, numpy's, torch's on the CPU and on the device.

With the same number of ranks, each rank gets its own state back. With another number, generators that were the same on
all ranks stay the same; where they differed, additional ranks get states derived from the saved ones, the same at every
resume. The generator of a GPU and that of XLA devices have nothing in common: resuming on the other engine restores the
host's generators, and leaves the device's as the program has seeded it.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from fullshard import runtime
from fullshard.checkpoint import json_tree
from fullshard.checkpoint.objects import RestorePlan, StateDescription

NAME = "rng"


def describe_rng(description: StateDescription) -> None:
    """Describe this rank's generators."""
    device, device_state = runtime.generator_state()
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {"kind": kind, "keys": np.asarray(keys), "rest": (int(position), int(has_gauss), float(cached))},
        "torch": torch.get_rng_state(),
        device: device_state,
    }
    description.entries[NAME] = {"kind": NAME, "value": json_tree.encode(state, description.put, NAME)}


def prepare_rng(plan: RestorePlan, entry: dict[str, Any]) -> None:
    """Plan to restore the generators."""
    saved, world, me = plan.manifest.world_size, runtime.world_size(), runtime.rank()
    differed = "ranks" in entry or any(name.startswith(f"{NAME}/") for name in plan.manifest.per_rank)
    data = entry["ranks"][me % saved] if "ranks" in entry else entry["value"]
    tensors = {}
    for ref in json_tree.tensor_refs(data):
        tensors[ref["name"]] = plan.make(ref, None, None)
    derived = differed and me >= saved
    if differed and world != saved:
        runtime.warn_once(
            "rng on another number of ranks",
            f"the checkpoint was saved on {saved} ranks with different random states; on {world} ranks the first "
            f"{min(saved, world)} are restored"
            + (", additional ranks get states derived from them" if world > saved else ", the others are dropped"),
        )

    def finish() -> None:
        state = json_tree.decode(data, lambda ref: tensors[ref["name"]])
        if derived:
            words = hashlib.sha256(state["torch"].numpy().tobytes() + f"/{me}".encode()).digest()
            runtime.seed(int.from_bytes(words[:7], "little"))
            return
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state((numpy["kind"], numpy["keys"], *numpy["rest"]))
        torch.set_rng_state(state["torch"].cpu())
        device, _ = runtime.generator_state()
        if state.get(device) is not None:
            runtime.set_generator_state(state[device])

    plan.finish.append(finish)
