"""Slices of the sequence: a module that computes each token alone runs on some tokens at a time, forward and backward.

No intermediate value of full length exists then. Forward keeps the module's inputs alone; backward computes a slice
again, takes its gradients, and goes on to the next one. Gradients of parameters are summed over the slices, in fp32
where they are narrower, as one product over all tokens sums them. Rows are laid end to end first, so a slice is
contiguous memory. Which modules can be sliced is in `models/slice_check.py`, which layers slice them in `levels.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.activations.checkpointing import own_forward, replace_forward, restore_forward
from fullshard.activations.slice_random import RandomState, SliceSeeds
from fullshard.device.torch_private import tree_map
from fullshard.fsdp.compile import never_compile
from fullshard.spmd.tensor import is_sharded
from fullshard.spmd.tensor_tree import map_tensors, tensors_in

ELEMENTS = 2**26
"""Elements of a slice's hidden states, if the number of slices is not set: 16,384 tokens of 4,096 each, enough for
products to run at their full rate."""
FEWEST = 2
"""The fewest slices that bring something."""
COUNT = "_fullshard_slices"
"""The attribute of a module that runs in slices: its `SliceCount`."""

_repeats = 1


def repeats() -> int:
    """How many slices the one that runs stands for: on the meta device, few run of many that are alike."""
    return _repeats


@dataclass(frozen=True)
class SliceCount:
    """Into how many slices tokens are divided."""

    count: int | None = None
    """None: as many as have about `ELEMENTS` elements."""

    def size(self, tokens: int, elements: int) -> int:
        """The tokens of a slice, of so many that have so many elements; all of them where slices bring nothing."""
        wanted = elements // ELEMENTS if self.count is None else self.count
        return -(-tokens // min(wanted, tokens)) if wanted >= FEWEST and tokens else tokens


def slice_module(module: nn.Module, count: SliceCount) -> None:
    """Run a module in slices from its next call on; again with another count."""
    module.__dict__[COUNT] = count
    if not is_sliced(module):
        never_compile(in_slices)
        replace_forward(module, in_slices)


def run_whole(module: nn.Module) -> None:
    """Undo `slice_module`."""
    if is_sliced(module):
        restore_forward(module)
        del module.__dict__[COUNT]


def is_sliced(module: nn.Module) -> bool:
    """Whether the module runs in slices."""
    return getattr(vars(module).get("forward"), "__func__", None) is in_slices


def in_slices(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that runs in slices."""
    forward = own_forward(module)
    states = next((t for t in tensors_in(args) + tensors_in(kwargs) if t.is_floating_point()), None)
    if states is None or is_sharded(states) or states.dim() < 2:
        return forward(module, *args, **kwargs)
    lead = states.shape[:2] if states.dim() > 2 else states.shape[:1]  # [rows, length, …] or [tokens, …]
    size = module.__dict__[COUNT].size(lead.numel(), states.numel())
    if size >= lead.numel():
        return forward(module, *args, **kwargs)
    every = {id(t): t for t in tensors_in((args, kwargs), objects=False)}.values()
    inputs = [t for t in every if t.shape[: len(lead)] == lead]
    if any(t.requires_grad for t in every if t.shape[: len(lead)] != lead):
        return forward(module, *args, **kwargs)
    call = _SlicedCall(module, forward, args, kwargs, inputs, lead, size)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*inputs, *call.parameters)):
        return call.result(call.forward(inputs))
    leaf = torch.empty(0, device=states.device, requires_grad=True)
    kept = _Keep.apply(leaf, *[t.detach() for t in inputs])
    return call.result(_Run.apply(call, kept, *inputs, *call.parameters))


class _Keep(torch.autograd.Function):
    """Keeps tensors for `_Run`, before it runs: when torch's checkpointing recomputes a layer, it stops where the last
    value has been kept, and the module at the end of the layer does not run in vain."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Run(torch.autograd.Function):
    """A call of a module in slices; its tensors are the inputs and the parameters that train."""

    @staticmethod
    def forward(ctx: Any, call: _SlicedCall, kept: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.kept = call, kept.grad_fn
        ctx.set_materialize_grads(False)
        return call.forward(tensors[: len(tensors) - len(call.parameters)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        call, kept = ctx.call, ctx.kept
        return None, None, *call.backward(kept.saved_tensors, grads, ctx.needs_input_grad[2:])


class _SlicedCall:
    """One call of a module, which computes each token alone. It does not hold the inputs: `_Keep` does."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, inputs: Sequence[torch.Tensor],
        lead: torch.Size, size: int,
    ) -> None:  # fmt: skip
        self.module, self._forward, self.lead, self.tokens, self.size = module, forward, lead, lead.numel(), size
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        places = {id(t): _Place(i) for i, t in enumerate(inputs)}
        self._arguments: Any = map_tensors(lambda t: places.get(id(t), t), (args, kwargs))
        """The arguments, with the places of inputs in place of these."""
        self._structure: Any = None
        """What the module returns, with the places of tensors in place of these."""
        self._rows_first: list[bool] = []
        """For each of them, whether its first dim is that of tokens; otherwise it has those of the inputs."""
        device = inputs[0].device
        self._random, self._autocast = RandomState(device), _autocast(device)

    def _in_rows(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor [lead…, …] as [tokens, …]."""
        return t.reshape(self.tokens, *t.shape[len(self.lead) :])

    def _slices(self, is_meta: bool) -> Iterator[slice]:
        """The slices in order. Without values, the second one stands for all up to the last: see `repeats`."""
        global _repeats
        count = -(-self.tokens // self.size)
        indices = [0, 1, count - 1] if is_meta and count > 3 else range(count)
        for index in indices:
            before, _repeats = _repeats, count - 2 if len(indices) < count and index == 1 else _repeats
            try:
                yield slice(index * self.size, min((index + 1) * self.size, self.tokens))
            finally:
                _repeats = before

    def _run(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the module returns for some tokens, [tokens, …] each."""
        dims, tokens = len(self.lead), len(parts[0])
        lead = (*(1,) * (dims - 1), tokens)
        args, kwargs = _filled(self._arguments, [part.view(*lead, *part.shape[1:]) for part in parts])
        tensors: list[torch.Tensor] = []

        def place(t: torch.Tensor) -> Any:
            tensors.append(t)
            return _Place(len(tensors) - 1)

        structure = map_tensors(place, self._forward(self.module, *args, **kwargs))
        if self._structure is None:
            self._structure, self._rows_first = structure, [t.shape[:dims] != lead for t in tensors]
        return [
            t if rows_first else t.reshape(tokens, *t.shape[dims:])
            for t, rows_first in zip(tensors, self._rows_first, strict=True)
        ]

    @torch.no_grad()
    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the module returns for all tokens, [tokens, …] each."""
        rows, seeds = [self._in_rows(t) for t in inputs], SliceSeeds()
        results: list[torch.Tensor] = []
        for part in self._slices(rows[0].is_meta):
            with self._autocast(), seeds.rows_from(part.start):
                values = self._run([t[part] for t in rows])
            if not results:
                results = [v.new_empty(self.tokens, *v.shape[1:]) for v in values]
            for result, v in zip(results, values, strict=True):
                result[part] = v
        return tuple(results)

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tensors of `forward` as the module returns them."""
        shaped = [
            t if rows_first else t.view(*self.lead, *t.shape[1:])
            for t, rows_first in zip(tensors, self._rows_first, strict=True)
        ]
        return _filled(self._structure, shaped)

    def backward(
        self, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients of the inputs and of the parameters."""
        rows, seeds = [self._in_rows(t) for t in inputs], SliceSeeds()
        of_inputs = [torch.empty_like(t) if want else None for t, want in zip(rows, wanted, strict=False)]
        trained = [p for p, want in zip(self.parameters, wanted[len(inputs) :], strict=True) if want]
        sums = {id(p): GradientSum() for p in self.parameters}
        with self._random.again(), self._autocast():
            for part in self._slices(rows[0].is_meta):
                with seeds.rows_from(part.start):
                    found = self._slice_backward(part, rows, grads, [g is not None for g in of_inputs], trained)
                for out in of_inputs:
                    if out is not None:
                        out[part] = 0 if (grad := found.pop(0)) is None else grad
                for p in trained:
                    sums[id(p)].add(found.pop(0))
                grad = None  # the next slice needs its memory
        shaped = [g if g is None else g.view(t.shape) for g, t in zip(of_inputs, inputs, strict=True)]
        return [*shaped, *(sums[id(p)].value(p.dtype) for p in self.parameters)]

    def _slice_backward(
        self, part: slice, rows: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], wanted: Sequence[bool],
        trained: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """The gradients of a slice of the inputs that want one, and of parameters."""
        parts = [t[part].detach().requires_grad_(want) for t, want in zip(rows, wanted, strict=True)]
        with torch.enable_grad(), _as_recomputed():
            values = self._run(parts)
        outputs = [(v, g[part]) for v, g in zip(values, grads, strict=True) if g is not None and v.requires_grad]
        leaves = [*(t for t, want in zip(parts, wanted, strict=True) if want), *trained]
        if not outputs:
            return [None] * len(leaves)
        roots, of_roots = zip(*outputs, strict=True)
        return list(torch.autograd.grad(roots, leaves, of_roots, allow_unused=True))


class GradientSum:
    """A gradient that is summed over slices, in fp32 if it is narrower, and rounded once."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self._owned = False
        """Whether the sum has memory of its own; a first gradient may share it."""

    def add(self, grad: torch.Tensor | None) -> None:
        """Add the gradient of a slice."""
        if grad is None:
            return
        if self.total is None:
            self.total = grad.to(torch.promote_types(grad.dtype, torch.float32))
            self._owned = self.total is not grad
        elif self._owned:
            self.total += grad
        else:
            self.total, self._owned = self.total + grad, True

    def value(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The sum; None if no slice had a gradient."""
        return None if self.total is None else self.total.to(dtype)


class _Place:
    """Stands for a tensor in arguments or outputs."""

    def __init__(self, number: int) -> None:
        self.number = number


def _filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    return tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf, structure)


def _as_recomputed() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are saved through hooks, as they are while torch's checkpointing recomputes: that is how a plan
    tells what is computed again."""
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(value: Any) -> Any:
    return value


def _autocast(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes a context with the autocast of now, for backward."""
    if device.type == "meta":
        return contextlib.nullcontext
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
