"""Export of a model's 4-bit weights in bitsandbytes' format, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.device.torch_private import local_of, spec_of
from fullshard.distributed import runtime
from fullshard.quant import bnb_format, sharded_groups
from fullshard.quant.experts import NF4Experts
from fullshard.quant.linear import NF4Linear
from fullshard.spmd.redistribute import replicated
from fullshard.spmd.tensor import is_sharded, redistributed


def model_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield (layer name, tensors under bitsandbytes' keys) for each 4-bit weight; experts separately, as
    `….experts.down_proj.3`.

    All ranks of a sharded model must iterate together. Only one packed weight is gathered at a time.
    """
    for name, module in model.named_modules():
        if isinstance(module, NF4Linear):
            parts = {part: whole(value) for part, value in module.parts.items()}
            packed, state = sharded_groups.to_state(parts, module.shape, module.scheme, module.dtype)
            yield name, bnb_format.to_tensors(packed, state, f"{name}.weight")
        elif isinstance(module, NF4Experts):
            for own, (count, *matrix) in module.fused.items():
                parts, shape = {part: whole(value) for part, value in module.parts(own).items()}, tuple(matrix)
                for i in range(count):
                    one = sharded_groups.matrix_of(parts, i, shape, module.scheme)
                    packed, state = sharded_groups.to_state(one, shape, module.scheme, module.dtype)
                    yield f"{name}.{own}.{i}", bnb_format.to_tensors(packed, state, f"{name}.{own}.{i}")


def whole(value: torch.Tensor) -> torch.Tensor:
    """All rows of a part, gathered if it is sharded."""
    value = value.detach()
    if not is_sharded(value):
        return value
    if local_of(value).device != runtime.device():
        value = DTensor(local_of(value).to(runtime.device()), spec_of(value), requires_grad=False)
    return local_of(redistributed(value, value.device_mesh, replicated(value.device_mesh)))
