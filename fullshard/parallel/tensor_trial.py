"""Tries a tensor-parallel plan on a small model of the same class: two ranks, as threads, against the whole model.

What a plan leaves out (a module that computes with the number of all heads, a norm of this rank's heads, a product
whose input is no slice) shows in the loss or in a gradient. So plans are tried, not trusted by the name of a family.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.distributed.autograd_collectives import RankGroup, ThreadGroup
from fullshard.models.attention import without_flex
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.tiny_model import (
    SPECIAL,
    VOCABULARY,
    bare_model,
    forked_random,
    quiet_transformers,
    small_models,
)
from fullshard.parallel.tensor_borders import install_borders
from fullshard.parallel.tensor_plan import SplitLayer, check_sizes, split_layers, split_parameters

LayersOf = Callable[[Any], list[SplitLayer]]
"""The layers of a model that are split."""
RANKS = 2
TOKENS = 12
PATIENCE = 20.0
"""Seconds that one rank waits for the other."""
CLOSE = 1e-4
"""The largest difference of a gradient, relative to the largest gradient, in fp32."""


@dataclass(frozen=True)
class TensorVerdict:
    """What a trial has shown."""

    tried: bool
    reason: str = ""
    """Why the plan was not tried, or what is wrong with it; empty if it is right."""
    terms: tuple[str, ...] = ()
    """Parameters besides those of the plan of whose gradient each rank has a term; `*` stands for numbers."""


def try_plan(model: nn.Module, changes: Mapping[str, str] | None, *, tables: bool = True) -> TensorVerdict:
    """Try the plan of a model, with the user's changes; without `tables`, embedding and head stay whole."""
    device, reason = torch.device("cpu"), "no small model of its class can be split over two ranks"
    with forked_random(device), quiet_transformers(), without_flex():
        try:
            for small in small_models(bare_model(get_causal_lm(model)), device, RANKS):
                try:
                    with device:
                        check_sizes(small, split_layers(small, changes, tables=tables), RANKS)
                except ConfigError:
                    continue  # too few heads; the next one is larger
                with device:
                    return _compare(small, functools.partial(split_layers, changes=changes, tables=tables))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return TensorVerdict(False, reason)


def generic(name: str) -> str:
    """A parameter's name with `*` for numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _compare(small: Any, layers_of: LayersOf) -> TensorVerdict:
    small.requires_grad_(True)
    ids = torch.randint(SPECIAL, VOCABULARY, (2, TOKENS))
    loss = _loss(small, ids)
    copies = _run_ranks(small, ids, layers_of)
    if isinstance(copies, Exception):
        return TensorVerdict(True, f"a rank fails: {type(copies).__name__}: {str(copies).splitlines()[0]}")
    expected = dict(small.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for rank, (other, _, _) in enumerate(copies):
        if abs(other - loss) > CLOSE * max(1.0, abs(loss)):
            return TensorVerdict(True, f"the loss is {other:.6f} on rank {rank}, and {loss:.6f} on one device")
    dims, known = copies[0][2], {name for _, _, dims in copies for name, (_, terms) in dims.items() if terms}
    terms = set()
    for name, parameter in expected.items():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        theirs = [grads.get(name) for _, grads, _ in copies]
        got = [torch.zeros_like(grad.chunk(RANKS, dims[name][0])[0] if _is_split(dims, name) else grad)
               if one is None else one for one in theirs]  # fmt: skip
        if _is_split(dims, name):
            got = [torch.cat(got, dims[name][0])]
        elif name in known:
            got = [got[0] + got[1]]
        if all(_is_close(one, grad, largest) for one in got):
            continue
        if name not in known and len(got) > 1 and _is_close(got[0] + got[1], grad, largest):
            terms.add(generic(name))
            continue
        return TensorVerdict(True, f"the gradient of {name} is another one than on one device")
    return TensorVerdict(True, "", tuple(sorted(terms)))


def _is_split(dims: Mapping[str, tuple[int | None, bool]], name: str) -> bool:
    return name in dims and dims[name][0] is not None


def _is_close(one: torch.Tensor, other: torch.Tensor, largest: float) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= CLOSE * largest


def _loss(model: Any, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


Outcome = tuple[float, dict[str, torch.Tensor], dict[str, tuple[int | None, bool]]]
"""Loss, gradients, and by name of a parameter the dim that is split and whether ranks have terms of its gradient."""


def _run_ranks(small: Any, ids: torch.Tensor, layers_of: LayersOf) -> list[Outcome] | Exception:
    """The outcomes of the ranks, or the error of one."""
    outcomes: list[Any] = [None] * RANKS
    group = ThreadGroup(RANKS, PATIENCE)
    copies = [copy.deepcopy(small) for _ in range(RANKS)]

    def run(place: int) -> None:
        try:
            model = copies[place]
            model.zero_grad(set_to_none=True)
            dims = _slice(model, layers_of(model), group.ranks[place])
            loss = _loss(model, ids)
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            outcomes[place] = loss, grads, dims
        except Exception as error:
            outcomes[place] = error
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.close()
    errors = [one for one in outcomes if isinstance(one, Exception)]
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    return first[0] if first else outcomes


def _slice(model: Any, layers: list[SplitLayer], group: RankGroup) -> dict[str, tuple[int | None, bool]]:
    """Let a model compute with a rank's slices."""
    names = {id(p): name for name, p in model.named_parameters()}
    dims, slices = {}, {}
    for split in [split for one in layers for split in split_parameters(one)]:
        whole = split.parameter
        name = names.get(id(whole))
        if name is not None:
            dims[name] = split.dim, split.terms
            value = whole.detach() if split.dim is None else whole.detach().chunk(group.size, split.dim)[group.place]
            slices[id(whole)] = nn.Parameter(value.contiguous())
            names[id(slices[id(whole)])] = name
    install_borders(layers, group)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in slices:
                module.register_parameter(name, slices[id(parameter)])
    return dims
