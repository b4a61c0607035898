"""Values that no file holds: computed buffers, and new parameters such as adapters.

A new parameter is a function of (seed, its name) alone. It is drawn whole, by the initialiser its own module or model
uses, one parameter at a time while all others stay on the meta device, and each rank keeps its slice: the same model
comes out whatever the number of ranks and whatever else is initialised.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fullshard import runtime
from fullshard.errors import WeightsError
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.torch_private import buffers_of, parameters_of


@contextlib.contextmanager
def without_values(parameters: Iterable[ShardedParameter]) -> Iterator[None]:
    """Modules hold plain parameters on the meta device, on which initialisers run without effect."""
    held = list(parameters)
    for p in held:
        _show(p, torch.empty(p.plan.shape, dtype=dtype_of(p.plan.dtype), device="meta"))
    try:
        yield
    finally:
        for p in held:
            p.show_shard()


def initialise(root: nn.Module, parameters: list[ShardedParameter], new: list[ShardedParameter], seed: int) -> None:
    """Give new parameters their first values."""
    lines = _lines(root)
    helpless = []
    with without_values(parameters):
        for p in new:
            with seeded(seed, p.plan.name):
                value = _drawn(p, lines)
            if value is None:
                helpless.append(p.plan.name)
                continue
            with torch.no_grad():
                p.local.copy_(value[p.layout.slices(p.plan.shape, runtime.rank())])
    if helpless:
        raise WeightsError(
            f"no initialiser is known for {len(helpless)} new parameter(s): {', '.join(helpless[:5])}. Their modules "
            f"have neither reset_parameters() nor a model whose _init_weights() sets them, or they derive from loaded "
            f"weights. Set them in such a method, or give them values before the model is wrapped"
        )


def drawn(root: nn.Module, p: ShardedParameter, seed: int) -> torch.Tensor:
    """The first value that `initialise` gives a parameter, whole; modules must hold no values meanwhile."""
    with seeded(seed, p.plan.name):
        value = _drawn(p, _lines(root))
    assert value is not None
    return value


def _drawn(p: ShardedParameter, lines: dict[nn.Module, list[nn.Module]]) -> torch.Tensor | None:
    """The first value of a parameter, or None if nobody sets it."""
    empty = torch.empty(p.plan.shape, dtype=dtype_of(p.plan.dtype))
    if not empty.is_floating_point():
        return None
    _show(p, empty.fill_(torch.nan))
    try:
        for module, name in p.sites:
            for step in _initialisers(lines[module]):
                step()
            value = parameters_of(module)[name]
            assert value is not None
            if not value.isnan().any():
                return value.detach()
        return None
    finally:
        _show(p, empty.to("meta"))


def compute_buffers(root: nn.Module, parameters: list[ShardedParameter]) -> list[str]:
    """Fill buffers that are still on the meta device as their modules would; names of those nobody can fill."""
    waiting = [
        (prefix, module, name)
        for prefix, module in root.named_modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and buffer.is_meta
    ]
    if not waiting:
        return []
    _draw_projections(root)
    waiting = [(prefix, module, name) for prefix, module, name in waiting if buffers_of(module)[name].is_meta]
    lines = _lines(root)
    made = []
    for start in (0, 1):  # what keeps both starting values was never set
        for _, module, name in waiting:
            buffers_of(module)[name] = torch.full_like(buffers_of(module)[name], start, device="cpu")
        with without_values(parameters), seeded(0, "buffers"):
            for module in {id(module): module for _, module, _ in waiting}.values():
                for step in _initialisers(lines[module]):
                    step()
        made.append([buffers_of(module)[name] for _, module, name in waiting])
    helpless = []
    for (prefix, module, name), first, second in zip(waiting, *made, strict=True):
        if not torch.equal(first, second):
            helpless.append(f"{prefix}.{name}" if prefix else name)
        buffers_of(module)[name] = second.to(runtime.device())
    return helpless


def _draw_projections(root: nn.Module) -> None:
    """VeRA's shared projections, as PEFT draws them from their seed."""
    from peft.tuners.vera.model import VeraModel, _kaiming_init

    for tuner in root.modules():
        if isinstance(tuner, VeraModel):
            for adapter, config in tuner.peft_config.items():
                draw = torch.Generator(device="cpu").manual_seed(config.projection_prng_key)
                for held in (tuner.vera_A, tuner.vera_B):
                    with torch.device("cpu"):
                        held[adapter] = _kaiming_init(tuple(held[adapter].shape), draw).to(runtime.device())


def _show(p: ShardedParameter, value: torch.Tensor) -> None:
    parameter = nn.Parameter(value, requires_grad=p.shard.requires_grad and value.is_floating_point())
    for module, name in p.sites:
        parameters_of(module)[name] = parameter


def _lines(root: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Every module with those around it, outermost first."""
    modules = dict(root.named_modules())
    found = {}
    for name, module in modules.items():
        parts = name.split(".") if name else []
        found[module] = [root, *(modules[".".join(parts[: i + 1])] for i in range(len(parts)))]
    return found


def _initialisers(line: list[nn.Module]) -> Iterator[Callable[[], Any]]:
    """What would set a module's values, in the order to try: its adapter layer's way, its model's, its own."""
    resets = ("reset_lora_parameters", "reset_vera_parameters")
    tuner: Any = next((m for m in reversed(line) if any(hasattr(m, name) for name in resets)), None)
    if tuner is not None and line[-1] is not tuner and tuner.base_layer not in line:
        configs: dict[str, Any] = next((m.peft_config for m in line if hasattr(m, "peft_config")), {})
        if hasattr(tuner, "reset_vera_parameters"):
            for adapter in tuner.vera_lambda_d:
                yield functools.partial(tuner.reset_vera_parameters, adapter, configs[adapter].d_initial)
            return
        for adapter in (*tuner.lora_A, *tuner.lora_embedding_A):
            choice = getattr(configs.get(adapter), "init_lora_weights", True)
            if choice is False:  # PEFT then leaves its layers as torch makes them
                yield getattr(line[-1], "reset_parameters", lambda: None)
            else:
                yield functools.partial(tuner.reset_lora_parameters, adapter, _checked(choice))
        return
    models = [m for m in line if isinstance(m, PreTrainedModel)]
    if models:
        # Children before parents, as transformers does: a model may treat a layer's child specially.
        for module in reversed(line[line.index(models[-1]) :]):
            yield functools.partial(models[-1]._init_weights, module)
    elif callable(own := getattr(line[-1], "reset_parameters", None)):
        yield own


def _checked(choice: Any) -> Any:
    if choice is True or str(choice).lower() == "gaussian":
        return choice
    if choice == "loftq":
        return True  # a layer that is not held in 4 bits
    raise WeightsError(
        f"init_lora_weights={choice!r} is not offered for this layer, or not at all. Use True, 'gaussian', 'pissa' or "
        f"'olora', or compute the adapter beforehand and load it"
    )


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield
