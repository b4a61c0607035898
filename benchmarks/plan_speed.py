"""How long `fullshard plan` takes for a large model on many devices, imports not counted.

    python benchmarks/plan_speed.py

Plans Llama-3.1-405B with QLoRA, LoRA and in full on 4,096 devices from its sizes alone, three times each after one that
imports everything, and prints the fastest in seconds, by part, as one JSON line. CPU time is that of this process: on a
busy machine it says more than the clock on the wall.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from fullshard.launch.plan_command import read_request
from fullshard.planner.estimate import Estimator

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
RUN = ("--bf16", "--gradient_checkpointing", "--max_length", "4096", "--per_device_train_batch_size", "1")
MACHINE = ("--machine", "h100-80gb", "--num_processes", "4096")
KINDS = {"QLoRA": ("--use_peft_lora", "--use_4bit_quantization"), "LoRA": ("--use_peft_lora",), "full": ()}
GOAL = 2.0


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "config.json"
        place.write_text(json.dumps(SHAPE))
        for name, flags in KINDS.items():
            request, _ = read_request([str(place), *flags, *RUN, *MACHINE])
            Estimator()(request)
            found = []
            for _ in range(3):
                price, wall, used = Estimator(), time.perf_counter(), time.process_time()
                estimate = price(request)
                found.append((time.perf_counter() - wall, time.process_time() - used, price.seconds, estimate))
            wall, used, parts, estimate = min(found, key=lambda one: one[1])
            results[name] = {
                "seconds": round(wall, 3), "cpu_seconds": round(used, 3), "goal": GOAL, "fits": estimate.verdict.fits,
                "parts": {part: round(seconds, 3) for part, seconds in parts.items()},
            }  # fmt: skip
    print(json.dumps(results))


if __name__ == "__main__":
    main()
