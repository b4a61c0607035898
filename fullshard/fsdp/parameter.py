"""One parameter of a unit: its shard at rest, and the gathered value that modules compute with.

At rest a module holds the shard, a `DTensor` that optimizers and checkpoints understand. While its unit runs, the
module
holds the gathered value: one leaf tensor for the parameter's whole life, whose memory comes and goes. What autograd
saved
for backward points into that memory, so it is right again once the memory is filled again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard import accelerator, runtime
from fullshard.errors import FSDPError
from fullshard.fsdp.no_sync_grads import HeldGradient
from fullshard.fsdp.offload import HostTraffic
from fullshard.fsdp.plan import ParameterPlan
from fullshard.fsdp.strategy import dtype_of
from fullshard.fsdp.write_count import writes_of
from fullshard.spmd.mesh import Mesh, origin
from fullshard.spmd.redistribute import torch_layout
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import ShardedTensor, is_sharded, redistributed
from fullshard.torch_private import (
    DTensorSpec,
    TensorMeta,
    backward_hooks,
    foreach_copy_,
    local_of,
    parameters_of,
    post_accumulate_hooks,
    set_local,
    spec_of,
)

Site = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""
Copy = tuple[torch.Tensor, torch.Tensor]
"""Where to, and what."""


def carry_out(copies: Sequence[Copy]) -> None:
    """Make copies together: plain runs of memory of one dtype take a single launch on a GPU."""
    alike: dict[Any, list[Copy]] = {}
    for target, value in copies:
        kind = (target.dtype, value.dtype, target.is_contiguous() and value.is_contiguous())
        alike.setdefault(kind, []).append((target, value))
    for some in alike.values():
        foreach_copy_([target for target, _ in some], [value for _, value in some])


class ShardedParameter:
    """A parameter that is sharded at rest and gathered to be used."""

    def __init__(
        self,
        plan: ParameterPlan,
        shard: nn.Parameter,
        sites: list[Site],
        mesh: Mesh,
        data_axes: tuple[str, ...],
        offloaded: bool = False,
    ):
        self.plan = plan
        self.shard = shard
        self.sites = sites
        self.dtype = torch.float32
        """Of the gathered value."""
        self.layout = Layout.of(mesh, plan.spec, plan.shape)
        fsdp = mesh.get_axis_name_idx("fsdp")
        kept = tuple(tuple(axis for axis in axes if axis != fsdp) for axes in self.layout.dims)
        self.gathered_layout = Layout(mesh, kept)
        self._data_axes = {mesh.get_axis_name_idx(axis) for axis in data_axes}
        cuts = self.gathered_layout.slices(plan.shape, runtime.rank())
        self.whole = tuple(cut.stop - cut.start for cut in cuts)
        """The shape of the gathered value on this rank."""
        self.piece = tuple(-(-n // plan.parts) if dim == plan.dim else n for dim, n in enumerate(self.whole))
        """The shape of a piece of it, padded."""
        self.full: nn.Parameter | None = None
        self.full_global: nn.Parameter | None = None
        self._gathered_at: Any = None
        """The shard's writes when it was last gathered."""
        self.on_gradient: Callable[[], None] = lambda: None
        """Called when backward has added to the gathered value's gradient."""
        self.view: Any = None
        """What the module sees instead of the gathered value, if it has its own way of seeing it."""
        self.offloaded = offloaded
        """Whether the shard lies on the host."""
        self._keep_alone()
        self.follow(plan)

    # --- at rest ------------------------------------------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        assert is_sharded(self.shard)
        return local_of(self.shard)

    def follow(self, plan: ParameterPlan) -> None:
        """Follow a plan; the gathered value of another dtype is another one. Not while it is gathered."""
        dtype = dtype_of(plan.compute_dtype)
        assert dtype is not None
        self.plan = plan
        if dtype != self.dtype:
            self.dtype, self.full, self.full_global, self.view = dtype, None, None, None
        for leaf in (self.full, self.full_global):
            if leaf is not None:
                leaf.requires_grad_(plan.trainable)

    def adopt(self) -> bool:
        """Take note of what was done to the shard from outside (`to_empty`, `load_state_dict`, freezing, casts);
        whether it differs from the plan now."""
        module, name = self.sites[0]
        current = parameters_of(module).get(name)
        if current is None:
            raise FSDPError(
                f"parameter {self.plan.name} was removed after the module was wrapped (set to None, pruned, or "
                f"replaced by a parametrization); change modules before FSDPv2(…)"
            )
        if current is not self.shard and current is not self.full:
            if not is_sharded(current) or current.shape != self.shard.shape:
                raise FSDPError(
                    f"parameter {self.plan.name} was replaced by a {type(current).__name__} of shape "
                    f"{tuple(current.shape)}; "
                    f"expected a DTensor of shape {self.plan.shape}. Load values with load_state_dict, or replace "
                    f"parameters before wrapping the module"
                )
            if torch.is_grad_enabled() and current.requires_grad and not current.is_leaf:
                raise FSDPError(
                    f"parameter {self.plan.name} stands for a value computed from others (torch.func.functional_call "
                    f"with values that need gradients): gradients would end at the gathered value instead of flowing "
                    f"back to them. Call it with detached values, or compute them inside the module's forward "
                    f"(torch.nn.utils.parametrize)"
                )
            self.shard = current
            for other, other_name in self.sites[1:]:
                parameters_of(other)[other_name] = current
        self._keep_alone()
        return self.shard.requires_grad != self.plan.trainable or self.shard.dtype != dtype_of(self.plan.dtype)

    def _keep_alone(self) -> None:
        """Where a shard is of our class, which takes plain tensors for global ones: not what each rank computes."""
        if isinstance(self.shard, ShardedTensor):
            self.shard.meets_no_plain = self.plan.name

    def give_memory(self) -> None:
        """Give a shard that was planned on the meta device its memory where it lies at rest, without values yet."""
        if self.local.is_meta:
            assert is_sharded(self.shard)
            if self.offloaded:
                local = accelerator.host_memory(self.local.shape, self.local.dtype)
            else:
                local = torch.empty_like(self.local, device=runtime.device())
            new = nn.Parameter(
                type(self.shard)(local, spec_of(self.shard), requires_grad=False), self.shard.requires_grad
            )
            torch.utils.swap_tensors(self.shard, new)  # the same object: an optimizer may hold it already

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        """Whether the shard is the gathered value: nothing is split, cast or moved."""
        return self.plan.parts == 1 and self.local.dtype == self.dtype and self.local.device == runtime.device()

    @property
    def nbytes(self) -> int:
        return math.prod(self.whole) * self.dtype.itemsize

    def allocate(self) -> int:
        """Give the gathered value its memory; the number of bytes that took."""
        shares = self.shares
        if self.full is None:
            with torch.inference_mode(False):  # it will outlive the pass it is first needed in, and train
                data = (
                    self.local.detach()
                    if shares
                    else torch.empty(self.whole, dtype=self.dtype, device=runtime.device())
                )
                self.full = self._leaf(data)
        elif shares:
            if self.full.data_ptr() != self.local.data_ptr() or self.full.device != self.local.device:
                self.full.data = self.local.detach()
        else:
            self.full.untyped_storage().resize_(self.nbytes)
        return 0 if shares else self.nbytes

    def _leaf(self, data: torch.Tensor) -> nn.Parameter:
        """The leaf that modules compute with."""
        leaf = nn.Parameter(data, requires_grad=data.is_floating_point())  # packed values are integers
        if leaf.requires_grad:
            # Python does not see through autograd's hooks: held by one of its own, a parameter would never be freed.
            mine = weakref.ref(self)
            leaf.register_post_accumulate_grad_hook(lambda _: None if (p := mine()) is None else p.on_gradient())
        return leaf.requires_grad_(self.shard.requires_grad)

    def free(self) -> int:
        """Give the memory back; the number of bytes that were."""
        if self.full is None or self.shares:
            return 0
        self.full.untyped_storage().resize_(0)
        return self.nbytes

    # --- gathering ----------------------------------------------------------------------------------------------------

    def is_fresh(self) -> bool:
        """Whether the shard is as it was when it was gathered."""
        return bool(self._gathered_at == (id(self.shard), writes_of(self.shard)))

    def note_writes(self) -> None:
        """Before a gather: a write to the shard is a write to the gathered value.

        Autograd counts those, and refuses a backward through a value that has changed since it was saved.
        """
        if self._gathered_at is not None and not self.is_fresh():
            for leaf in (self.full, self.full_global):
                if leaf is not None:
                    torch.autograd.graph.increment_version(leaf)
        self._gathered_at = (id(self.shard), writes_of(self.shard))

    def source(self, from_host: bool) -> torch.Tensor:
        """This rank's piece as it travels: contiguous, in the dtype of the gathered value.

        Where pieces travel from the host anyway (`from_host`) a shard that lies there stays there.
        """
        local = self.local.detach() if from_host else self.on_device()
        return local.to(dtype=self.dtype).contiguous()

    def on_device(self) -> torch.Tensor:
        """The shard on the device, not cast yet: a cast on the host would make a copy that is not page-locked, and
        the host wait for it."""
        return self.local.detach().to(runtime.device(), non_blocking=True)

    def pack(self, slot: torch.Tensor) -> list[Copy]:
        """What puts this rank's piece, padded, into its slot (bytes) of the unit's bucket."""
        local = self.on_device()
        target = slot[: math.prod(self.piece) * self.dtype.itemsize].view(self.dtype).view(self.piece)
        assert self.plan.dim is not None
        if local.shape != target.shape:
            target = target.narrow(self.plan.dim, 0, local.shape[self.plan.dim])
        return [(target, local)]

    def unpack(self, slots: torch.Tensor) -> list[Copy]:
        """What puts all ranks' pieces (rows of bytes) together in the gathered value."""
        assert self.full is not None
        if not self.full.numel():
            return []
        pieces = slots[:, : math.prod(self.piece) * self.dtype.itemsize].view(self.dtype).view(-1, *self.piece)
        return [(whole, piece) for whole, piece in self._blocks(self.full.data, pieces)]

    def _blocks(self, whole: torch.Tensor, pieces: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A whole value beside its pieces, in equal shapes: all pieces that are full, and the one that is not."""
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

    # --- what the modules see -----------------------------------------------------------------------------------------

    def show_gathered(self, as_global: bool) -> None:
        seen = self._global() if as_global else self.full
        for module, name in self.sites:
            parameters_of(module)[name] = seen
            if self.view is not None:
                module.__dict__[name] = self.view  # found before parameters are

    def show_shard(self) -> None:
        for module, name in self.sites:
            parameters_of(module)[name] = self.shard
            if self.view is not None:
                module.__dict__.pop(name, None)

    def _global(self) -> nn.Parameter:
        """The gathered value as a global tensor: copies along `fsdp`, split as annotated along other axes."""
        assert self.full is not None
        if self.full_global is None:
            stride = torch.empty(self.plan.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(self.plan.shape), stride, self.dtype)
            mesh, placements = torch_layout(self.gathered_layout, self.plan.shape)
            with torch.inference_mode(False):
                spec = DTensorSpec(mesh, placements, tensor_meta=meta)
                value = ShardedTensor(self.full.data, spec, requires_grad=False)
                self.full_global = self._leaf(value)
        assert is_sharded(self.full_global)
        if local_of(self.full_global).data_ptr() != self.full.data_ptr():
            set_local(self.full_global, self.full.data)
        return self.full_global

    # --- gradients ----------------------------------------------------------------------------------------------------

    def take_gradient(self) -> torch.Tensor | None:
        """What backward left on the gathered value (and `no_sync` kept back), as this rank's term of the sum."""
        reduce_dtype = dtype_of(self.plan.reduce_dtype)
        assert reduce_dtype is not None
        total = None
        if (held := self.held) is not None:
            total, self.shard.grad = held.term, held.base
        for leaf in (self.full, self.full_global):
            if leaf is not None and leaf.grad is not None:
                grad, leaf.grad = leaf.grad, None
                term = self._term(grad) if is_sharded(grad) else grad
                if term.layout is not torch.strided:
                    term = term.to_dense()
                term = term.to(reduce_dtype).contiguous()
                total = term if total is None else total.add_(term)
        return total

    @property
    def held(self) -> HeldGradient | None:
        """The gradient that `no_sync` holds back, unless it was dropped since."""
        grad = self.shard.grad
        return grad if isinstance(grad, HeldGradient) else None

    def hold_gradient(self) -> None:
        """Hold this rank's gradient back, in the dtype it will be summed in."""
        if self.hooks:
            raise FSDPError(
                f"a hook on {self.plan.name} and no_sync(): hooks on parameters are given the gradient summed over the "
                f"ranks, which no_sync() puts off. Leave no_sync() out (every micro-batch is reduced then), or remove "
                f"the hook"
            )
        term = self.take_gradient()
        if term is not None and self.shard.requires_grad:
            self.shard.grad = HeldGradient(self.shard, term, self.shard.grad)

    def drop_gradient(self) -> None:
        """Drop what a backward that was broken off has left; what `no_sync` holds back is of passes before."""
        for leaf in (self.full, self.full_global):
            if leaf is not None:
                leaf.grad = None

    def _term(self, grad: DTensor) -> torch.Tensor:
        """A global gradient as this rank's term of a sum along the data axes, split as annotated along the others."""
        mesh, wanted = torch_layout(self.gathered_layout, self.plan.shape)
        groups = origin(mesh)[1]
        same = grad.device_mesh == mesh
        target: list[Placement] = []
        settled = []
        for i, (group, placement) in enumerate(zip(groups, wanted, strict=True)):
            along_data = set(group) <= self._data_axes
            pending = same and along_data and grad.placements[i].is_partial()
            target.append(grad.placements[i] if pending else Replicate() if along_data else placement)
            if along_data and not pending:
                settled.append(i)
        local = local_of(redistributed(grad, mesh, target))
        where = mesh.get_coordinate()
        assert where is not None
        # Where every rank has the finished sum already, one of them contributes it.
        return torch.zeros_like(local) if any(where[i] != 0 for i in settled) else local

    def pack_gradient(self, grad: torch.Tensor, rows: torch.Tensor) -> list[Copy]:
        """What cuts a gradient into pieces, one per row of its slot in a bucket; padding stays as it is there."""
        if not grad.numel():
            return []
        pieces = rows[:, : math.prod(self.piece)].view(-1, *self.piece)
        return [(piece, whole) for whole, piece in self._blocks(grad, pieces)]

    def trim(self, piece: torch.Tensor) -> torch.Tensor:
        """A reduced piece in the shape of the shard."""
        piece = piece.reshape(-1)[: math.prod(self.piece)].view(self.piece)
        if self.plan.dim is not None:
            piece = piece.narrow(self.plan.dim, 0, self.local.shape[self.plan.dim])
        return piece

    def land(self, grad: torch.Tensor, host: HostTraffic) -> None:
        """Add a reduced piece to the shard's gradient; not if it was frozen since its forward, as on one device."""
        if not self.shard.requires_grad:
            return
        grad = grad.detach().to(self.local.dtype)
        if grad.device != self.local.device:
            grad = host.to_host(grad)
        grad = self._hooked(grad, host)
        current = self.shard.grad
        if current is None:
            assert is_sharded(self.shard)
            self.shard.grad = type(self.shard)(grad, spec_of(self.shard), requires_grad=False)
        else:
            assert is_sharded(current)
            host.add(local_of(current), grad)

    @property
    def hooks(self) -> list[Any]:
        """What the user registered on the parameter: `register_hook`, `register_post_accumulate_grad_hook`."""
        both = (backward_hooks(self.shard), post_accumulate_hooks(self.shard))
        return [hook for hooks in both for hook in (hooks or {}).values()]

    def _hooked(self, grad: torch.Tensor, host: HostTraffic) -> torch.Tensor:
        """A reduced piece as the parameter's hooks leave it."""
        hooks = backward_hooks(self.shard)
        if not hooks:
            return grad
        if self.offloaded:
            host.arrived()
        assert is_sharded(self.shard)
        value: Any = type(self.shard)(grad, spec_of(self.shard), requires_grad=False)
        for hook in list(hooks.values()):
            with torch.no_grad():
                result = hook(value)
            if result is None:
                continue
            if not is_sharded(result) or result.shape != self.shard.shape:
                raise FSDPError(
                    f"the hook on {self.plan.name} returned a {type(result).__name__} of shape "
                    f"{tuple(getattr(result, 'shape', ()))}; it is given the gradient summed over the ranks, a DTensor "
                    f"of shape {self.plan.shape}, and returns one like it or None"
                )
            value = redistributed(result.detach(), self.shard.device_mesh, self.shard.placements)
        local: torch.Tensor = local_of(value)
        return local.to(self.local.dtype)

    def landed(self) -> None:
        """The gradient is there: what the user registered for that moment runs."""
        with torch.no_grad():
            for hook in list((post_accumulate_hooks(self.shard) or {}).values()):
                hook(self.shard)
