"""The units of a model on XLA: parameters that are annotated as the plan says, and what happens when a unit is called.

The compiler gathers, frees and reduces; a unit tells it how parameters, gradients and outputs are laid out, which dtype
to compute in, and that the backward of one unit is not to be mixed with that of another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import parameters_of, share_hooks
from fullshard.distributed import runtime
from fullshard.fsdp import checks, shard
from fullshard.fsdp.backward_entry import in_backward
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.plan_layout import plan_unit, replan
from fullshard.fsdp.plan_model import Site
from fullshard.fsdp.strategy import MixedPrecision, dtype_name, dtype_of
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor_tree import cast_tensors, map_tensors, tensors_in
from fullshard.xla.recomputation import checkpoint, kept_for_recomputation
from fullshard.xla.tensor import annotate, full_tensor, is_xla_tensor, sharding_of


@dataclass(eq=False)
class Annotated:
    """A parameter of the plan: its layout, and the modules that hold it."""

    plan: ParameterPlan
    layout: Layout
    sites: list[Site]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as its module has it."""
        module, name = self.sites[0]
        tensor = parameters_of(module)[name]
        assert tensor is not None
        return tensor

    @property
    def shard(self) -> nn.Parameter:
        """The parameter, under its name on the torch engine."""
        return self.parameter

    def as_shard(self, value: torch.Tensor) -> torch.Tensor:
        """A whole value that belongs to the parameter, such as an optimizer's state, in the parameter's layout."""
        return annotate(value.to(runtime.device()), self.layout) if value.shape == self.plan.shape else value

    def hold(self, value: Any) -> None:
        """Let every module that holds the parameter hold `value`."""
        for module, name in self.sites:
            parameters_of(module)[name] = value

    def place(self, parameter: nn.Parameter) -> None:
        """Move a parameter to the devices in its layout. On the meta device it stays there until values are loaded."""
        dtype = dtype_of(self.plan.dtype)
        if parameter.is_meta:
            return
        if parameter in shard.replaced:  # tied to one of another module that was wrapped alone
            parameter = shard.replaced[parameter].parameter
        if not is_xla_tensor(parameter) or parameter.dtype != dtype:
            value = parameter.detach().to(dtype=dtype).to(runtime.device())
            placed = nn.Parameter(value, requires_grad=parameter.requires_grad)
            share_hooks(parameter, placed)
            for name, extra in vars(parameter).items():
                if name != "_fullshard_layout" and not hasattr(placed, name):
                    setattr(placed, name, extra)
            shard.replaced[parameter] = self
            parameter = placed
        self.hold(annotate(parameter, self.layout))

    def follow(self, precision: MixedPrecision) -> None:
        """Annotate the parameter and its gradients again after changes from outside, and let the plan follow.

        `p.data = …`, casts of the model and `copy_` from a tensor on the devices replace the value and its layout.
        """
        p = self.parameter
        if is_xla_tensor(p) and sharding_of(p) != self.layout:
            annotate(p, self.layout)
        if p.requires_grad and not getattr(p, "_fullshard_hooked", False):
            p.register_post_accumulate_grad_hook(self._annotate_gradient)
            p._fullshard_hooked = True
        if (dtype_name(p.dtype), p.requires_grad) != (self.plan.dtype, self.plan.trainable):
            self.plan = replan(self.plan, p.dtype, p.requires_grad, precision)

    def _annotate_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and sharding_of(parameter.grad) != self.layout:
            annotate(parameter.grad, self.layout)


@dataclass
class OutputRule:
    """Splits an output on dim 0 over the data axes, or calls the user's `shard_output`."""

    shard_output: Callable[[Any, Mesh], Any] | None
    mesh: Mesh
    axes: tuple[str, ...]
    """The axes over which the batch is split, major to minor."""
    chosen: bool = False
    """Whether the module is a unit because of a policy. The user's `shard_output` is for the module they wrapped, and
    for such outputs of others that have no default."""

    def __call__(self, output: Any) -> Any:
        first = _first_tensor(output)
        if self.shard_output is not None and (first is None or not self.chosen):
            replaced = self.shard_output(output, self.mesh)
            return output if replaced is None else replaced
        if first is None:
            raise FSDPError(
                f"FSDPv2 splits outputs over the batch: a tensor, the first tensor of a tuple, or that of a model "
                f"output; this module returned {_described(output)}. Pass shard_output=lambda output, mesh: …, which "
                f"calls mark_sharding on the tensors in it"
            )
        layout = sharding_of(first)
        if first.ndim and (layout is None or not any(layout.dims)):
            annotate(first, Layout.of(self.mesh, (self.axes, *(None for _ in first.shape[1:])), first.shape))
        return output


def _first_tensor(output: Any) -> torch.Tensor | None:
    """The tensor that is split by default: the output, the first of a tuple, the first with dims of a model output."""
    if isinstance(output, tuple) and output:
        output = output[0]
    elif isinstance(output, Mapping):
        tensors = [value for value in output.values() if isinstance(value, torch.Tensor)]
        output = next((t for t in tensors if t.ndim), tensors[0] if tensors else None)  # a loss alone is not split
    return output if isinstance(output, torch.Tensor) else None


def _described(output: Any) -> str:
    name = type(output).__name__
    return f"a {name} that begins with a {type(output[0]).__name__}" if isinstance(output, tuple) and output else name


class _BackwardBarrier(torch.autograd.Function):
    """The same tensors. In backward, their gradients and those of the parameters so far are behind one barrier, so that
    the compiler reduces the gradients of a unit before it goes on, not those of all units at once."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, *inputs: torch.Tensor) -> Any:
        ctx.module = module
        return tuple(t.clone() for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        import torch_xla.core.xla_model as xm

        gradients = [p.grad for p in ctx.module.parameters() if p.grad is not None]
        xm.optimization_barrier_([t for t in (*gradients, *grads) if t is not None and is_xla_tensor(t)])
        return None, *grads


def with_barrier(module: nn.Module, inputs: Any) -> Any:
    """The inputs of a module, with a barrier where its backward ends."""
    into = [t for t in tensors_in(inputs, objects=False) if t.requires_grad and is_xla_tensor(t)]
    if not into or not torch.is_grad_enabled():
        return inputs
    behind = dict(zip(map(id, into), _BackwardBarrier.apply(module, *into), strict=True))
    return map_tensors(lambda t: behind.get(id(t), t), inputs)


@dataclass(eq=False)
class Unit:
    """A module of the plan."""

    module: nn.Module
    parameters: list[Annotated]
    precision: MixedPrecision
    output_dtype: torch.dtype | None
    output: OutputRule

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, modules hold the parameters in the dtype that they compute in. Gradients flow to the parameters."""
        cast = [(p, p.parameter) for p in self.parameters if p.plan.compute_dtype != p.plan.dtype]
        for p, stored in cast:
            p.hold(annotate(stored.to(dtype_of(p.plan.compute_dtype)), p.layout))
        try:
            yield
        finally:
            for p, stored in cast:
                p.hold(stored)

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the unit's forward between barriers, in its compute dtype."""
        args, kwargs = with_barrier(self.module, (args, kwargs))
        dtype = self.precision.param_dtype if self.precision.cast_forward_inputs else None
        args, kwargs = cast_tensors((args, kwargs), dtype)
        with kept_for_recomputation(self.computing):
            output = forward(*args, **kwargs)
        return cast_tensors(self.output(output), self.output_dtype)


@dataclass(eq=False)
class ShardedModel:
    """All units of a model, the root first."""

    root: nn.Module
    mesh: Mesh
    strategy: str
    replica_axes: tuple[str, ...]
    ignored: set[nn.Module]
    units: list[Unit]
    summoned: bool = False
    """Whether modules hold whole parameters because of `summon_full_params`."""
    running: bool = False
    checked: bool = False
    names: dict[nn.Module, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {module: name for name, module in self.root.named_modules()}

    @property
    def parameters(self) -> list[Annotated]:
        """The parameters of all units."""
        return [p for unit in self.units for p in unit.parameters]

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan of the model."""
        axes = tuple((str(name), size) for name, size in self.mesh.shape().items())
        units = (
            plan_unit(self.names[u.module], type(u.module).__name__, [p.plan for p in u.parameters]) for u in self.units
        )
        return ShardingPlan(axes, self.strategy, self.replica_axes, tuple(units))

    def run(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's module."""
        if self.running or in_backward():  # a recomputation
            return unit.call(forward, args, kwargs)
        self._before_pass()
        self.running = True
        try:
            return unit.call(forward, args, kwargs)
        finally:
            self.running = False

    def _before_pass(self) -> None:
        if not self.checked:
            checks.refuse_new_parameters(self.root, self.ignored, [p.parameter for p in self.parameters])
            self.checked = True
        if not self.summoned:
            self.follow()
        for module in self.names:
            if getattr(module, "gradient_checkpointing", False):  # of transformers: torch's own does not know XLA
                module._gradient_checkpointing_func = checkpoint

    def settle(self) -> None:
        """Compute values that were written, and lay them out again through the host where the compiler has chosen
        another layout: it replicates uneven results of programs that only copy, whatever their annotation."""
        runtime.sync()
        for p in self.parameters:
            value = p.parameter
            if is_xla_tensor(value) and sharding_of(value) != p.layout:
                value.data = annotate(full_tensor(value).to(runtime.device()), p.layout)
        self.follow()

    def follow(self) -> None:
        """Keep layouts and plans true after changes to parameters from outside."""
        for unit in self.units:
            for p in unit.parameters:
                p.follow(unit.precision)
