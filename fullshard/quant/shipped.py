"""`Shipped`: the quantization of a released model, read from `quantization_config` in its config.json.

Each format is a function that makes its row, a `StoredFormat`; each `quant_method` says which layers have which one.
`Shipped.format_of` answers that for a layer. Only weights count: activations are not quantized in training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fullshard.config.errors import QuantizationError
from fullshard.quant.stored_format import SCALES, Coding, StoredFormat

PACKED_BITS = (2, 4, 8)
"""Widths of integers that do not cross 32-bit words."""
BESIDE = (
    r"\.(weight_shape|input_scale|activation_scale|input_global_scale|input_zero_point|output_scale|output_zero_point"
    r"|[kvq]_scale|[kvq]_zero_point)$"
)
"""Tensors beside quantized weights that training does not need: shapes, and scales of activations and caches."""


_DENSE = ("modules_to_not_convert", "ignored_layers", "ignore")
"""The settings that name dense layers."""


# --- the formats ------------------------------------------------------------------------------------------------------


def mxfp4() -> StoredFormat:
    """gpt-oss: stacked experts, transposed, with codes in blocks."""
    coding = Coding("e2m1", (1, 32), "exponent")
    return StoredFormat("mxfp4", coding, {"packed": "_blocks", "scales": "_scales"}, transposed=True, blocked=True)


def block_fp8(block: Sequence[int] | None) -> StoredFormat:
    """DeepSeek, Qwen, GLM: fp8 with a scale for each block, or for the whole weight."""
    rows, columns = block or (0, 0)
    name = f"fp8 {rows}x{columns}" if block else "fp8 by tensor"
    return StoredFormat(name, Coding("e4m3", (rows, columns)), {"packed": "", "scales": "_scale_inv"})


def compressed_bytes(codes: str, block: tuple[int, int], name: str) -> StoredFormat:
    """compressed-tensors: 8-bit floats or integers, one in each element."""
    return StoredFormat(name, Coding(codes, block, "bfloat16", rounded="bfloat16"), {"packed": "", "scales": "_scale"})


def compressed_words(bits: int, block: tuple[int, int], zeros: bool, order: bool, name: str) -> StoredFormat:
    """compressed-tensors: integers packed into 32-bit words."""
    coding = Coding(f"uint{bits}", block, "bfloat16", zeros=zeros, order=order, rounded="bfloat16")
    suffixes = {"packed": "_packed", "scales": "_scale", "zeros": "_zero_point", "order": "_g_idx"}
    return StoredFormat(name, coding, suffixes)


def compressed_fp4(group: int, name: str) -> StoredFormat:
    """compressed-tensors: 4-bit floats, with fp8 scales and one scale of these, or with exponents."""
    nvfp4 = group == 16
    coding = Coding("e2m1", (1, group), "e4m3" if nvfp4 else "exponent", divisor=nvfp4, rounded="bfloat16")
    return StoredFormat(name, coding, {"packed": "_packed", "scales": "_scale", "divisor": "_global_scale"})


# --- which layers have them -------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Rule:
    """The format of the layers that some targets name."""

    format: StoredFormat
    targets: tuple[str, ...] = ()
    """Names, regular expressions behind `re:`, or classes; all layers if there are none."""


@dataclass(frozen=True)
class Shipped:
    """The formats of a released model."""

    method: str
    rules: tuple[Rule, ...]
    kept: Callable[[str, Iterable[str]], bool]
    """Whether a layer of this name and these classes is dense."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """`quantization_config` as it is in config.json."""
    experts_only: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shipped:
        """Read a `quantization_config`; raises `QuantizationError` for what is not known."""
        return METHODS[quant_method(config)](config)

    def format_of(self, name: str, classes: Iterable[str]) -> StoredFormat | None:
        """The format of a layer; None if it is dense."""
        classes = tuple(classes)
        if self.kept(name, classes):
            return None
        matches = [(rank, rule) for rule in self.rules if (rank := _rank(rule.targets, name, classes)) is not None]
        return min(matches, key=lambda match: match[0])[1].format if matches else None

    def with_scales_of(self, stored: Mapping[str, Tensor]) -> Shipped:
        """The same with the dtypes that scales have in the files."""
        dtypes: list[set[torch.dtype]] = [set() for _ in self.rules]
        for key, tensor in stored.items():
            for rule, own in zip(self.rules, dtypes, strict=True):
                end = rule.format.suffixes["scales"]
                if key.endswith((f"weight{end}", f"_proj{end}")):
                    layer = key.removesuffix(end).removesuffix(".weight")
                    if len(self.rules) == 1 or self.format_of(layer, ("Linear",)) is rule.format:
                        own.add(tensor.dtype)
        rules = zip(self.rules, dtypes, strict=True)
        return replace(self, rules=tuple(replace(rule, format=_as_stored(rule.format, own)) for rule, own in rules))

    @property
    def patterns(self) -> tuple[str, ...]:
        """All that names layers in it, regular expressions without `re:`."""
        dense = [key for name in _DENSE for key in self.config.get(name) or ()]
        return tuple(p.removeprefix("re:") for p in (*dense, *(t for rule in self.rules for t in rule.targets)))

    @property
    def names(self) -> str:
        """The names of its formats."""
        return ", ".join(dict.fromkeys(rule.format.name for rule in self.rules))


def quant_method(config: Any) -> str:
    """The `quant_method` of a quantization configuration: a mapping, or one of transformers' classes."""
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    method = fields.get("quant_method") or ""
    return str(getattr(method, "value", method))


def _rank(targets: Sequence[str], name: str, classes: Sequence[str]) -> int | None:
    """How closely targets match a layer: by name, expression or class; None if they do not."""
    if not targets:
        return 0
    ranks = [0 for t in targets if t == name]
    ranks += [1 for t in targets if t.startswith("re:") and re.match(t.removeprefix("re:"), name)]
    ranks += [2 for t in targets if t in classes]
    return min(ranks, default=None)


def _as_stored(form: StoredFormat, dtypes: Iterable[torch.dtype]) -> StoredFormat:
    """The format with scales of this dtype."""
    kinds = {SCALES[dtype] for dtype in dtypes if dtype in SCALES}
    if len(kinds) > 1:
        raise QuantizationError(
            f"the files store scales of {form.name} weights in several dtypes ({', '.join(sorted(kinds))}); expected "
            f"one for all layers of a format"
        )
    if not kinds or form.coding.codes == "e2m1":  # 4-bit floats have scales of one dtype only
        return form
    (kind,) = kinds
    rounded = (kind if kind in ("bfloat16", "float16") else "") if form.coding.rounded else ""
    return replace(form, coding=replace(form.coding, scale=kind, rounded=rounded))


# --- quantization_config, by method -----------------------------------------------------------------------------------


def _matches(patterns: Iterable[str]) -> Callable[[str, Iterable[str]], bool]:
    """Whether a layer's name begins with a pattern (up to a dot) or ends with one, as in transformers."""
    chosen = [pattern for pattern in patterns if pattern]

    def kept(name: str, classes: Iterable[str]) -> bool:
        return any(re.match(rf"(?:{p})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(p) for p in chosen)

    return kept


def _from_mxfp4(config: Mapping[str, Any]) -> Shipped:
    return Shipped(
        "mxfp4", (Rule(mxfp4()),), _matches(config.get("modules_to_not_convert") or ()), config, experts_only=True
    )


def _from_fp8(config: Mapping[str, Any]) -> Shipped:
    block = config.get("weight_block_size")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise QuantizationError(f"weight_block_size is {block}; expected two sizes, such as [128, 128]")
    if (fmt := config.get("fmt") or "e4m3") != "e4m3":
        raise QuantizationError(f"fp8 weights of format {fmt!r} are not supported; expected e4m3")
    if (experts := config.get("expert_dtype") or "fp8") != "fp8":
        raise QuantizationError(
            f"experts in {experts} inside an fp8 model (expert_dtype) are not supported; expected fp8, or the model in "
            f"bf16"
        )
    if converted := config.get("modules_to_convert"):
        raise QuantizationError(f"embeddings in fp8 (modules_to_convert {converted}) are not supported; expected none")
    form = block_fp8(block)
    if config.get("scale_fmt") == "ue8m0":
        form = replace(form, coding=replace(form.coding, scale="exponent"))
    dense = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return Shipped("fp8", (Rule(form),), _matches(dense), config)


def _from_compressed_tensors(config: Mapping[str, Any]) -> Shipped:
    if config.get("transform_config"):
        raise QuantizationError(
            "compressed-tensors with transform_config (rotated weights) are not supported; expected no transforms, or "
            "the model in bf16"
        )
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise QuantizationError(
            f"compressed-tensors with sparse weights ({sparsity}) are not supported; expected dense ones"
        )
    rules = []
    for name, group in (config.get("config_groups") or {}).items():
        if (weights := group.get("weights")) is not None:
            form = _compressed(name, group.get("format") or config.get("format"), weights)
            rules.append(Rule(form, tuple(group.get("targets") or ("Linear",))))
    if not rules:
        raise QuantizationError(
            "compressed-tensors: expected config_groups with weights, which say how these are stored; found none"
        )
    ignored = tuple(config.get("ignore") or ())
    return Shipped(
        "compressed-tensors", tuple(rules),
        lambda name, classes: bool(ignored) and _rank(ignored, name, tuple(classes)) is not None, config,
    )  # fmt: skip


def _compressed(name: str, stored_as: str | None, weights: Mapping[str, Any]) -> StoredFormat:
    """The format of one of the `config_groups`."""
    bits, group = int(weights.get("num_bits") or 8), weights.get("group_size")
    kind, strategy = weights.get("type") or "int", weights.get("strategy") or ("group" if group else "tensor")
    symmetric, order = weights.get("symmetric", True), weights.get("actorder") in ("group", "dynamic")
    where = f"{name} in config_groups"
    blocks = {
        "tensor": (0, 0), "channel": (1, 0), "group": (1, group or 0), "tensor_group": (1, group or 0),
        "block": tuple(weights.get("block_structure") or ()),
    }  # fmt: skip
    if strategy not in blocks or len(blocks[strategy]) != 2:
        raise QuantizationError(f"{where} has strategy {strategy!r}; expected one of {', '.join(blocks)}")
    block: tuple[int, int] = blocks[strategy]
    shared = {"tensor": "by tensor", "channel": "by channel", "block": f"{block[0]}x{block[1]}"}.get(
        strategy, f"groups of {group}"
    )
    if stored_as == "float-quantized" and (kind, bits) == ("float", 8):
        return compressed_bytes("e4m3", block, f"fp8 {shared}")
    if stored_as == "int-quantized" and (kind, bits) == ("int", 8) and symmetric:
        return compressed_bytes("int8", block, f"int8 {shared}")
    if stored_as == "pack-quantized" and kind == "int" and (symmetric or strategy in ("group", "channel")):
        if bits not in PACKED_BITS:
            raise QuantizationError(
                f"{where} packs {bits} bits; expected one of {', '.join(map(str, PACKED_BITS))}, or the model in bf16"
            )
        return compressed_words(bits, block, not symmetric, order, f"int{bits} {shared}")
    if stored_as == "nvfp4-pack-quantized" and (kind, bits, group) == ("float", 4, 16):
        return compressed_fp4(16, "nvfp4")
    if stored_as == "mxfp4-pack-quantized" and (kind, bits, group) == ("float", 4, 32):
        return compressed_fp4(32, "mxfp4")
    raise QuantizationError(
        f"{where} stores {'symmetric' if symmetric else 'asymmetric'} {bits}-bit {kind} weights by {strategy} as "
        f"{stored_as!r}; expected float-quantized, int-quantized, pack-quantized, nvfp4-pack-quantized or "
        f"mxfp4-pack-quantized weights, or the model in bf16"
    )


METHODS: dict[str, Callable[[Mapping[str, Any]], Shipped]] = {
    "mxfp4": _from_mxfp4,
    "fp8": _from_fp8,
    "compressed-tensors": _from_compressed_tensors,
}
"""The methods that are read as they are shipped, by `quant_method`."""


def is_shipped(config: Any) -> bool:
    """Whether a `quantization_config` is of a method that is read as it is shipped; None is of none."""
    return quant_method(config) in METHODS
