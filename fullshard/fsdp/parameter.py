"""One parameter of a unit: its shard, and the gathered value that modules compute with.

Between passes a module holds the shard, a `DTensor` that optimizers and checkpoints understand. While its unit runs,
the module holds the gathered value: one leaf tensor for the parameter's whole life, whose memory is allocated and
released. Tensors that autograd saved for backward point into that memory, so they are valid again once it is filled
again. What happens to the leaf's gradient is in `gradients.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fullshard.config.errors import FSDPError
from fullshard.device import accelerator
from fullshard.device.torch_private import (
    DTensorSpec,
    TensorMeta,
    foreach_copy_,
    local_of,
    parameters_of,
    set_local,
    set_parameters,
    spec_of,
    version_of,
    versions_of,
)
from fullshard.distributed import runtime
from fullshard.fsdp.host_embedding import HostTable
from fullshard.fsdp.plan import ParameterPlan
from fullshard.fsdp.plan_model import Site
from fullshard.fsdp.strategy import dtype_of
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.redistribute import torch_layout
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import ShardedTensor, is_sharded

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


def copy_together(copies: Sequence[Copy]) -> None:
    """Make several copies at once: contiguous ones of the same dtypes take a single launch on a GPU."""
    by_kind: dict[Any, list[Copy]] = {}
    for target, source in copies:
        kind = (target.dtype, source.dtype, target.is_contiguous() and source.is_contiguous())
        by_kind.setdefault(kind, []).append((target, source))
    for same in by_kind.values():
        foreach_copy_([target for target, _ in same], [source for _, source in same])


class ShardedParameter:
    """A parameter that is stored sharded and gathered while its unit runs."""

    def __init__(
        self,
        plan: ParameterPlan,
        shard: nn.Parameter,
        sites: list[Site],
        mesh: Mesh,
        data_axes: tuple[str, ...],
        module_spec: DTensorSpec | None = None,
    ):
        self.plan = plan
        self.shard = shard
        self.sites = sites
        self.dtype = torch.float32
        """The dtype of the gathered value."""
        self.stored_dtype = self.reduce_dtype = torch.float32
        """The dtypes of the shard and of the sum of gradients, as planned."""
        self.layout = Layout.of(mesh, plan.spec, plan.shape)
        fsdp = mesh.get_axis_name_idx("fsdp")
        kept = tuple(tuple(axis for axis in axes if axis != fsdp) for axes in self.layout.dims)
        self.gathered_layout = Layout(mesh, kept)
        self.data_axes = {mesh.get_axis_name_idx(axis) for axis in data_axes}
        cuts = self.gathered_layout.slices(plan.shape, runtime.rank())
        self.whole = tuple(cut.stop - cut.start for cut in cuts)
        """The shape of the gathered value on this rank."""
        self.piece = tuple(-(-n // plan.parts) if dim == plan.dim else n for dim, n in enumerate(self.whole))
        """The shape of one rank's piece of it, padded."""
        self.full: nn.Parameter | None = None
        self._allocated = 0
        """Bytes of the gathered value's own memory."""
        self.full_global: nn.Parameter | None = None
        self.on_gradient: Callable[[], None] = lambda: None
        """Called when backward has accumulated into the gathered value's gradient."""
        self.view: Any = None
        """What the module's attribute shows instead of the gathered value: what its `see_gathered` returned, or a table
        that stays in host memory."""
        self.module_spec = module_spec
        """The layout in which its module computes with it, if torch's own means made it a `DTensor` on other axes than
        those of the data (`parallelize_module`)."""
        self._refuse_plain_tensors()
        self.follow(plan)

    @property
    def splits_module(self) -> bool:
        """Whether its module computes with a part of it on each rank, split along other axes than those of the data."""
        return self.module_spec is not None or bool(self.plan.local_axes)

    # --- the shard ----------------------------------------------------------------------------------------------------

    def shard_for(self, plan: ParameterPlan, mesh: Mesh) -> nn.Parameter:
        """The shard, for a parameter tied to this one in a module that is wrapped alone as well."""
        alike = dataclasses.replace(plan, names=self.plan.names) == self.plan
        if not alike or mesh != self.layout.mesh:
            raise FSDPError(
                f"{plan.name} is tied to {self.plan.name} of a module that was wrapped with another mesh, strategy, "
                f"precision or offload; wrap both alike, or only the module around both"
            )
        return self.shard

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return local_of(self.shard)

    @property
    def is_meta(self) -> bool:
        """Whether the shard has no memory yet."""
        return self.local.is_meta

    @property
    def local_numel(self) -> int:
        """The number of values of the parameter that this process holds."""
        return self.local.numel()

    staged_bytes = 0
    """Bytes of host memory that `parts` takes."""

    def parts(self, keep: bool = False) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
        """The shards of this process, to read and write: which part of the parameter each is, and its memory.

        On XLA, where a process has several, the memory is the host's: with `keep` it has the present values, and
        `written` moves it to the devices.
        """
        return [(self.layout.slices(self.plan.shape, runtime.rank()), self.local.detach())]

    def written(self) -> None:
        """To be called once the memory of `parts` has new values."""

    def follow(self, plan: ParameterPlan) -> None:
        """Apply a new plan. Another compute dtype means a new gathered value, so it must not be gathered now."""
        dtype = _dtype(plan.compute_dtype)
        if plan.on_host and plan.trainable:
            raise FSDPError(
                f"parameter {plan.name} is kept in host memory (offload_embedding), where it cannot be trained; freeze "
                f"it, or set offload_embedding to false"
            )
        self.plan = plan
        self.stored_dtype, self.reduce_dtype = _dtype(plan.dtype), _dtype(plan.reduce_dtype)
        if dtype != self.dtype:
            self.dtype, self.full, self.full_global, self.view = dtype, None, None, None
        for leaf in (self.full, self.full_global):
            if leaf is not None:
                leaf.requires_grad_(plan.trainable)

    def adopt(self) -> bool:
        """Pick up changes made to the shard from outside (`to_empty`, `load_state_dict`, freezing, casts); returns
        whether it now differs from the plan."""
        module, name = self.sites[0]
        current = parameters_of(module).get(name)
        if current is None:
            raise FSDPError(
                f"parameter {self.plan.name} was removed after the module was wrapped (set to None, pruned, or "
                f"replaced by a parametrization); change modules before FSDPv2(…)"
            )
        if all(current is not one for one in (self.shard, self.full, self.full_global)):
            if not is_sharded(current) or current.shape != self.shard.shape:
                raise FSDPError(
                    f"parameter {self.plan.name} was replaced by a {type(current).__name__} of shape "
                    f"{tuple(current.shape)}; expected a DTensor of shape {self.plan.shape}. Load values with "
                    f"load_state_dict, or replace parameters before wrapping the module"
                )
            if torch.is_grad_enabled() and current.requires_grad and not current.is_leaf:
                raise FSDPError(
                    f"parameter {self.plan.name} was replaced by a value computed from others "
                    f"(torch.func.functional_call with values that need gradients): gradients would stop at the "
                    f"gathered value instead of flowing back to them. Call it with detached values, or compute them "
                    f"inside the module's forward (torch.nn.utils.parametrize)"
                )
            self.shard = current
            for other, other_name in self.sites[1:]:
                parameters_of(other)[other_name] = current
        self._refuse_plain_tensors()
        # In a pass without gradients it does not matter what trains, and the backward of an earlier pass may still need
        # the plan as it was: an adapter is often disabled for such a pass and enabled again before backward.
        frozen_or_freed = self.shard.requires_grad != self.plan.trainable and torch.is_grad_enabled()
        return frozen_or_freed or self.shard.dtype != self.stored_dtype

    def _refuse_plain_tensors(self) -> None:
        """Mark a shard of our own class: it treats plain tensors as global ones, but a rank's activations are not."""
        if isinstance(self.shard, ShardedTensor):
            self.shard.meets_no_plain = self.plan.name

    def give_memory(self) -> None:
        """Allocate uninitialized memory for a shard that was created on the meta device."""
        if self.local.is_meta:
            assert is_sharded(self.shard)
            if self.plan.in_host_memory:
                local = accelerator.host_memory(self.local.shape, self.local.dtype)
            else:
                local = torch.empty_like(self.local, device=runtime.device())
            new = nn.Parameter(
                type(self.shard)(local, spec_of(self.shard), requires_grad=False), self.shard.requires_grad
            )
            torch.utils.swap_tensors(self.shard, new)  # the same object: an optimizer may hold it already

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def is_copy(self) -> bool:
        """Whether the gathered value has memory of its own now, and is a copy of a shard that this rank holds whole."""
        return self._allocated > 0 and not self.plan.gathers

    @property
    def shares(self) -> bool:
        """Whether the shard itself is the gathered value: nothing is split, cast or moved."""
        if self.plan.on_host:
            return True
        return self.plan.parts == 1 and self.local.dtype == self.dtype and self.local.device == runtime.device()

    @property
    def nbytes(self) -> int:
        """The bytes of the gathered value."""
        return math.prod(self.whole) * self.dtype.itemsize

    def allocate(self) -> int:
        """Allocate the memory of the gathered value, unless it was kept; returns by how many bytes it has grown."""
        shares, before = self.shares, self._allocated
        self._allocated = 0 if shares else self.nbytes
        if self.full is None:
            with torch.inference_mode(False):  # it outlives the pass that creates it, and trains
                data = (
                    self.local.detach()
                    if shares
                    else torch.empty(self.whole, dtype=self.dtype, device=runtime.device())
                )
                self.full = self._leaf(data)
        elif shares:
            if self.full.data_ptr() != self.local.data_ptr() or self.full.device != self.local.device:
                self.full.data = self.local.detach()
        elif not before:
            self.full.untyped_storage().resize_(self.nbytes)
        if self.plan.on_host and (self.view is None or self.view.rows is not self.full):
            self.view = HostTable(self.full, self.dtype, runtime.device())
        return self._allocated - before

    def _leaf(self, data: torch.Tensor) -> nn.Parameter:
        """The leaf tensor that modules compute with."""
        leaf = nn.Parameter(data, requires_grad=data.is_floating_point())  # packed values are integers
        if leaf.requires_grad:
            # Python's garbage collector cannot see autograd's hooks: a hook that held the parameter would leak it.
            this = weakref.ref(self)
            leaf.register_post_accumulate_grad_hook(lambda _: None if (p := this()) is None else p.on_gradient())
        return leaf.requires_grad_(self.plan.trainable)  # not the shard: an adapter may be disabled for this pass

    def free(self) -> int:
        """Release the memory of the gathered value; returns the number of bytes released."""
        released, self._allocated = self._allocated, 0
        if released and self.full is not None:
            self.full.untyped_storage().resize_(0)
        return released

    # --- gathering ----------------------------------------------------------------------------------------------------

    def source(self, from_host: bool) -> torch.Tensor:
        """This rank's piece as it is sent: contiguous, in the dtype of the gathered value.

        Where pieces are sent from host memory anyway (`from_host`), a shard in host memory stays there.
        """
        local = self.local.detach() if from_host else self.on_device()
        return local.to(dtype=self.dtype).contiguous()

    def on_device(self) -> torch.Tensor:
        """The shard on the device, not cast yet: a cast on the host would make a copy that is not page-locked, and
        the host would have to wait for it."""
        return self.local.to(runtime.device(), non_blocking=True)

    def pack(self, slot: torch.Tensor) -> list[Copy]:
        """The copies that put this rank's piece, padded, into its slot (bytes) of the unit's bucket."""
        local = self.on_device()
        target = slot[: math.prod(self.piece) * self.dtype.itemsize].view(self.dtype).view(self.piece)
        assert self.plan.dim is not None
        if local.shape != target.shape:
            target = target.narrow(self.plan.dim, 0, local.shape[self.plan.dim])
        return [(target, local)]

    def unpack(self, slots: torch.Tensor) -> list[Copy]:
        """The copies that assemble the gathered value from all ranks' pieces (rows of bytes)."""
        assert self.full is not None
        if not self.full.numel():
            return []
        pieces = slots[:, : math.prod(self.piece) * self.dtype.itemsize].view(self.dtype).view(-1, *self.piece)
        return self.blocks(self.full.data, pieces)

    def blocks(self, whole: torch.Tensor, pieces: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal shape, a part of the whole value and its pieces: all full pieces, then the partial one."""
        dim = self.plan.dim
        assert dim is not None
        if not pieces.numel():
            return []
        size = self.piece[dim]
        count, rest = divmod(self.whole[dim], size)
        filled = whole.narrow(dim, 0, count * size) if rest else whole
        blocks = [(filled.unflatten(dim, (count, size)), pieces[:count].movedim(0, dim))] if count else []
        if rest:
            blocks.append((whole.narrow(dim, count * size, rest), pieces[count].narrow(dim, 0, rest)))
        return blocks

    # --- what modules hold --------------------------------------------------------------------------------------------

    def show_shard(self) -> None:
        """Let modules hold the shard."""
        show_shards([self])

    def as_global(self) -> nn.Parameter:
        """The gathered value as a global tensor: replicated along `fsdp`, split as annotated along other axes. One that
        is tensor-parallel by torch's own means is torch's `DTensor` on those axes."""
        assert self.full is not None
        if self.full_global is None:
            stride = torch.empty(self.plan.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(self.plan.shape), stride, self.dtype)
            if self.module_spec is None:
                kind, (mesh, placements) = ShardedTensor, torch_layout(self.gathered_layout, self.plan.shape)
            else:
                kind, mesh, placements = DTensor, self.module_spec.mesh, self.module_spec.placements
            with torch.inference_mode(False):
                spec = DTensorSpec(mesh, placements, tensor_meta=meta)
                self.full_global = self._leaf(kind(self.full.data, spec, requires_grad=False))
        assert is_sharded(self.full_global)
        if local_of(self.full_global).data_ptr() != self.full.data_ptr():
            set_local(self.full_global, self.full.data)
        return self.full_global


def show_gathered(parameters: Sequence[ShardedParameter], as_global: bool) -> None:
    """Let modules hold the gathered values."""
    values = [(p.as_global() if as_global or p.module_spec is not None else p.full, p) for p in parameters]
    set_parameters([(module, name, value) for value, p in values for module, name in p.sites])
    for p in parameters:
        if p.view is not None:
            for module, name in p.sites:
                module.__dict__[name] = p.view  # Python finds this before it looks for parameters


def show_shards(parameters: Sequence[ShardedParameter]) -> None:
    """Let modules hold the shards."""
    set_parameters([(module, name, p.shard) for p in parameters for module, name in p.sites])
    for p in parameters:
        if p.view is not None:
            for module, name in p.sites:
                module.__dict__.pop(name, None)


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    assert dtype is not None
    return dtype


# --- write counts -----------------------------------------------------------------------------------------------------
# A gathered or loaded value is out of date once its parameter's count has changed. torch counts writes to a tensor, but
# not those of multi-tensor optimizers (`foreach`, `fused`) to sharded tensors, so optimizer steps are added to its
# count. Writes into `.data`, and direct calls of multi-tensor operators, are not detected.


def writes_of(shard: torch.Tensor) -> tuple[int, int]:
    """A value that changes with every write, counted from the first call in the process."""
    _count_steps()
    # Operators on a sharded tensor change its own version only; those on its local tensor change only that version.
    return version_of(shard), version_of(piece_of(shard))


def writes_of_all(shards: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """The same of several sharded tensors; it changes if one is replaced, too."""
    _count_steps()
    return versions_of(shards)


def piece_of(shard: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor that has this rank's values."""
    return local_of(shard) if is_sharded(shard) else shard


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version([p for p in group["params"] if p.grad is not None and is_sharded(p)])
