"""The layers that an adapter changes, merged one at a time by PEFT's own layers.

The model has no values but the adapter's. A layer that is asked for gets its tensors from the base's files, all of them
at once (an adapter may change its bias too), is merged and let go of. Whatever the adapter holds must take part in
that: what would be left out is found beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.errors import WeightsError
from fullshard.weights.key_mapping import plain_model, plain_name
from fullshard.weights.slice_reader import TensorReader

KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin a LoRA (`init_lora_weights`) that leave the base as it is."""
CHANGE_BASE = ("pissa", "olora")
"""Ways that take a part off the base's weights, which PEFT takes off again whenever such an adapter is loaded."""


def check_kind(config: Any) -> None:
    """Refuse adapters that cannot be merged, by their configuration."""
    if config.is_prompt_learning:
        raise WeightsError(f"a {kind_of(config)} adapter changes the model's input, no weights; it cannot be merged")
    start = getattr(config, "init_lora_weights", None)
    if start not in (*KEEP_BASE, *CHANGE_BASE):
        raise WeightsError(
            f"an adapter with init_lora_weights={start!r} counts on base weights that were changed before training, in "
            f"a way that the files do not tell; save it as a plain LoRA with PEFT "
            f"(path_initial_model_for_weight_conversion=) and merge that"
        )


def kind_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


class MergedLayers:
    """What the adapter in `model` (a `PeftModel` on the meta device but for the adapter) makes of the base's tensors.

    `brought` has what the adapter's files gave values, by name; `form` the tensors of the result; `start` is the way
    the adapter began (`init_lora_weights`).
    """

    def __init__(self, model: Any, brought: Mapping[str, torch.Tensor], form: Mapping[str, torch.Tensor], start: Any):
        self.form, self.start = form, start
        self.adapter = next(iter(model.peft_config))
        self.replaced: dict[str, torch.Tensor] = {}
        """Tensors that the adapter brings whole."""
        self.layers: dict[str, tuple[nn.Module, list[Any], dict[str, str]]] = {}
        """By tensor: the base's layer, the adapter's layers around it, and its tensors' full names by their own."""
        self.ready: dict[str, torch.Tensor] = {}
        self._find(model, brought)

    def value(self, name: str, readers: Mapping[str, TensorReader]) -> torch.Tensor:
        """A tensor of the result."""
        dtype = self.form[name].dtype
        if name in self.layers:
            if name not in self.ready:
                self.ready = self._merge(*self.layers[name], readers)
            return self.ready.pop(name)
        return (self.replaced[name] if name in self.replaced else readers[name][()]).to(dtype)

    def _merge(
        self, base: nn.Module, around: list[Any], names: dict[str, str], readers: Mapping[str, TensorReader]
    ) -> dict[str, torch.Tensor]:
        values = {
            own: (self.replaced[full].clone() if full in self.replaced else readers[full][()]).to(self.form[full].dtype)
            for own, full in names.items()
        }
        with _filled(base, values):
            for layer in around:
                self._begin(layer)
                try:
                    layer.merge(adapter_names=[self.adapter])
                except (NotImplementedError, ValueError) as error:
                    raise WeightsError(f"PEFT cannot merge {next(iter(names.values()))}: {error}") from error
                if self.adapter not in layer.merged_adapters:
                    raise WeightsError(f"PEFT's {type(layer).__name__} did not merge {', '.join(names.values())}")
                layer.merged_adapters.clear()
            result = around[0].get_base_layer()  # some put another layer in the base's place
            found = {full: result.get_parameter(own).detach().to(self.form[full].dtype) for own, full in names.items()}
        assert not any(value.is_meta for value in found.values())
        return found

    def _begin(self, layer: Any) -> None:
        """Take off the base what the adapter's first values took off it; its trained values stay."""
        from peft.tuners.lora import Linear

        begins: bool = isinstance(layer, Linear) and self.start in CHANGE_BASE
        if not begins:
            return
        pair = [layer.lora_A[self.adapter].weight, layer.lora_B[self.adapter].weight]
        trained = [weight.data for weight in pair]
        layer.pissa_init(self.adapter, self.start) if self.start == "pissa" else layer.olora_init(self.adapter)
        for weight, value in zip(pair, trained, strict=True):
            weight.data = value

    # --- what takes part ----------------------------------------------------------------------------------------------

    def _find(self, model: Any, brought: Mapping[str, torch.Tensor]) -> None:
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer

        prefix, plain = plain_model(model)
        tied = getattr(plain, "all_tied_weights_keys", None) or {}
        taking_part: set[int] = set()
        for name, layer in model.named_modules():
            if not isinstance(layer, BaseTunerLayer):
                continue
            base = layer.get_base_layer()
            own = {n: plain_name(f"{name}.{n}", prefix) for n, _ in base.named_parameters(recurse=False)}
            if isinstance(layer, ParamWrapper):
                own = {layer.parameter_name: own[layer.parameter_name]}
            elif len(list(base.parameters())) > len(own):
                continue  # it changes layers inside its base too
            values = list(_values_of(layer))
            if not own or any(value.is_meta for value in values) or not self.form.keys() >= set(own.values()):
                continue
            if not hasattr(layer, "trainable_tokens_delta"):
                _check_ties(own.values(), tied)
            taking_part |= {id(value) for value in values}
            for full in own.values():
                self.layers.setdefault(full, (base, [], own))[1].append(layer)
        left = []
        for name, value in brought.items():
            full = plain_name(name, prefix)
            if ".modules_to_save." in name:
                _check_ties([full], tied)
            if full in self.form:
                self.replaced[full] = value
            elif id(value) not in taking_part and not _repeats(full, value, tied, brought, prefix):
                left.append(name)
        if left:
            raise WeightsError(
                f"the adapter holds {len(left)} tensor(s) that a merge does not know, so the result would lack them: "
                f"{', '.join(left[:5])}. Merge it with PEFT (merge_and_unload), or leave it an adapter"
            )


def _check_ties(names: Iterable[str], tied: Mapping[str, str]) -> None:
    for full in names:
        if full in tied or full in tied.values():
            raise WeightsError(
                f"the adapter changes {full}, which is tied to another weight; merge it with PEFT, or untie the base "
                f"(tie_word_embeddings) first"
            )


def _repeats(
    full: str, value: torch.Tensor, tied: Mapping[str, str], brought: Mapping[str, torch.Tensor], prefix: str
) -> bool:
    """Whether a tensor is another name's, which the adapter brings as well: a resized embedding and its head."""
    first = next((v for n, v in brought.items() if plain_name(n, prefix) == tied.get(full)), None)
    return first is not None and torch.equal(first, value)


def _values_of(layer: Any) -> Iterator[torch.Tensor]:
    """An adapter layer's own tensors, without its base's."""
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if not name.startswith(("base_layer.", "trainable_tokens_original.")):
            yield tensor


@contextlib.contextmanager
def _filled(layer: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The layer with tensors in memory."""
    empty = dict(layer._parameters)
    for name, value in values.items():
        layer._parameters[name] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        layer._parameters.update(empty)
