"""Local axes: axes of the mesh along which each rank's modules compute with their own slice of a parameter.

Along `fsdp` the engine gathers what a module computes with; along a local axis it does not. The slice is a plain
tensor, and modules exchange activations along that axis themselves (tensor and expert parallelism). The sharded
parameter has all axes in its layout, as any other: optimizers, clipping and checkpoints see one global value. All ranks
along a local axis must compute with the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from fullshard.config.errors import LayoutError
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout, PartitionSpec


class LocalAxes(NamedTuple):
    """How a parameter meets the local axes of its mesh."""

    split: tuple[str, ...] = ()
    """The axes that split it."""
    summed: tuple[str, ...] = ()
    """The axes along which each rank has a term of its gradient, and the sum is the gradient."""


def compute_with_slices(
    parameter: nn.Parameter, mesh: Mesh, spec: PartitionSpec | None = None, sums_over: Sequence[str] = ()
) -> None:
    """Annotate a parameter, before `FSDPv2`: its module computes with this rank's slice of `spec`.

    `spec` names local axes only; FSDP adds its own. Without one, every rank has the whole value. Where each rank of
    an axis computes only a term of its gradient (it works on this rank's heads, or on this rank's part of a sum), name
    that axis in `sums_over`. Otherwise ranks along an axis that does not split it must compute equal gradients.
    """
    layout = Layout.of(mesh, spec if spec is not None else (None,) * parameter.ndim, parameter.shape)
    names = mesh.axis_names or ()
    split = tuple(names[axis] for axes in layout.dims for axis in axes)
    twice = sorted({"fsdp", "replica"}.intersection((*split, *sums_over)) | set(split).intersection(sums_over))
    if twice:
        raise LayoutError(
            f"a parameter of shape {tuple(parameter.shape)} with {layout.spec} and sums_over={tuple(sums_over)}: "
            f"{', '.join(twice)} splits the rows of the batch, or is named twice; name each local axis once"
        )
    for dim in range(parameter.ndim):
        if parameter.shape[dim] % layout.parts(dim):
            raise LayoutError(
                f"a parameter of shape {tuple(parameter.shape)} with {layout.spec} on {mesh}: expected a size "
                f"that {layout.parts(dim)} divides, because modules compute with slices of equal size; it is "
                f"{parameter.shape[dim]}"
            )
    if split:
        parameter._fullshard_layout = layout
    parameter._fullshard_local = LocalAxes(split, tuple(sums_over))


def local_axes_of(parameter: torch.Tensor) -> LocalAxes:
    """The annotation of a parameter; that of one without any is empty."""
    axes: LocalAxes = getattr(parameter, "_fullshard_local", LocalAxes())
    return axes


def forget_slices(parameter: nn.Parameter) -> None:
    """Remove the annotation of a parameter, for another plan."""
    for name in ("_fullshard_layout", "_fullshard_local"):
        vars(parameter).pop(name, None)


def slice_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape that its module computes with."""
    layout: Layout | None = getattr(parameter, "_fullshard_layout", None)
    if layout is None or not local_axes_of(parameter).split:
        return parameter.shape
    return torch.Size(layout.shard_shape(parameter.shape))


def copy_local_axes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Annotate a parameter that replaces another one."""
    if hasattr(source, "_fullshard_local"):
        target._fullshard_local = local_axes_of(source)
