"""The random number generators of every rank: Python's, numpy's, torch's on the CPU and on the GPU.

With the same number of ranks, each rank gets its own state back. With another number, generators that were the same on
all ranks stay the same; where they differed, additional ranks get states derived from the saved ones, the same at every
resume.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from fullshard import accelerator, runtime
from fullshard.checkpoint import json_tree
from fullshard.checkpoint.objects import RestorePlan, StateDescription

NAME = "rng"


def describe_rng(description: StateDescription) -> None:
    """Describe this rank's generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {"kind": kind, "keys": np.asarray(keys), "rest": (int(position), int(has_gauss), float(cached))},
        "torch": torch.get_rng_state(),
    }
    if (own := accelerator.rng_state(runtime.device())) is not None:
        state[runtime.device().type] = own
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
        own = state.get(runtime.device().type)  # absent in a checkpoint from another type of device
        if own is not None:
            accelerator.set_rng_state(runtime.device(), own)

    plan.finish.append(finish)
