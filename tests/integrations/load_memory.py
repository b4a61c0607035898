"""How much host memory all ranks together take to load a model and shard it, in multiples of the model.

argv: MODEL OUTPUT_DIR [DTYPE] [4bit]. Anonymous memory above what the process has after its imports and after a small
model was sharded; pages of files, which the system can drop, are not counted.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, False

    def run(self):
        while not self.over:
            self.most = max(self.most, anonymous())
            time.sleep(0.002)


model, folder, dtype = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "auto"
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if "4bit" in sys.argv else None
accelerator = Accelerator()
tiny = LlamaForCausalLM(LlamaConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8
))  # fmt: skip
accelerator.prepare(tiny, torch.optim.SGD(tiny.parameters(), lr=1.0))
before, peak = anonymous(), Peak()
peak.start()
loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, quantization_config=quantization)
size = sum(p.numel() * p.element_size() for p in loaded.parameters())
optimizer = torch.optim.SGD([p for p in loaded.parameters() if p.is_floating_point()], lr=1.0)
at_load = anonymous() - before
loaded, optimizer = accelerator.prepare(loaded, optimizer)
peak.over = True
mine = torch.tensor([float(at_load), float(peak.most - before), float(anonymous() - before)])
total = accelerator.reduce(mine, "sum") / size
if accelerator.is_main_process:
    folder.mkdir(parents=True, exist_ok=True)
    found = dict(zip(("loaded", "peak", "sharded"), total.tolist(), strict=True))
    (folder / "result.json").write_text(json.dumps({**found, "bytes": size}))
