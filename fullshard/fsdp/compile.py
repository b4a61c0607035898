"""`torch.compile` of a whole model, or of a function that calls it: each unit is compiled separately.

The engine's own work (communication, hooks, bookkeeping) cannot be part of a compiled graph. The outermost module
disables the compiler while the engine runs, and enables it for the forward of each unit that has no units inside.
`compile_units` compiles these units themselves. Units of one kind share one compiled graph, because nothing that
differs between them (parameters, their memory, the number of the layer) is part of it. Graphs contain no communication,
so a rank that cannot compile runs its units uncompiled, in step with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.errors import first_line
from fullshard.fsdp.tensor_tree import tensors_in
from fullshard.rank_logging import get_logger
from fullshard.torch_private import (
    compiled_call,
    compiler_errors,
    compiler_settings,
    maybe_mark_dynamic,
    plain_call,
    replace_compiled_call,
    set_eval_frame,
)

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

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the body without compiling it."""
        before, found = self._callback, set_eval_frame(None)
        if found is not None:
            self._callback = found
        try:
            yield
        finally:
            self._callback = before
            if found is not None:
                set_eval_frame(found)

    def uncompiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a hook of the engine, which autograd may run inside a compiled function."""
        with self.suspended():
            return function(*args)

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
        if not self.started:
            self.started = True
            self.say("compiling the layers (first step).")

    def fail(self, error: Exception) -> None:
        """Report the first failure; from now on this rank's units run uncompiled."""
        if not self.failed:
            self.failed = True
            reason = first_line(getattr(error, "inner_exception", error))
            logger.warning("the layers could not be compiled (%s); they run uncompiled on this rank.", reason[:300])


class CompiledUnit:
    """The compiled call of a unit; the plain one where compilation fails, and for generation with a cache."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], shared: Compilation) -> None:
        self.module, self.compiled, self.shared = module, compiled, shared
        self.sizes: set[tuple[int, ...]] = set()
        """Rows and length of the batches so far."""
        self.seen: set[tuple[Any, ...]] = set()
        """These with what else a graph is specific to."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        states = _hidden_states(args, kwargs)
        if self.shared.failed or states is None or _has_cache(kwargs) or self._is_odd(states):
            return plain_call(self.module)(*args, **kwargs)
        if torch.is_grad_enabled() and not states.requires_grad and self._trains():
            # The first layer above a frozen embedding: with an input like the others', it runs their graph.
            states = states.detach().requires_grad_()
            args, kwargs = ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
        try:
            with self._sizes_of(states, args, kwargs):
                return self.compiled(*args, **kwargs)
        except compiler_errors() as error:
            if self.shared.strict:
                raise
            self.shared.fail(error)
            return plain_call(self.module)(*args, **kwargs)

    def _is_odd(self, states: torch.Tensor) -> bool:
        """Whether a batch is one row where others have more: torch would compile for this number again."""
        return states.shape[0] == 1 and bool(self.sizes) and all(rows > 1 for rows, _ in self.sizes)

    def _trains(self) -> bool:
        return any(p.requires_grad for p in self.module.parameters())

    def _sizes_of(self, states: torch.Tensor, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        """Prepares the compiler for a batch. The first one is compiled for its size, the next size for any."""
        size = (states.shape[0], states.shape[1])
        graph = (*size, torch.is_grad_enabled(), self.module.training)
        if graph in self.seen:
            return contextlib.nullcontext()
        self.shared.start()
        if self.sizes - {size}:
            for t in tensors_in((args, kwargs)):
                maybe_mark_dynamic(t, _batch_dims(t, size))
        self.sizes.add(size)
        self.seen.add(graph)
        # torch would stop to compile, without an error, once a call has been compiled too often.
        return compiler_settings.patch(recompile_limit=KINDS, fail_on_recompile_limit_hit=True)


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


def _batch_dims(t: torch.Tensor, size: tuple[int, int]) -> list[int]:
    """The dims of an input that change with the batch: all of a mask's or of positions, the first two of states."""
    dims = [(dim, n) for dim, n in enumerate(t.shape) if n > 1]
    return [dim for dim, n in dims if not t.is_floating_point() or (dim, n) in enumerate(size)]


def _has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether keys and values are kept for generation: sizes then change with each token."""
    return any(hasattr(value, "get_seq_length") for value in kwargs.values())
