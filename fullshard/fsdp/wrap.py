"""Wrapping policies: which modules become units. The file's name is that of torch's and PyTorch/XLA's policies.

A policy is called for every module below the root, children first: `policy(module=, recurse=, nonwrapped_numel=)`
returns, with `recurse=True`, whether to visit the children of `module`, and with `recurse=False`, whether to make it a
unit. Instead of a policy function, users may pass classes or class names.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import submodules_of
from fullshard.distributed import runtime
from fullshard.spmd.mesh import Mesh

Policy = Callable[..., bool]

NO_FORWARD = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward, which cannot be units."""


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module] | str] | None = None,
) -> bool:
    """Make every module of the given classes or class names a unit; the default is the model's `_no_split_modules`, or
    the layers that repeat in its lists."""
    if recurse:
        return True
    classes = tuple(transformer_layer_cls or ())
    names = {c for c in classes if isinstance(c, str)}
    return isinstance(module, tuple(c for c in classes if isinstance(c, type))) or _class_name(module) in names


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Make a module a unit if it has at least `min_num_params` parameter elements outside of units below it."""
    leaves = (nn.MultiheadAttention,) if force_leaf_modules is None else tuple(force_leaf_modules)
    excluded = NO_FORWARD if exclude_wrap_modules is None else tuple(exclude_wrap_modules)
    large = nonwrapped_numel >= min_num_params
    if recurse:
        return large and not isinstance(module, leaves)
    return large and not isinstance(module, excluded)


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Make every module a unit for which `lambda_fn(module)` is true."""
    return recurse or lambda_fn(module)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make every module a unit that has parameters outside of units below it."""
    return True


def resolve(policy: Any, root: nn.Module) -> Policy | None:
    """The policy function for the user's `auto_wrap_policy`: a function, classes, class names, or None."""
    if policy is None:
        return None
    if isinstance(policy, str):
        policy = {name.strip() for name in policy.split(",")}
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        policy = {policy}
    if isinstance(policy, set | frozenset | list | tuple):
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(policy))
    if not callable(policy):
        raise FSDPError(
            f"auto_wrap_policy={policy!r}: expected a policy such as transformer_auto_wrap_policy, a set of module "
            f"classes or class names, or None"
        )
    function, keywords = policy, {}
    if isinstance(policy, functools.partial):
        function, keywords = policy.func, policy.keywords
    if function is transformer_auto_wrap_policy:
        classes = keywords.get("transformer_layer_cls")
        classes = {classes} if isinstance(classes, str | type) else classes
        classes = _check_layers(classes, root) if classes else _no_split_modules(root)
        if not classes:
            return functools.partial(lambda_auto_wrap_policy, lambda_fn=_unnamed_layers(root).__contains__)
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    if function is lambda_auto_wrap_policy and "lambda_fn" not in keywords:
        raise FSDPError(
            "lambda_auto_wrap_policy needs its function: functools.partial(lambda_auto_wrap_policy, lambda_fn=…)"
        )
    return policy


def find_units(root: nn.Module, policy: Policy | None, ignored: set[nn.Module]) -> list[nn.Module]:
    """The modules below `root` that the policy makes units, children before parents."""
    if policy is None:
        return []
    chosen: list[nn.Module] = []
    seen: set[nn.Module] = {root}
    assigned: set[int] = set()
    counts = getattr(policy, "func", policy) not in (transformer_auto_wrap_policy, lambda_auto_wrap_policy)

    def free_numel(module: nn.Module) -> int:
        """The elements of parameters outside of units; those of one parameter for a policy that does not count them."""
        sizes = (p.numel() for p in module.parameters() if id(p) not in assigned)
        return sum(sizes) if counts else next((size for size in sizes if size), 0)

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child in seen or child in ignored:
                continue
            seen.add(child)
            if policy(module=child, recurse=True, nonwrapped_numel=free_numel(child)):
                visit(child)
            left = free_numel(child)
            if left == 0 or isinstance(child, NO_FORWARD):
                continue
            if policy(module=child, recurse=False, nonwrapped_numel=left):
                chosen.append(child)
                assigned.update(id(p) for p in child.parameters())

    visit(root)
    return chosen


def wrap_each(root: nn.Module, chosen: list[nn.Module], wrapper: Callable[..., Any], mesh: Mesh, options: Any) -> None:
    """Call the user's wrapper on every chosen child, and replace the child by what it returns."""
    for child in chosen:
        wrapped = wrapper(child, mesh, **options)
        if wrapped is not child:
            for parent in root.modules():
                for name, module in submodules_of(parent).items():
                    if module is child:
                        submodules_of(parent)[name] = wrapped


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _no_split_modules(root: nn.Module) -> set[str]:
    """The classes that the model names as its layers, of those that it has: it may list classes of all its variants."""
    names: set[str] = set()
    for module in root.modules():  # the model may be inside another, such as a PeftModel
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names & {_class_name(module) for module in root.modules()}


def _unnamed_layers(root: nn.Module) -> list[nn.Module]:
    """The layers of a model that does not name them; reported once."""
    layers = _repeated_layers(root)
    _report(
        f"transformer_auto_wrap_policy: {_class_name(root)} does not name its layers (_no_split_modules): "
        + (f"its repeated layers are units ({', '.join(_names_of(layers))})" if layers else "it is one unit")
    )
    return layers


@functools.cache
def _report(line: str) -> None:
    runtime.get_logger().info(line)


def _repeated_layers(root: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists (`ModuleList`, `Sequential`) that can be units and share their class with
    another member of the same list."""
    layers: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        alike = Counter(type(child) for child in module.children()) if is_list else {}
        for child in module.children():
            if alike.get(type(child), 0) < 2 or isinstance(child, NO_FORWARD):
                visit(child)
            elif any(True for _ in child.parameters()):
                layers[child] = None

    visit(root)
    return list(layers)


def _check_layers(classes: Iterable[type[nn.Module] | str], root: nn.Module) -> set[type[nn.Module] | str]:
    layers = set(classes)
    for layer in layers:
        if not (isinstance(layer, str) or isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise FSDPError(f"transformer_layer_cls holds {layer!r}; expected module classes or their names")
        matches = any(
            _class_name(m) == layer if isinstance(layer, str) else isinstance(m, layer) for m in root.modules()
        )
        if not matches:
            name = layer if isinstance(layer, str) else layer.__name__
            raise FSDPError(
                f"transformer_auto_wrap_policy: no module of class {name} in {_class_name(root)}. {_candidates(root)}"
            )
    return layers


def _candidates(root: nn.Module) -> str:
    """A hint with the classes a user is likely to mean: those of repeated layers."""
    names = _names_of(_repeated_layers(root)) or sorted({_class_name(m) for m in root.modules()})
    return f"Candidates found in the model: {', '.join(names)}"


def _names_of(layers: Iterable[nn.Module]) -> list[str]:
    """The classes of the layers, most frequent first."""
    return [name for name, _ in Counter(map(_class_name, layers)).most_common()]
