"""How much activation memory each layer may keep: levels, and the choice among them under a budget.

Choosing is a pure function of bytes and costs. Measuring them is in `layer_memory.py`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from fullshard.activations.checkpointing import checkpoint_module, keep_activations
from fullshard.activations.slices import SliceCount, run_whole, slice_module
from fullshard.fsdp.compile import VARIANT

Kind = TypeVar("Kind")
MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
"""The names of the feed-forward part in the layers of language models."""
SLICED = "_fullshard_sliced_parts"
"""The attribute of a layer with parts that run in slices of the sequence: its `SlicedParts`."""
HALVINGS = 24
"""How often the interval is halved in which the room lies that just fits."""


class Level(enum.IntEnum):
    """What a layer keeps for backward; a higher level keeps less."""

    KEEP_ALL = 0
    RECOMPUTE_MLP = 1
    """Recompute the inside of the feed-forward part, which has the largest activations; of a layer that runs in slices
    of the sequence, the inside of every part that does."""
    RECOMPUTE = 2
    """Recompute the layer from its input."""
    OFFLOAD = 3
    """The same, with the input in host memory."""


def set_level(layer: nn.Module, level: Level, *, reentrant: bool = False) -> None:
    """Let a layer keep what a level says, from its next forward on. Slices of the sequence are computed again in
    backward, so a layer that keeps everything has none."""
    mlp, sliced = mlp_of(layer), sliced_parts(layer)
    layer.__dict__[VARIANT] = level
    keep_activations(layer)
    if mlp is not None:
        keep_activations(mlp)
    for part in sliced:
        if level is Level.KEEP_ALL:
            run_whole(part)
        else:
            slice_module(part, layer.__dict__[SLICED].slices)
    if level is Level.RECOMPUTE_MLP and mlp is not None and not sliced:
        checkpoint_module(mlp)
    elif level >= Level.RECOMPUTE:
        checkpoint_module(layer, reentrant=reentrant, offload=level is Level.OFFLOAD)


class SlicedParts(NamedTuple):
    """The parts of a layer that run in slices of the sequence."""

    modules: tuple[nn.Module, ...]
    slices: SliceCount


def run_in_slices(layer: nn.Module, parts: Sequence[nn.Module], count: SliceCount) -> None:
    """Let parts of a layer run in slices of the sequence, unless it keeps everything."""
    layer.__dict__[SLICED] = SlicedParts(tuple(parts), count)
    for part in parts:
        slice_module(part, count)


def sliced_parts(layer: nn.Module) -> Sequence[nn.Module]:
    """The parts of a layer that run in slices."""
    marked: SlicedParts | None = vars(layer).get(SLICED)
    return () if marked is None else marked.modules


def has_slices(model: nn.Module) -> bool:
    """Whether parts of a model's layers run in slices of the sequence."""
    return any(sliced_parts(module) for module in model.modules())


def mlp_of(layer: nn.Module) -> nn.Module | None:
    """The feed-forward part of a layer; None where it has none of a known name."""
    return next((child for name, child in layer.named_children() if name in MLPS), None)


def full_checkpointing(layers: int, offload: bool) -> list[Level]:
    """The levels that need the least memory. The last layer's input is needed again at once: it is never moved."""
    return [Level.OFFLOAD if offload else Level.RECOMPUTE] * (layers - 1) + [Level.RECOMPUTE] * min(1, layers)


def limit_offload(levels: Sequence[Level], most: int | None) -> list[Level]:
    """The levels with at most so many inputs on the host: those of the first layers, which wait the longest."""
    if most is None:
        return list(levels)
    moved = [i for i, level in enumerate(levels) if level is Level.OFFLOAD][:most]
    return [Level.RECOMPUTE if level is Level.OFFLOAD and i not in moved else level for i, level in enumerate(levels)]


def kinds_of(layers: Sequence[nn.Module]) -> list[int]:
    """The kind of each layer: layers of one class with parameters of the same shapes keep the same."""
    known: dict[Any, int] = {}
    shapes = [(type(layer), *((name, p.shape) for name, p in layer.named_parameters())) for layer in layers]
    return [known.setdefault(shape, len(known)) for shape in shapes]


def recompute_costs(layer: nn.Module) -> dict[Level, float]:
    """What recomputing a layer costs at each level that it can have: products per token. To move an input costs little
    beside them."""
    mlp, sliced, whole = mlp_of(layer), sliced_parts(layer), _products(layer)
    parts = sliced or ([mlp] if mlp is not None else [])
    part = {Level.RECOMPUTE_MLP: sum(map(_products, parts))} if parts else {}
    return {Level.KEEP_ALL: 0.0, **part, Level.RECOMPUTE: whole, Level.OFFLOAD: 1.02 * whole}


def _products(module: nn.Module) -> float:
    """The elements of a module's matrices."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):  # whatever its weight is stored as
        return float(module.in_features * module.out_features)
    own = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
    return own + sum(map(_products, module.children()))


def peak_of(sizes: Mapping[Kind, Mapping[Level, float]], kinds: Sequence[Kind], levels: Sequence[Level]) -> float:
    """The most bytes of activations at a time: when the backward of a layer begins, the layers before it hold what they
    keep, and the layer itself has everything."""
    peak = before = 0.0
    for kind, level in zip(kinds, levels, strict=True):
        peak = max(peak, before + max(sizes[kind].values()))
        before += sizes[kind][level]
    return peak


def describe_levels(levels: Sequence[Level]) -> str:
    """Levels in words, such as `20 of 32 layers keep all, 12 recompute the MLP`."""
    words = {
        Level.KEEP_ALL: "keep all", Level.RECOMPUTE_MLP: "recompute the MLP", Level.RECOMPUTE: "are recomputed",
        Level.OFFLOAD: "are recomputed from inputs on the host",
    }  # fmt: skip
    parts = [f"{levels.count(level)} {word}" for level, word in words.items() if level in levels]
    first, *rest = parts or ["no layers"]
    count, _, what = first.partition(" ")
    if not rest:
        return f"all {count} layers {what}" if levels else "no layers"
    return ", ".join([f"{count} of {len(levels)} layers {what}", *rest])


# --- the choice -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LevelChoice(Generic[Kind]):
    """What decides the levels of a model's layers under a budget, planned or measured: bytes, costs and the peak."""

    kinds: Sequence[Kind]
    """The kinds of all layers in order."""
    sizes: Mapping[Kind, Mapping[Level, float]]
    """By kind and level, the bytes that a layer keeps for backward."""
    costs: Mapping[Kind, Mapping[Level, float]]
    """What recomputing a layer costs: see `recompute_costs`."""
    base: Sequence[Level]
    """The levels that need the least memory."""
    peak: Callable[[Sequence[Level]], float]
    """The most bytes of a step with these levels, up to the update of the weights."""
    limit: float
    """What may be allocated."""
    rest: float = 0.0
    """In use between steps."""
    floor: float = 0.0
    """What the update of the weights needs, whatever layers keep."""
    on_host: int | None = None
    """The most layers whose inputs the host has memory for; None: all of them."""

    def levels(self, error: float = 0.0) -> list[Level]:
        """The levels with the least recomputation whose peak is within the limit; `base` if there are none. `error` is
        what steps take beyond `peak`."""
        fits: dict[tuple[Level, ...], bool] = {}

        def fitting(room: float) -> list[Level] | None:
            levels = self._within(room)
            if tuple(levels) not in fits:
                fits[tuple(levels)] = self.peak(levels) + error <= self.limit
            return levels if fits[tuple(levels)] else None

        if (most := fitting(math.inf)) is not None:
            return most
        if (best := fitting(0.0)) is None:
            return limit_offload(self.base, self.on_host)
        below, above = 0.0, sum(max(self.sizes[kind].values()) for kind in self.kinds)
        for _ in range(HALVINGS):
            middle = (below + above) / 2
            if (levels := fitting(middle)) is not None:
                best, below = levels, middle
            else:
                above = middle
        return self._raised(best, lambda levels: self.peak(levels) + error <= self.limit)

    def predicted(self, levels: Sequence[Level], error: float = 0.0) -> float:
        """The peak of a run with these levels."""
        return max(self.peak(levels) + error, self.floor)

    def _within(self, room: float) -> list[Level]:
        """The levels of layers that may keep `room` bytes together. The input of the last layer is needed again at once
        and stays."""
        levels = choose_levels(*self._merged, room)
        return limit_offload([*levels[:-1], min(levels[-1], Level.RECOMPUTE)], self.on_host)

    def _raised(self, levels: list[Level], fits: Callable[[list[Level]], bool]) -> list[Level]:
        """The levels with as many layers of a kind raised as still fit, what saves the most recomputation per byte
        first. Room is not used up before: what one more byte lets a layer keep may be more than fits."""
        sizes, costs, kinds = self._merged
        raises = [
            ((costs[kind][before] - costs[kind][after]) / max(each[after] - each[before], 1.0), kind, before, after)
            for kind, each in sizes.items()
            for before in each
            for after in each
            if costs[kind][before] > costs[kind][after] and kind in kinds
        ]
        for _, kind, before, after in sorted(raises, key=lambda one: -one[0]):
            places = [i for i, one in enumerate(kinds) if one == kind]
            most = sum(levels[i] is before for i in places)

            def raised(count: int) -> list[Level]:
                chosen = [levels[i] for i in places]  # noqa: B023 - called before the next turn
                for _ in range(count):
                    chosen[chosen.index(before)] = after  # noqa: B023
                by_place = dict(zip(places, sorted(chosen, reverse=True), strict=True))  # noqa: B023
                return [by_place.get(i, level) for i, level in enumerate(levels)]  # noqa: B023

            below, above = 0, most + 1
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if fits(raised(middle)) else (below, middle)
            levels = raised(below) if below else levels
        return levels

    @cached_property
    def _merged(self) -> tuple[Any, Any, list[Kind]]:
        """Sizes, costs and kinds of layers. Kinds that keep and cost the same are one, so that those that keep more
        come last among all of them."""
        first: dict[Any, Kind] = {}
        same = {
            kind: first.setdefault((*self.sizes[kind].items(), *self.costs[kind].items()), kind) for kind in self.sizes
        }
        return self.sizes, self.costs, [same[kind] for kind in self.kinds]


def choose_levels(
    bytes_by_level: Mapping[Kind, Mapping[Level, float]],
    costs: Mapping[Kind, Mapping[Level, float]],
    layers: Sequence[Kind],
    budget: float,
) -> list[Level]:
    """The level of each layer: little recomputation, within a memory budget.

    For each kind of layer, the bytes that a layer keeps and the cost of recomputing it, by level; the levels of a kind
    are those in `bytes_by_level`. `layers` are the kinds of all layers in order. From the levels with the fewest bytes,
    layers are raised while anything fits, what saves the most recomputation per byte first. The result costs at most
    one layer's recomputation more than the best one. If nothing fits, it is the levels with the fewest bytes.

    Layers that keep more come last: they are released first in backward, before earlier layers are recomputed.
    """
    chosen = {kind: [min(sizes, key=lambda level: (sizes[level], level))] for kind, sizes in bytes_by_level.items()}
    chosen = {kind: chosen[kind] * layers.count(kind) for kind in dict.fromkeys(layers)}
    free = budget - sum(bytes_by_level[kind][level] for kind, levels in chosen.items() for level in levels)
    while (best := _best_raise(bytes_by_level, costs, chosen, free)) is not None:
        kind, before, after = best
        chosen[kind].remove(before)
        chosen[kind].append(after)
        free -= bytes_by_level[kind][after] - bytes_by_level[kind][before]
    for levels in chosen.values():
        levels.sort(reverse=True)
    return [chosen[kind].pop(0) for kind in layers]


def _best_raise(
    bytes_by_level: Mapping[Kind, Mapping[Level, float]],
    costs: Mapping[Kind, Mapping[Level, float]],
    chosen: Mapping[Kind, list[Level]],
    free: float,
) -> tuple[Kind, Level, Level] | None:
    """The kind of a layer to raise, and its level before and after; None if nothing fits, or nothing is recomputed."""
    raises = []
    for kind, levels in chosen.items():
        sizes, cost = bytes_by_level[kind], costs[kind]
        for before in sorted(set(levels)):
            for after in sizes:
                saves, needs = cost[before] - cost[after], sizes[after] - sizes[before]
                if saves > 0 and needs <= free:
                    raises.append((saves / max(needs, 1.0), saves, kind, before, after))
    return max(raises, key=lambda one: one[:2])[2:] if raises else None
