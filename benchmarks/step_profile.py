"""Where the time of a training step on a GPU goes, read from a profiler trace: kernels by class, and idle time.

It only reads the events of a Chrome trace exported by `torch.profiler` with shapes, so it can be tested without a GPU.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.trace import kind_of, length, union

ELEMENTWISE = "norms and elementwise"
CLASSES = {
    "copies": r"^memcpy|^memset|nccl",
    "attention": r"cudnn|sdpa|flash|fmha|attention|varlen",
    "loss": r"loss|cross_entropy|log_softmax|nll|logits",
    ELEMENTWISE: r"^triton_(poi|red|per)_fused",  # the compiler's, whose names list what is around them too
    "optimizer": r"adam|multi_tensor|lion|foreach|lpnorm|clip",
    "unpacking": r"dequant|unpack|nf4|fp4",
    "quantizing": r"fp8|quantize|rowwise|scales",
    "adapters": r"lora|adapter|dropout|^_product|^_grad_weight|^_grad_input",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|triton_tem|splitk|gemv|dot_kernel",
}
"""Patterns of kernel names, the first that matches counts; every other kernel is elementwise."""
THIN = 64
"""A matrix product with a dimension of at most this is an adapter's."""
PRODUCTS = re.compile(r"aten::(mm|addmm|addmm_|bmm|baddbmm|matmul|linear|_scaled_mm)$")
BY_OPERATOR = {
    "gated MLP": r"gated_mlp",
    "adapters": r"lora",
    "unpacking": r"dequant|nf4",
    "loss": r"loss|cross_entropy",
    "optimizer": r"adam|clip_grad",
}
"""Patterns of the operators and annotations that a kernel was launched in, where its own name says nothing."""


def class_of(kernel: str, operators: Sequence[dict[str, Any]] = ()) -> str:
    """The class of a kernel that was launched inside these operators, the innermost first."""
    name = kernel.lower()
    found = next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name)), None)
    if found == "matrix products":
        return "adapters" if any(_is_thin(one) for one in operators) else found
    if found is not None:
        return found
    around = [str(one["name"]).lower() for one in operators]
    return next((k for k, pattern in BY_OPERATOR.items() if any(re.search(pattern, o) for o in around)), ELEMENTWISE)


def _is_thin(operator: dict[str, Any]) -> bool:
    if not PRODUCTS.search(str(operator["name"])):
        return False
    matrices = 2 if "_scaled_mm" in operator["name"] else 3  # after them come its scales
    sizes = [size for size in operator.get("args", {}).get("Input Dims", [])[:matrices] if len(size) in (2, 3)]
    return any(0 < side <= THIN for size in sizes for side in size[-2:])


def summarize(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds by class of kernel, idle time between the first and the last one, and the longest kernels."""
    timed = [e for e in events if e.get("ph") == "X" and "ts" in e]
    launches = {
        e["args"]["correlation"]: e
        for e in timed
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    around = _Operators(timed)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    kernels: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for e in timed:
        if kind_of(e) is None:
            continue
        launch = launches.get(e.get("args", {}).get("correlation"))
        name, start = str(e["name"]), float(e["ts"])
        kind = class_of(name, around.of(launch) if launch is not None else ())
        spans[kind].append((start, start + float(e.get("dur", 0))))
        kernels[kind, name] += float(e.get("dur", 0))  # type: ignore[assignment]
        counts[kind, name] += 1
    everything = union(span for group in spans.values() for span in group)
    wall = everything[-1][1] - everything[0][0] if everything else 0.0
    by_class = {kind: round(sum(b - a for a, b in group) / 1e3, 2) for kind, group in spans.items()}
    top = [
        {"class": kind, "kernel": name[:110], "ms": round(time / 1e3, 2), "calls": counts[kind, name]}
        for (kind, name), time in kernels.most_common(30)
    ]
    return {
        "step_ms": round(wall / 1e3, 2), "idle_ms": round((wall - length(everything)) / 1e3, 2),
        "classes": dict(sorted(by_class.items(), key=lambda item: -item[1])), "top": top,
    }  # fmt: skip


class _Operators:
    """Finds the operators around a moment on a thread of the host."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for e in events:
            if e.get("cat") in ("cpu_op", "user_annotation"):
                self.threads[e.get("tid")].append(e)
        for on in self.threads.values():
            on.sort(key=lambda e: (float(e["ts"]), -float(e.get("dur", 0))))
        self.place: dict[Any, int] = {}
        self.open: dict[Any, list[dict[str, Any]]] = {}
        self.found: dict[int, list[dict[str, Any]]] = {}
        runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        for e in sorted(runtime, key=lambda e: float(e["ts"])):
            self.found[id(e)] = self._around(e.get("tid"), float(e["ts"]))

    def _around(self, thread: Any, moment: float) -> list[dict[str, Any]]:
        """The operators around a moment; moments of a thread come in order."""
        on, stack, i = self.threads.get(thread, []), self.open.setdefault(thread, []), self.place.get(thread, 0)
        while i < len(on) and float(on[i]["ts"]) <= moment:
            stack.append(on[i])
            i += 1
        self.place[thread] = i
        stack[:] = [e for e in stack if float(e["ts"]) + float(e.get("dur", 0)) >= moment]
        return stack[::-1]

    def of(self, launch: dict[str, Any]) -> list[dict[str, Any]]:
        return self.found.get(id(launch), [])
