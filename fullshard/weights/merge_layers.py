"""`MergedLayers`: merges the layers that an adapter changes, one at a time, with PEFT's own layers.

Only the adapter has values; the rest of the model is on the meta device. A layer gets all its tensors from the base's
files at once (an adapter may change its bias too), is merged and freed. Every tensor of the adapter must be used by the
merge; unused ones are found beforehand and raise an error.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import WeightsError
from fullshard.device.torch_private import parameters_of
from fullshard.quant import bnb_format, sharded_groups
from fullshard.quant.config import Quantization
from fullshard.quant.quantize import expert_modules, linears
from fullshard.quant.sharded_groups import Scheme
from fullshard.weights.key_mapping import plain_model, plain_name
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.slice_reader import Cuts, Job, Stored, TensorReader


class _Whole(TensorReader):
    """A weight that is computed whole, in dtype `dtype`; `transposed` for the weight of a `Conv1D`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool):
        self.shape, self.dtype, self.transposed = shape, dtype, transposed
        self.form = shape[::-1] if transposed else shape
        """The shape in which it is quantized: [out, in]."""

    @abstractmethod
    def value(self) -> torch.Tensor:
        """The whole weight as [out, in]."""

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        if out.numel():
            yield lambda: out.copy_((self.value().T if self.transposed else self.value())[cuts])


class Rounded(_Whole):
    """A dense weight, converted to dtype `held` (that of the training run), quantized and dequantized."""

    def __init__(
        self, reader: TensorReader, scheme: Scheme, stored_dtype: torch.dtype, dtype: torch.dtype, transposed: bool
    ):
        super().__init__(reader.shape, dtype, transposed)
        self.reader, self.scheme, self.stored_dtype = reader, scheme, stored_dtype

    def value(self) -> torch.Tensor:
        """The whole weight, quantized and dequantized."""
        dense = self.reader[()].to(self.stored_dtype)
        flat = (dense.T if self.transposed else dense).reshape(-1)
        parts = sharded_groups.quantize_shard(flat, math.prod(self.shape), self.scheme)
        return sharded_groups.dense(parts, self.form, self.scheme, self.dtype)


class RoundedStack(TensorReader):
    """A fused expert weight, quantized and dequantized one expert at a time."""

    def __init__(self, reader: TensorReader, scheme: Scheme, stored_dtype: torch.dtype, dtype: torch.dtype):
        self.shape, self.dtype = reader.shape, dtype
        self.reader, self.scheme, self.stored_dtype = reader, scheme, stored_dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """A job per expert."""
        for part, i in zip(out, range(cuts[0].start, cuts[0].stop), strict=True):
            yield functools.partial(self._one, part, i, cuts[1:])

    def _one(self, out: torch.Tensor, i: int, cuts: Cuts) -> None:
        shape = self.shape[1:]
        flat = self.reader[i : i + 1].to(self.stored_dtype).reshape(-1)
        parts = sharded_groups.quantize_shard(flat, math.prod(shape), self.scheme)
        out.copy_(sharded_groups.dense(parts, shape, self.scheme, self.dtype)[cuts])


class Dequantized(_Whole):
    """A weight stored in 4 bits, under bitsandbytes' keys."""

    def __init__(
        self, source: SafetensorsFiles, name: str, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool
    ):
        super().__init__(shape, dtype, transposed)
        self.parts = {key: entry for key, entry in source.entries.items() if key == name or key.startswith(f"{name}.")}
        self.source, self.name = source, name

    def value(self) -> torch.Tensor:
        """The whole weight, dequantized."""
        tensors = {key: Stored(self.source, entry)[()] for key, entry in self.parts.items()}
        parts, scheme = sharded_groups.from_state(*bnb_format.from_tensors(tensors, self.name))
        return sharded_groups.dense(parts, self.form, scheme, self.dtype)


def rounded_readers(
    model: nn.Module,
    source: SafetensorsFiles,
    readers: Mapping[str, TensorReader],
    how: Quantization,
    stored_dtype: torch.dtype,
    dtype: Any,
) -> dict[str, TensorReader]:
    """Readers for the weights that are quantized, in `dtype`, by their names in the model (which is on meta)."""
    rounded: dict[str, TensorReader] = {}
    for name, linear, form in linears(model, how.skip):
        key = f"{name}.weight"
        if bnb_format.is_quantized(source.entries, key):
            rounded[key] = Dequantized(source, key, tuple(linear.weight.shape), dtype, form.transposed)
        elif key in readers:
            rounded[key] = Rounded(readers[key], how.scheme, stored_dtype, dtype, form.transposed)
    for name, _, weights in expert_modules(model, how.skip):
        for own in weights:
            if (key := f"{name}.{own}") in readers:
                rounded[key] = RoundedStack(readers[key], how.scheme, stored_dtype, dtype)
    return rounded


KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` methods that do not change the base weights."""
CHANGE_BASE = ("pissa", "olora")
"""Methods that subtract the initial adapter from the base weights; PEFT does so again when it loads the adapter."""


def check_kind(config: Any) -> None:
    """Raise `WeightsError` for adapters whose configuration cannot be merged."""
    if config.is_prompt_learning:
        raise WeightsError(
            f"{kind_of(config)} adapters change the model's input, not its weights, and cannot be merged"
        )
    method = getattr(config, "init_lora_weights", None)
    if method not in (*KEEP_BASE, *CHANGE_BASE):
        raise WeightsError(
            f"an adapter with init_lora_weights={method!r} needs base weights that were changed before training, and "
            f"the change is not in its files; save it as plain LoRA with PEFT "
            f"(path_initial_model_for_weight_conversion=) and merge that"
        )


def kind_of(config: Any) -> str:
    """The name of an adapter's method, such as LORA."""
    return str(getattr(config.peft_type, "value", config.peft_type))


class MergedLayers:
    """The merged tensors of a `PeftModel` in which only the adapter has values.

    `loaded` has the tensors from the adapter's files, by name; `form` the tensors of the result, on meta; `method` is
    the adapter's `init_lora_weights`.
    """

    def __init__(self, model: Any, loaded: Mapping[str, torch.Tensor], form: Mapping[str, torch.Tensor], method: Any):
        self.form, self.method = form, method
        self.adapter = next(iter(model.peft_config))
        self.replaced: dict[str, torch.Tensor] = {}
        """Tensors that the adapter replaces as a whole."""
        self.layers: dict[str, tuple[nn.Module, list[Any], dict[str, str]]] = {}
        """By tensor name: the base layer, its adapter layers, and the full names of its tensors by local name."""
        self.ready: dict[str, torch.Tensor] = {}
        self._find(model, loaded)

    def value(self, name: str, readers: Mapping[str, TensorReader]) -> torch.Tensor:
        """A tensor of the merged model."""
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
                self._subtract_initial(layer)
                try:
                    layer.merge(adapter_names=[self.adapter])
                except (NotImplementedError, ValueError) as error:
                    raise WeightsError(f"PEFT cannot merge {next(iter(names.values()))}: {error}") from error
                if self.adapter not in layer.merged_adapters:
                    raise WeightsError(f"PEFT's {type(layer).__name__} did not merge {', '.join(names.values())}")
                layer.merged_adapters.clear()
            result = around[0].get_base_layer()  # some adapters replace the base layer
            merged = {full: result.get_parameter(own).detach().to(self.form[full].dtype) for own, full in names.items()}
        assert not any(value.is_meta for value in merged.values())
        return merged

    def _subtract_initial(self, layer: Any) -> None:
        """For PiSSA and OLoRA: subtract the initial adapter from the base weight again; keep the trained values."""
        from peft.tuners.lora import Linear

        changes_base: bool = isinstance(layer, Linear) and self.method in CHANGE_BASE
        if not changes_base:
            return
        pair = [layer.lora_A[self.adapter].weight, layer.lora_B[self.adapter].weight]
        trained = [weight.data for weight in pair]
        layer.pissa_init(self.adapter, self.method) if self.method == "pissa" else layer.olora_init(self.adapter)
        for weight, value in zip(pair, trained, strict=True):
            weight.data = value

    # --- which layers are merged --------------------------------------------------------------------------------------

    def _find(self, model: Any, loaded: Mapping[str, torch.Tensor]) -> None:
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer

        prefix, plain = plain_model(model)
        tied = getattr(plain, "all_tied_weights_keys", None) or {}
        used: set[int] = set()
        for name, layer in model.named_modules():
            if not isinstance(layer, BaseTunerLayer):
                continue
            base = layer.get_base_layer()
            own = {n: plain_name(f"{name}.{n}", prefix) for n, _ in base.named_parameters(recurse=False)}
            if isinstance(layer, ParamWrapper):
                own = {layer.parameter_name: own[layer.parameter_name]}
            elif len(list(base.parameters())) > len(own):
                continue  # it also changes layers inside its base layer
            values = list(_values_of(layer))
            if not own or any(value.is_meta for value in values) or not self.form.keys() >= set(own.values()):
                continue
            if not hasattr(layer, "trainable_tokens_delta"):
                _check_ties(own.values(), tied)
            used |= {id(value) for value in values}
            for full in own.values():
                self.layers.setdefault(full, (base, [], own))[1].append(layer)
        unused = []
        for name, value in loaded.items():
            full = plain_name(name, prefix)
            if ".modules_to_save." in name:
                _check_ties([full], tied)
            if full in self.form:
                self.replaced[full] = value
            elif id(value) not in used and not _repeats(full, value, tied, loaded, prefix):
                unused.append(name)
        if unused:
            raise WeightsError(
                f"the merge does not support {len(unused)} tensor(s) of the adapter, so the result would lack them: "
                f"{', '.join(unused[:5])}. Merge it with PEFT (merge_and_unload), or use it as an adapter"
            )


def _check_ties(names: Iterable[str], tied: Mapping[str, str]) -> None:
    for full in names:
        if full in tied or full in tied.values():
            raise WeightsError(
                f"the adapter changes {full}, which is tied to another weight; merge it with PEFT, or untie the base "
                f"(tie_word_embeddings) first"
            )


def _repeats(
    full: str, value: torch.Tensor, tied: Mapping[str, str], loaded: Mapping[str, torch.Tensor], prefix: str
) -> bool:
    """Whether a tensor repeats the one it is tied to, which the adapter has too: a resized embedding and its head."""
    first = next((v for n, v in loaded.items() if plain_name(n, prefix) == tied.get(full)), None)
    return first is not None and torch.equal(first, value)


def _values_of(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors of an adapter layer, without those of its base layer."""
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if not name.startswith(("base_layer.", "trainable_tokens_original.")):
            yield tensor


@contextlib.contextmanager
def _filled(layer: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Set tensors of a layer temporarily."""
    empty = dict(parameters_of(layer))
    for name, value in values.items():
        parameters_of(layer)[name] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        parameters_of(layer).update(empty)
