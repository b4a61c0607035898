"""Records what compressed-tensors' own library makes of small weights, as data for `test_compressed_tensors.py`.

    python -m tests.quant.record_compressed_tensors

Run with version 0.20.0 it writes every case but the reordered one, which only older versions unpack: run it again with
0.12.2. The library is not needed for the tests.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FILE = Path(__file__).with_name("compressed_tensors.safetensors")
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "fp8 by channel": ("float-quantized", {**FP8, "strategy": "channel"}),
    "fp8 by block": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [16, 32]}),
    "int8 by channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int4": ("pack-quantized", INT4),
    "int4 asymmetric": ("pack-quantized", {**INT4, "symmetric": False}),
    "int8 in words": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int4 by channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int2": ("pack-quantized", {**INT4, "num_bits": 2}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}
REORDERED = "int4 reordered"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def weight(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes, one of them zero; their number is no multiple of anything."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(21, columns, generator=generator) * torch.rand(21, 1, generator=generator)
    values[5] = 0
    return values.to(dtype)


def parameters(value: torch.Tensor, args: Any, divisor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points as the library computes them from each block's range."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = value.shape
    height, width = {
        "tensor": (rows, columns), "channel": (1, columns), "block": args.block_structure or (1, 1),
    }.get(args.strategy, (1, args.group_size))  # fmt: skip
    padded = torch.nn.functional.pad(value, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    if args.strategy == "tensor":
        low, high = low.view(1), high.view(1)
    return calculate_qparams(low, high, args, global_scale=divisor)


def record(name: str, dtype: str) -> dict[str, torch.Tensor]:
    """The file tensors of one case, and the values that the library unpacks."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import generate_gparam

    stored_as, settings = CASES[name]
    grouped = "group_size" in settings
    value = weight(64 if grouped else 51, DTYPES[dtype])
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    divisor = None
    if stored_as.startswith("nvfp4"):
        divisor = generate_gparam(value.amin().view(1).float(), value.amax().view(1).float())
    scales, zeros = parameters(value, args, divisor)
    state = {"weight": value, "weight_scale": scales if "fp4" in stored_as else scales.to(value.dtype)}
    if not args.symmetric:
        state["weight_zero_point"] = zeros.to(torch.int8)
    if divisor is not None:
        state["weight_global_scale"] = divisor
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    packed = compressor.compress(state, scheme)
    return {**packed, "unpacked": compressor.decompress(packed, scheme)["weight"]}


def record_reordered(dtype: str) -> dict[str, torch.Tensor]:
    """Groups of columns that are not neighbors."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    value = weight(64, DTYPES[dtype])
    generator = torch.Generator().manual_seed(4)
    order = (torch.randperm(64, generator=generator) // 32).to(torch.int32)
    codes = torch.randint(-8, 8, value.shape, generator=generator, dtype=torch.int8)
    scales = (value.abs().view(21, 2, 32).amax(-1) / 7.5 + 0.01).to(value.dtype)
    return {
        "weight_packed": pack_to_int32(codes, 4), "weight_scale": scales, "weight_g_idx": order,
        "weight_shape": torch.tensor(value.shape),
        "unpacked": dequantize(codes, scales, torch.zeros_like(scales, dtype=torch.int8), g_idx=order),
    }  # fmt: skip


def main() -> None:
    """Write the cases that the installed version unpacks, and keep the others."""
    from compressed_tensors import __version__
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensors, versions = {}, {}
    if FILE.is_file():
        with safe_open(FILE, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            versions = json.loads(opened.metadata()["versions"])
    reorders = "g_idx" in inspect.signature(dequantize).parameters
    for dtype in DTYPES:
        for name in [REORDERED] if reorders else CASES:
            found = record_reordered(dtype) if reorders else record(name, dtype)
            tensors |= {f"{name}/{dtype}/{key}": value.detach().contiguous() for key, value in found.items()}
            versions[name] = __version__
    save_file(tensors, FILE, {"versions": json.dumps(versions)})


if __name__ == "__main__":
    main()
