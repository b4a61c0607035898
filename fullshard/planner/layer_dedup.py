"""A model that has few of each kind of layer, and what it tells about the whole model.

Layers are alike if they have the same modules, parameters, buffers and plain attributes (windows, kinds of attention,
flags). `condense` keeps the first two of each kind and the last layer, so that quantization, adapters and the plan take
a fraction of the time; a `Condensed` then gives back every layer. Settings that tell layers of one kind apart
(`may_name_a_layer`) rule it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.device.torch_private import buffers_of, parameters_of
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan
from fullshard.fsdp.plan_layout import plan_unit
from fullshard.models.tiny_model import LAYERS, is_per_layer

T = TypeVar("T")
BOUNDARIES = re.compile(r"(^|_)(first_k_dense_replace|num_dense_layers|moe_layer_(start|end)_index)$")
"""Settings of configurations that are the index of a layer: where dense layers end and mixtures of experts begin."""


class CannotExpandError(Exception):
    """The condensed model does not tell what the whole one is like."""


@dataclass(frozen=True)
class Stack:
    """A list of layers of which others were left out."""

    layers: nn.ModuleList
    stands_for: tuple[int, ...]
    """For each layer of the whole model, the position in `layers` of the one that stands for it."""


class Condensed:
    """What is left out of a condensed model, and how to put it back: for names, parameters, units and counts.

    Made when the model is complete: adapters change the names of modules.
    """

    def __init__(self, model: nn.Module, stacks: Iterable[Stack]) -> None:
        by_module = {id(stack.layers): stack for stack in stacks}
        self.stacks = {name: by_module[id(m)] for name, m in model.named_modules() if id(m) in by_module}
        """By the names of their lists in the model."""
        layers = {layer for stack in self.stacks.values() for layer in stack.layers}
        kinds = {type(layer) for layer in layers}
        if len(self.stacks) != len(by_module) or any(type(m) in kinds and m not in layers for m in model.modules()):
            raise CannotExpandError("layers were copied or replaced")

    def expand(self, items: Sequence[T], name_of: Callable[[T], str]) -> Iterator[tuple[T, Callable[[str], str]]]:
        """The items of the whole model in module order: those of the condensed one, and the function that renames what
        is inside their layer. All items of a stack stand together."""
        by_place: dict[str | None, dict[int, list[T]]] = {}
        order: list[tuple[str | None, T]] = []
        for item in items:
            place = self._place(name_of(item))
            if place is None:
                order.append((None, item))
                continue
            if place[0] not in by_place:
                order.append((place[0], item))
            by_place.setdefault(place[0], {}).setdefault(place[1], []).append(item)
        for stack, first in order:
            if stack is None:
                yield first, lambda name: name
                continue
            for index, position in enumerate(self.stacks[stack].stands_for):
                rename = self._renamer(stack, position, index)
                for item in by_place[stack].get(position, ()):
                    yield item, rename

    def expand_plan(self, plan: ShardingPlan) -> ShardingPlan:
        """The plan of the whole model."""
        if not self.stacks:
            return plan
        whole = [unit if self._place(unit.name) else self._with_all_layers(unit) for unit in plan.units]
        units = [_renamed_unit(unit, rename) for unit, rename in self.expand(whole, lambda unit: unit.name)]
        return replace(plan, units=tuple(units))

    def _with_all_layers(self, unit: UnitPlan) -> UnitPlan:
        """A unit outside the layers, with its parameters inside all of them."""
        for p in unit.parameters:
            if len({self._place(name) for name in p.names}) > 1:
                raise CannotExpandError(f"{p.names} are one parameter of several layers")
        parameters = self.expand(unit.parameters, lambda p: p.name)
        return plan_unit(unit.name, unit.module, [_renamed(p, rename) for p, rename in parameters], unit.axes)

    def count(self, model: nn.Module, count: Callable[[nn.Module], int]) -> int:
        """A number for the whole model that `count` finds for a module, such as its parameters."""
        more = (
            (stack.stands_for.count(position) - 1) * count(layer)
            for stack in self.stacks.values()
            for position, layer in enumerate(stack.layers)
        )
        return count(model) + sum(more)

    def _place(self, name: str) -> tuple[str, int] | None:
        """The stack that a name is inside, and the position of its layer."""
        for stack in self.stacks:
            if name.startswith(f"{stack}."):
                return stack, int(name[len(stack) + 1 :].partition(".")[0])
        return None

    def _renamer(self, stack: str, position: int, index: int) -> Callable[[str], str]:
        old, new = f"{stack}.{position}", f"{stack}.{index}"

        def rename(name: str) -> str:
            if name != old and not name.startswith(f"{old}."):
                raise CannotExpandError(f"{name} belongs to {old}, but is not inside it")
            return new + name[len(old) :]

        return rename


def _renamed(p: ParameterPlan, rename: Callable[[str], str]) -> ParameterPlan:
    return replace(p, names=tuple(map(rename, p.names)))


def _renamed_unit(unit: UnitPlan, rename: Callable[[str], str]) -> UnitPlan:
    name = rename(unit.name)
    if name == unit.name:
        return unit
    return plan_unit(name, unit.module, [_renamed(p, rename) for p in unit.parameters], unit.axes)


# --- condensing -----------------------------------------------------------------------------------------------------


def condense(model: Any) -> list[Stack]:
    """Leave out layers of a model on the meta device, in place, that others stand for.

    The lists of layers are those of the classes that the model names as its layers (`_no_split_modules`). Layers that
    share a parameter or module with anything else, or point to another layer, stay as they are.
    """
    stacks = []
    for layers in _layer_lists(model):
        parts = [_Parts(layer) for layer in layers]
        if not _stand_alone(model, layers, parts):
            continue
        stands_for = _stand_ins(_kinds(parts))
        kept = sorted(set(stands_for))
        if len(kept) == len(layers):
            continue
        _cut_configs(model, len(layers), kept)
        chosen = [layers[index] for index in kept]
        del layers[:]
        layers.extend(chosen)
        stacks.append(Stack(layers, tuple(map(kept.index, stands_for))))
    return stacks


def _stand_ins(kinds: Sequence[Any]) -> list[int]:
    """For each layer the index of the one that stands for it: the second of its kind.

    The first of a kind and the last layer stand for themselves: they begin or end what a pass keeps for all layers,
    such as rotary embeddings and masks, and the first may get inputs without gradients.
    """
    seen: dict[Any, list[int]] = {}
    stand_ins = []
    for index, kind in enumerate(kinds):
        alike = seen.setdefault(kind, [])
        alike.append(index)
        stand_ins.append(index if len(alike) < 2 or index == len(kinds) - 1 else alike[1])
    return stand_ins


def _layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost lists of layers."""
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    lists = [
        m for m in model.modules()
        if type(m) is nn.ModuleList and len(m) > 1 and all(type(layer).__name__ in names for layer in m)
    ]  # fmt: skip
    inside = {below for layers in lists for layer in layers for below in layer.modules()}
    return [layers for layers in lists if layers not in inside]


class _Parts:
    """What a layer is made of."""

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.named_modules())
        self.ids = {id(module) for _, module in modules}
        self.attributes: dict[tuple[str, str], Any] = {}
        """The public attributes of its modules, by the module's name and their own."""
        self.structure: list[Any] = []
        for path, module in modules:
            self.structure.append((path, type(module)))
            for tensors in (parameters_of(module), buffers_of(module)):
                for key, t in tensors.items():
                    if t is not None:
                        self.structure.append((key, t.shape, t.dtype, t.requires_grad))
                        self.ids.add(id(t))
            self.attributes |= {(path, key): value for key, value in vars(module).items() if key[0] != "_"}


def _stand_alone(model: nn.Module, layers: nn.ModuleList, parts: Sequence[_Parts]) -> bool:
    """Whether layers share nothing with each other or with the rest of the model, and use nothing of each other."""
    outside: set[int] = set()
    waiting, seen = [model], {layers}
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += module.children()
            tensors = (*parameters_of(module).values(), *buffers_of(module).values())
            outside |= {id(module), *(id(t) for t in tensors if t is not None)}
    together = set().union(*(part.ids for part in parts))
    if outside & together or len(together) < sum(len(part.ids) for part in parts):
        return False
    if any("per_layer" in name and id(p) in outside for name, p in model.named_parameters()):
        return False  # Gemma 3n: one table with the inputs of all layers, which the forward pass divides among them
    return not any("shared_layer" in key and value for part in parts for (_, key), value in part.attributes.items())


def _kinds(parts: Sequence[_Parts]) -> list[tuple[Any, ...]]:
    """For each layer everything that decides how it runs and what it holds, but its values and its index."""
    index_keys = {key for part in parts for key in part.attributes}
    for index, part in enumerate(parts):
        index_keys -= {key for key, value in part.attributes.items() if type(value) is not int or value != index}
    return [
        (*part.structure, *((k, _plain(v, i)) for k, v in part.attributes.items() if k not in index_keys))
        for i, part in enumerate(parts)
    ]


def _plain(value: Any, index: int) -> Any:
    """An attribute as far as it can distinguish kinds of layers. Factors only matter by being zero or not."""
    if isinstance(value, float):
        return bool(value)
    if value is None or isinstance(value, bool | int | torch.dtype):
        return value
    if isinstance(value, str):
        return re.sub(rf"(?<!\d){index}(?!\d)", "#", value)
    if isinstance(value, tuple | list):
        return tuple(_plain(one, index) for one in value[:16])
    return getattr(value, "__qualname__", type(value))


def _cut_configs(model: nn.Module, layers: int, kept: Sequence[int]) -> None:
    """Let the configurations of a model describe the layers that are left: forward passes read lists with an entry per
    layer."""
    configs = {id(c): c for m in model.modules() for c in _configs(m)}
    for config in configs.values():
        for name, value in list(vars(config).items()):
            if name.startswith("_"):
                continue
            if is_per_layer(value, layers):
                setattr(config, name, type(value)(value[i] for i in kept))
            elif type(value) is int and value == layers and LAYERS.search(name):
                setattr(config, name, len(kept))
            elif type(value) is int and BOUNDARIES.search(name):
                setattr(config, name, sum(index < value for index in kept))


def _configs(module: Any) -> Iterator[Any]:
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        yield config
        yield from (v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type"))


# --- settings that name layers --------------------------------------------------------------------------------------

_ANYTHING = re.compile(r"\.[*+]\??|\*")
_HARMLESS = re.compile(r"[A-Za-z_\-.*()|^$\\:\s]*")


def may_name_a_layer(pattern: str) -> bool:
    """Whether a name, file-name pattern or regular expression could match one layer and not another like it.

    It cannot if it has no index and nothing that could stand for some indices only; in doubt it may.
    """
    text = _ANYTHING.sub("*", pattern)
    if re.search(r"(?<![A-Za-z_\d])\d+(?![A-Za-z_\d])", text):
        return True
    text = re.sub(r"[A-Za-z_]\w*|\d+[A-Za-z_]\w*", "a", text).replace("\\.", ".").replace("(?:", "(")
    return bool(re.search(r"\.{2,}", text)) or "\\" in text or _HARMLESS.fullmatch(text) is None


def patterns_in(values: Any) -> Iterator[str]:
    """The text in a setting: itself, or all text in a list or in the keys of a mapping."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from (key for key in values if isinstance(key, str))
    elif isinstance(values, Iterable):
        yield from (one for one in values if isinstance(one, str))
