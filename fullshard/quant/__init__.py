"""Quantized frozen weights, with values and scales sharded together: bitsandbytes' NF4 and FP4 formats, and fp8.

The names below are imported when they are first used; `docs/qlora.md` is the guide.
"""

from __future__ import annotations

from fullshard.config.lazy_names import lazy_names

_HOMES = {
    **dict.fromkeys(("NestedState", "QuantState", "dequantize_4bit", "quantize_4bit"), "nf4"),
    **dict.fromkeys(("from_tensors", "to_tensors"), "bnb_format"),
    **dict.fromkeys(("QuantizedLinear", "QuantizedWeight"), "quantized_linear"),
    **dict.fromkeys(("dequantize_model", "quantize_model", "quantized_experts", "quantized_layers"), "quantize"),
    "FP8Linear": "fp8_linear",
    "NF4Experts": "experts",
    "NF4Linear": "linear",
    "Quantization": "config",
    "Scheme": "sharded_groups",
    "model_tensors": "export",
}
"""Each public name and the module that defines it."""

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
