"""`torch.compile` of a whole model, or of a function that calls it: each unit is compiled separately.

The engine's own work (communication, hooks, bookkeeping) cannot be part of a compiled graph. The outermost module
disables the compiler while the engine runs, and enables it for the forward of each unit that has no units inside.
`compile_units` compiles these units themselves. Units of one kind share one compiled graph, because nothing that
differs between them (parameters, their memory, the number of the layer) is part of it. Graphs contain no communication,
so a rank that cannot compile runs its units uncompiled, in step with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import first_line
from fullshard.device.torch_private import (
    compiled_call,
    compiler_errors,
    compiler_settings,
    maybe_mark_dynamic,
    plain_call,
    replace_compiled_call,
    set_eval_frame,
)
from fullshard.distributed.rank_logging import get_logger
from fullshard.spmd.tensor_tree import tensors_in

VARIANT = "_fullshard_variant"
"""The attribute of a module that runs in one of several ways, each compiled separately: which one."""
KINDS = 64
"""How often torch may compile a call: for each kind of unit, training and evaluation, fixed and varying sizes."""

logger = get_logger(__name__)


def never_compile(*functions: Callable[..., Any]) -> None:
    """Exclude these functions from compilation. (Called when a model is wrapped, not on import: it loads the
    compiler.)"""
    for function in functions:
        torch.compiler.disable(function, recursive=False)


class Compiler:
    """The compiler that was active where the model was called."""

    def __init__(self) -> None:
        self._callback: Any = None

    def uncompiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of the engine without compiling it: a model's call, or a hook that autograd runs inside a
        compiled function."""
        before, callback = self._callback, set_eval_frame(None)
        if callback is None:
            return function(*args)
        self._callback = callback
        try:
            return function(*args)
        finally:
            self._callback = before
            set_eval_frame(callback)

    def resumed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled if the model is."""
        callback = self._callback
        if callback is None:
            return function

        def compiled(*args: Any, **kwargs: Any) -> Any:
            set_eval_frame(callback)
            try:
                return function(*args, **kwargs)
            finally:
                set_eval_frame(None)

        return compiled


# --- compiled units -------------------------------------------------------------------------------------------------


class Compilation:
    """What the compiled units of a model share."""

    def __init__(self, say: Callable[[str], None], strict: bool) -> None:
        self.say, self.strict = say, strict
        self.started = self.failed = False

    def start(self) -> None:
        """Report once that compilation begins."""
        if not self.started:
            self.started = True
            self.say("compiling the layers (first step).")

    def fail(self, error: Exception) -> None:
        """Report the first failure; from now on this rank's units run uncompiled."""
        if not self.failed:
            self.failed = True
            reason = first_line(getattr(error, "inner_exception", error))[:300]
            if "recompile_limit" in reason:
                reason = f"torch has compiled one of them {KINDS} times, and it still differs from call to call"
            logger.warning("the layers could not be compiled (%s); they run uncompiled on this rank.", reason)


class CompiledUnit:
    """The compiled call of a unit; the plain one where compilation fails, and for generation with a cache."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], shared: Compilation) -> None:
        self.module, self.compiled, self.shared = module, compiled, shared
        self.known: dict[tuple[Any, ...], bool] = {}
        """Kinds of calls so far: rows, length, with gradients, in training, variant; and whether each is compiled."""
        self.sizes: set[tuple[int, ...]] = set()
        """Rows and lengths that were compiled."""
        self.ones: list[set[tuple[int, int]]] = []
        """The inputs and dims that had the size 1 then."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.shared.failed or _has_cache(kwargs):
            return plain_call(self.module)(*args, **kwargs)
        states = _hidden_states(args, kwargs)
        if states is not None and torch.is_grad_enabled() and not states.requires_grad and self._trains():
            # The first layer above a frozen embedding: with an input like the others', it runs their graph.
            states = states.detach().requires_grad_()
            args, kwargs = ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
        size = tuple(states.shape[:2]) if states is not None else ()
        kind = (*size, torch.is_grad_enabled(), self.module.training, vars(self.module).get(VARIANT))
        is_new = kind not in self.known
        if is_new:
            self.known[kind] = self._prepare(size, [*tensors_in((args, kwargs))])
        if not self.known[kind]:
            return plain_call(self.module)(*args, **kwargs)
        try:
            with _compiling() if is_new else contextlib.nullcontext():
                return self.compiled(*args, **kwargs)
        except compiler_errors() as error:
            if self.shared.strict:
                raise
            self.shared.fail(error)
            return plain_call(self.module)(*args, **kwargs)

    def _trains(self) -> bool:
        return any(p.requires_grad for p in self.module.parameters())

    def _prepare(self, size: tuple[int, ...], inputs: list[torch.Tensor]) -> bool:
        """Prepares the compiler for a kind of call; returns whether it is compiled.

        The first size is compiled as it is, the next one for any size. torch compiles a size of 1 separately: a batch
        that has one where others had more (a last batch of one row) is not compiled.
        """
        ones = {(i, dim) for i, t in enumerate(inputs) for dim, n in enumerate(t.shape) if n == 1}
        if self.ones and not any(ones <= before for before in self.ones):
            return False
        if self.sizes - {size}:
            for t in inputs:
                maybe_mark_dynamic(t, _batch_dims(t, size))
        self.shared.start()
        self.sizes.add(size)
        self.ones.append(ones)
        return True


def _compiling() -> contextlib.AbstractContextManager[Any]:
    """The compiler's settings for a kind of call that may be new to it.

    A call that was compiled too often is an error: torch itself would go on uncompiled, without a word. Modules may
    change their attributes while activations are checkpointed, as fused LoRA layers do, which hand outputs on to each
    other: what they keep is the same after the recomputation.
    """
    settings: contextlib.AbstractContextManager[Any] = compiler_settings.patch(
        recompile_limit=KINDS, fail_on_recompile_limit_hit=True, skip_fwd_side_effects_in_bwd_under_checkpoint=True
    )
    return settings


def norms_between(model: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """The norms that a model runs outside of these units, such as the one before its head: modules with vectors as
    parameters and nothing inside. torch's own are one operator already."""
    inside = {module for unit in units for module in unit.modules()}
    return [module for module in model.modules() if module not in inside and _is_norm(module)]


def _is_norm(module: nn.Module) -> bool:
    sizes = [p.dim() for p in module.parameters()]
    is_own = not type(module).__module__.startswith("torch.")
    return bool(sizes) and max(sizes) <= 1 and not list(module.children()) and is_own


def compile_modules(modules: Iterable[nn.Module], say: Callable[[str], None] | None, **options: Any) -> None:
    """Compile each module in place. `options` are those of `torch.compile`; with `fullgraph`, a failure is an error."""
    shared = Compilation(say or logger.info, bool(options.get("fullgraph")))
    for module in modules:
        module.compile(**options)
        if (call := compiled_call(module)) is not None:
            replace_compiled_call(module, CompiledUnit(module, call, shared))


def _hidden_states(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The first argument, if it has a row per sequence and a vector per token."""
    states = args[0] if args else kwargs.get("hidden_states")
    is_states = isinstance(states, torch.Tensor) and states.dim() == 3 and states.is_floating_point()
    return states if is_states else None


def _batch_dims(t: torch.Tensor, size: tuple[int, ...]) -> list[int]:
    """The dims of an input that change with the batch: all of a mask's or of positions, the first two of states."""
    dims = [(dim, n) for dim, n in enumerate(t.shape) if n > 1]
    return [dim for dim, n in dims if not t.is_floating_point() or (dim, n) in enumerate(size)]


def _has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether keys and values are kept for generation: sizes then change with each token."""
    return any(hasattr(value, "get_seq_length") for value in kwargs.values())
