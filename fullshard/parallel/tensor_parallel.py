"""Tensor parallelism of a model: layouts, borders and the trial, applied before FSDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.distributed.autograd_collectives import RankGroup, group_of
from fullshard.distributed.ranks import on_rank_0
from fullshard.fsdp.local_axes import compute_with_slices
from fullshard.models.causal_lm import get_causal_lm
from fullshard.parallel.tensor_borders import install_borders
from fullshard.parallel.tensor_plan import AXIS, Exchange, check_sizes, exchanges, split_layers, split_parameters
from fullshard.parallel.tensor_trial import TensorVerdict, generic, try_plan
from fullshard.spmd.mesh import Mesh, VirtualMesh

SPLIT = "_fullshard_exchanges"


def split_model(
    model: nn.Module, mesh: Mesh, changes: Mapping[str, str] | None = None, *, tables: bool = True,
    say: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Split a model along `tp` of a mesh: annotate its parameters for `FSDPv2` and put borders around its layers. All
    ranks of a mesh that exists must call it. Without `tables`, embedding and head stay whole; `say` is called with a
    line about what could not be tried."""
    size, absent = mesh.shape()[AXIS], isinstance(mesh, VirtualMesh)
    layers = split_layers(model, changes, tables=tables)
    check_sizes(model, layers, size)

    def trial() -> TensorVerdict:
        return try_plan(model, changes, tables=tables)

    verdict = trial() if absent else on_rank_0(trial, "trial of tensor parallelism")
    name = type(get_causal_lm(model)).__name__
    if verdict.reason and verdict.tried:
        raise ConfigError(
            f"tp_size {size}: on a small {name}, two ranks compute something else than one: {verdict.reason}. Give the "
            f"model's layers other styles with tp_plan, or use tp_size 1"
        )
    if verdict.reason:
        (say or runtime.get_logger().warning)(
            f"tensor parallelism: the plan of {name} could not be tried ({verdict.reason}); it is applied as it is"
        )
    for one in layers:
        for split in split_parameters(one):
            spec = [AXIS if dim == split.dim else None for dim in range(split.parameter.ndim)]
            compute_with_slices(split.parameter, mesh, spec, (AXIS,) if split.terms else ())
    for path, parameter in get_causal_lm(model).named_parameters():
        if generic(path.replace(".base_layer.", ".")) in verdict.terms:
            compute_with_slices(parameter, mesh, None, (AXIS,))
    if not hasattr(model, SPLIT):  # a plan may be made again, for another mesh
        install_borders(layers, RankGroup("", size, 0) if absent else group_of(mesh.get_group(AXIS)))
        setattr(model, SPLIT, exchanges(layers))


def exchanges_of(model: nn.Module) -> dict[str, Exchange]:
    """What the ranks exchange at the borders of a model's layers; nothing for one that is not split."""
    found: dict[str, Exchange] = getattr(model, SPLIT, {})
    return found
