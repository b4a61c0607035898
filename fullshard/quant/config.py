"""Quantization settings: from transformers' `BitsAndBytesConfig` or the training script's options to `Quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import ConfigError, QuantizationError
from fullshard.fsdp.strategy import dtype_name, dtype_of
from fullshard.quant.sharded_groups import Scheme
from fullshard.quant.shipped import METHODS, Shipped, is_shipped

_KNOWN = {
    "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "llm_int8_skip_modules", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "quant_method", "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
}  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """A checked quantization configuration."""

    scheme: Scheme
    compute_dtype: torch.dtype | None = None
    skip: tuple[str, ...] = ()
    """Names of modules that stay dense, besides the output head."""

    @classmethod
    def of(cls, config: Any) -> Quantization:
        """Convert transformers' `BitsAndBytesConfig`, a mapping with its fields, a `Scheme`, or a `Quantization`."""
        if isinstance(config, Quantization):
            return config
        if isinstance(config, Scheme):
            return cls(config)
        fields = dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))
        method = fields.get("quant_method")
        method = getattr(method, "value", method)
        if method not in (None, "bitsandbytes") or not fields:
            raise QuantizationError(
                f"quantization by {method or type(config).__name__} is not supported; expected "
                f"{', '.join(METHODS)} or bitsandbytes in 4 bits, or the model before quantization with "
                f'BitsAndBytesConfig(load_in_4bit=True, …) or "fp8"'
            )
        if unknown := sorted(set(fields) - _KNOWN):
            raise QuantizationError(
                f"unknown quantization option(s) {', '.join(unknown)}; known: {', '.join(sorted(_KNOWN))}"
            )
        four = bool(fields.get("load_in_4bit", fields.get("_load_in_4bit")))
        eight = bool(fields.get("load_in_8bit", fields.get("_load_in_8bit")))
        if four and eight:
            raise QuantizationError("load_in_4bit and load_in_8bit are both set; choose one of them (4-bit)")
        if eight:
            raise QuantizationError(
                "bitsandbytes' 8-bit weights (load_in_8bit) are not supported: their outlier columns are chosen anew "
                'for each input, in 16 bits; use load_in_4bit=True, or the model before quantization with "fp8"'
            )
        if not four:
            raise QuantizationError("the quantization configuration has no load_in_4bit=True, so it quantizes nothing")
        scheme = Scheme(
            quant_type=str(fields.get("bnb_4bit_quant_type") or "fp4"),
            double=bool(fields.get("bnb_4bit_use_double_quant")),
            storage=fields.get("bnb_4bit_quant_storage") or torch.uint8,
        )
        compute = dtype_of(fields.get("bnb_4bit_compute_dtype"))
        if compute is not None and not compute.is_floating_point:
            raise QuantizationError(f"bnb_4bit_compute_dtype={compute}: expected a floating-point dtype")
        skip = fields.get("llm_int8_skip_modules") or ()
        return cls(scheme, compute, (skip,) if isinstance(skip, str) else tuple(skip))

    def to_config(self) -> Any:
        """The `BitsAndBytesConfig` that transformers writes to config.json."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.scheme.quant_type,
            bnb_4bit_use_double_quant=self.scheme.double,
            bnb_4bit_quant_storage=self.scheme.storage,
            bnb_4bit_compute_dtype=self.compute_dtype,
            llm_int8_skip_modules=list(self.skip) or None,
        )


def check_quantization(config: Any) -> None:
    """Raise `QuantizationError` for a model's `quantization_config` that is not supported."""
    _ = Shipped.of(config) if is_shipped(config) else Quantization.of(config)


# --- the training script's options ------------------------------------------------------------------------------------


def quantization_from_options(
    *,
    use_4bit_quantization: bool = False,
    use_8bit_quantization: bool = False,
    use_nested_quant: bool = False,
    bnb_4bit_compute_dtype: str = "auto",
    bnb_4bit_quant_storage_dtype: str = "uint8",
    bnb_4bit_quant_type: str = "nf4",
) -> Quantization | None:
    """The quantization that the training script's options select; None if the model is not quantized."""
    if use_nested_quant and not (use_4bit_quantization or use_8bit_quantization):
        raise ConfigError("use_nested_quant quantizes the scales of 4-bit weights; it needs use_4bit_quantization")
    if not (use_4bit_quantization or use_8bit_quantization):
        return None
    return Quantization.of(
        {
            "load_in_4bit": use_4bit_quantization,
            "load_in_8bit": use_8bit_quantization,
            "bnb_4bit_use_double_quant": use_nested_quant,
            "bnb_4bit_compute_dtype": None if bnb_4bit_compute_dtype == "auto" else bnb_4bit_compute_dtype,
            "bnb_4bit_quant_storage": bnb_4bit_quant_storage_dtype,
            "bnb_4bit_quant_type": bnb_4bit_quant_type,
        }
    )


def dense_dtype(storage: torch.dtype) -> torch.dtype | None:
    """The dtype of the weights that stay dense, which the storage dtype implies.

    bfloat16 means training in bfloat16 throughout; float32 means fp32 parameters with autocast. None for uint8, which
    implies nothing: dense weights keep the dtype of the files.
    """
    return storage if storage.is_floating_point else None


def storage_note(storage: torch.dtype, mixed_precision: str | None) -> str | None:
    """A warning if the storage dtype does not suit the mixed precision of the run; None if it does."""
    if mixed_precision in ("fp16", "float16") and storage is not torch.float32:
        return (
            f"fp16 training with bnb_4bit_quant_storage_dtype {dtype_name(storage)}: use float32, which keeps "
            f"trainable parameters in fp32; fp16 training needs that to be stable"
        )
    return None
