"""The language model inside a model that also takes images or sound: it is what trains on text, the rest is frozen.

Parts that a forward pass over text does not call are left out: they are neither loaded nor sharded. A `LeftOut` module
stands in their place and knows what they are like; `weights/` copies their tensors from the model's files when the
model is saved.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import ConfigError, first_line
from fullshard.device.torch_private import submodules_of


def whole_class(config: Any) -> Any:
    """transformers' class of the whole model with several kinds of input that a configuration describes; None if it
    describes a language model."""
    from transformers.models.auto import modeling_auto

    for mapping in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"):
        model_class = getattr(modeling_auto, mapping, {}).get(type(config), None)
        if model_class is not None and not config.is_encoder_decoder:
            return model_class
    return None


# --- parts that are left out ------------------------------------------------------------------------------------------


class LeftOut(nn.Module):
    """Stands for a part of a model that is not loaded. Its attributes can be read; calling it is an error."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.__dict__["part"] = part  # not a submodule: it has no values

    def __getattr__(self, name: str) -> Any:
        if "part" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(vars(self)["part"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the part has no values."""
        raise ConfigError(f"{type(self.part).__name__} is not loaded: this model was read for text alone.")


def left_out(model: nn.Module) -> dict[str, nn.Module]:
    """The parts that are left out of a model, on the meta device, by name."""
    return {name: module.part for name, module in model.named_modules() if isinstance(module, LeftOut)}


def left_out_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the parts that are left out of a model, by the names that they would have in it."""
    return {f"{place}.{name}": t for place, part in left_out(model).items() for name, t in part.state_dict().items()}


@contextlib.contextmanager
def complete(model: nn.Module) -> Iterator[None]:
    """Inside, the parts that are left out are back in their places, on the meta device."""
    places = [
        (submodules_of(parent), name, child)
        for parent in model.modules() for name, child in submodules_of(parent).items() if isinstance(child, LeftOut)
    ]  # fmt: skip
    for children, name, child in places:
        children[name] = child.part
    try:
        yield
    finally:
        for children, name, child in places:
            children[name] = child


# --- the language model -----------------------------------------------------------------------------------------------


def other_parts(model: Any) -> list[str]:
    """The names of a model's outermost modules outside its language model and output head; empty for a plain language
    model."""
    if whole_class(getattr(model, "config", None)) is None:
        return []
    inside = {model.get_decoder(), model.get_output_embeddings()}
    if inside & {model, model.base_model}:
        return []

    def outside(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            if child not in inside and inside & {*child.modules()}:
                yield from outside(child, f"{prefix}{name}.")
            elif child not in inside and (isinstance(child, LeftOut) or any(True for _ in child.parameters())):
                yield prefix + name

    return list(outside(model, ""))


def train_language_model(model: Any) -> str:
    """Freeze what is outside the language model of a model on the meta device, and leave out what text does not call;
    returns a line about it, empty for a plain language model."""
    if not (parts := other_parts(model)):
        return ""
    freeze_other_parts(model)
    kept = _called_by_text(model, parts)
    away = {name: model.get_submodule(name) for name in parts if name not in kept}
    for name, part in away.items():
        path, _, own = name.rpartition(".")
        submodules_of(model.get_submodule(path))[own] = LeftOut(part)
    line = f"{type(model).__name__} is trained on text: its language model trains"
    if away:
        count = sum(p.numel() for part in away.values() for p in part.parameters())
        line += f"; {', '.join(away)} ({count:,} parameters): not loaded, copied from its files when it is saved"
    return f"{line}; {', '.join(sorted(kept))}: frozen." if kept else f"{line}."


def freeze_other_parts(model: Any) -> str:
    """Freeze the parameters outside the language model; returns a line about it, empty for a plain language model."""
    if not (parts := other_parts(model)):
        return ""
    modules = (model.get_decoder(), model.get_output_embeddings())
    inside = {id(p) for module in modules if module is not None for p in module.parameters()}
    for p in model.parameters():
        if id(p) not in inside:
            p.requires_grad_(False)
    return f"{type(model).__name__} is trained on text: its language model trains; {', '.join(parts)}: frozen."


class _LanguageModelReached(Exception):
    pass


def _called_by_text(model: Any, parts: Collection[str]) -> set[str]:
    """Which of these parts a forward pass over text calls before the language model; all if that cannot be told."""
    called: set[str] = set()

    def stop(*_: Any) -> None:
        raise _LanguageModelReached

    hooks = [model.get_decoder().register_forward_pre_hook(stop)]
    for name in parts:
        for module in model.get_submodule(name).modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
    try:
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except _LanguageModelReached:
        return called
    except (TypeError, ValueError) as error:  # what its forward pass demands
        raise ConfigError(
            f"{type(model).__name__} does not run on text alone ({first_line(error)[:200]}); expected a causal "
            f"language model, or a model whose language model does."
        ) from None
    except Exception:  # it reads values, which the meta device has not
        return {*parts}
    finally:
        for hook in hooks:
            hook.remove()
    return {*parts}


def outside_pattern(model: nn.Module) -> str | None:
    """What is outside the language model, as PEFT's `exclude_modules`; None for a plain language model."""
    names = other_parts(model)
    return f"({'|'.join(map(re.escape, names))})(|\\..*)" if names else None
