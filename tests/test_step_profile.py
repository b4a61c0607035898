"""The reading of traces behind `benchmarks/sft_gpu.py --profile`, on made-up events."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.step_profile import ELEMENTWISE, class_of, summarize

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN"


def operator(name: str, *sizes: list[int]) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 9, "tid": 1, "args": {"Input Dims": list(sizes)}}


@pytest.mark.parametrize(
    ("kernel", "operators", "expected"),
    [
        (GEMM, [operator("aten::mm", [16384, 4096], [4096, 14336])], "matrix products"),
        (GEMM, [operator("aten::mm", [16384, 4096], [4096, 24]), operator("fullshard::lora_forward")], "adapters"),
        (GEMM, [operator("aten::addmm_", [16384, 4096], [16384, 8], [8, 4096])], "adapters"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", [], "attention"),
        ("triton_tem_fused_flex_attention_backward_7", [], "attention"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_0", [], ELEMENTWISE),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", [], "optimizer"),
        ("vectorized_elementwise_kernel", [operator("fullshard::lora_group_backward")], "adapters"),
        ("_forward", [operator("fullshard::gated_mlp")], "gated MLP"),
        ("_product", [operator("fullshard::gated_mlp")], "adapters"),
        (GEMM, [operator("aten::_scaled_mm", [16384, 4096], [4096, 1024], [16384, 1], [1, 1024])], "matrix products"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", [], "attention"),
        ("triton_poi_fused_add_clone_lora_group_backward_mul_neg_0", [], ELEMENTWISE),
        ("triton_red_fused_add_gated_mlp_mean_3", [operator("triton_red_fused_add_gated_mlp_mean_3")], ELEMENTWISE),
        ("_token_losses", [], "loss"),
        ("_quantize_row", [operator("fullshard::lora_group")], "quantizing"),
        ("_dequantize_kernel", [], "unpacking"),
        ("Memcpy HtoD (Pinned -> Device)", [], "copies"),
    ],
)
def test_classes_of_kernels(kernel: str, operators: list[dict[str, Any]], expected: str) -> None:
    assert class_of(kernel, operators) == expected


def test_time_by_class_idle_time_and_the_operator_that_launched() -> None:
    def kernel(name: str, start: float, duration: float, number: int) -> dict[str, Any]:
        return {
            "ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "tid": 7,
            "args": {"correlation": number},
        }  # fmt: skip

    def launch(at: float, number: int) -> dict[str, Any]:
        return {
            "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "tid": 1,
            "args": {"correlation": number},
        }  # fmt: skip

    def mm(at: float, width: int) -> dict[str, Any]:
        return {**operator("aten::mm", [16384, 4096], [4096, width]), "ts": at, "dur": 5}

    events = [
        mm(10, 14336), launch(12, 1), kernel(GEMM, 100, 3000, 1),
        mm(20, 8), launch(22, 2), kernel(GEMM, 3100, 500, 2),
        launch(30, 3), kernel("triton_poi_fused_mul_silu_1", 4000, 1000, 3),
    ]  # fmt: skip
    found = summarize(events)
    assert found["classes"] == {"matrix products": 3.0, ELEMENTWISE: 1.0, "adapters": 0.5}
    assert (found["step_ms"], found["idle_ms"]) == (4.9, 0.4)
    assert [one["ms"] for one in found["top"]] == [3.0, 1.0, 0.5]
    assert summarize([])["step_ms"] == 0
