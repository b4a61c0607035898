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

from fullshard.checkpoint import json_tree
from fullshard.checkpoint.objects import RestorePlan, StateDescription
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime

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

    def read() -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
        """The states of Python, numpy, torch and the device."""
        state = json_tree.decode(data, lambda ref: tensors[ref["name"]])
        python, numpy = state["python"], state["numpy"]
        words = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        device, _ = runtime.generator_state()
        return words, (numpy["kind"], numpy["keys"], *numpy["rest"]), state["torch"].cpu(), state.get(device)

    def try_to_set() -> None:
        """Set the state of other generators of the same kinds."""
        python, numpy, host, device = read()
        _, now = runtime.generator_state()
        try:
            random.Random().setstate(python)
            np.random.RandomState().set_state(numpy)
            torch.Generator().set_state(host)
            fits = 0 <= numpy[2] <= len(numpy[1])  # numpy would read beyond its state
            fits &= python[2] is None or isinstance(python[2], float)
            if device is not None and isinstance(now, torch.Tensor):
                fits &= (device.dtype, device.shape) == (now.dtype, now.shape)
        except (ValueError, TypeError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
            raise CheckpointError(f"the random state in the checkpoint cannot be used ({error})") from error
        if not fits:
            raise CheckpointError("the random state in the checkpoint cannot be used: it is out of range")

    def finish() -> None:
        python, numpy, host, device = read()
        if derived:
            words = hashlib.sha256(host.numpy().tobytes() + f"/{me}".encode()).digest()
            runtime.seed(int.from_bytes(words[:7], "little"))
            return
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if device is not None:
            runtime.set_generator_state(device)

    plan.trials.append(try_to_set)
    plan.finish.append(finish)
