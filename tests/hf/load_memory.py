"""How much host memory all ranks together take to load a model and shard it, in multiples of the model.

argv: MODEL OUTPUT_DIR DTYPE dense|4bit|config (its configuration only: random values). Memory is what the processes do
not share (PSS), above what they have after their imports and after a small model was sharded. Pages of files, which the
system can drop, are counted apart.
"""

import json
import sys
import threading
import time
from pathlib import Path

import bitsandbytes  # noqa: F401  (its own memory is not the model's)
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def memory():
    """Anonymous and shared memory, and pages of files, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return fields["Pss_Anon"] + fields["Pss_Shmem"], fields["Pss_File"]


class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = [0, 0], False

    def run(self):
        while not self.over:
            self.most = [max(pair) for pair in zip(self.most, memory(), strict=True)]
            time.sleep(0.002)


def load(model, dtype, how):
    if how == "config":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=getattr(torch, dtype))
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"quantization_config": four_bits} if how == "4bit" else {}
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options)


model, folder, dtype, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
accelerator = Accelerator()
tiny = LlamaForCausalLM(LlamaConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8
))  # fmt: skip
accelerator.prepare(tiny, torch.optim.SGD(tiny.parameters(), lr=1.0))
before, peak = memory(), Peak()
peak.start()
loaded = load(model, dtype, how)
size = sum(p.numel() * p.element_size() for p in loaded.parameters())
optimizer = torch.optim.SGD([p for p in loaded.parameters() if p.is_floating_point()], lr=1.0)
at_load = memory()
loaded, optimizer = accelerator.prepare(loaded, optimizer)
peak.over = True
sharded = memory()
found = {"loaded": at_load[0], "peak": max(peak.most[0], sharded[0]), "sharded": sharded[0]}
mine = torch.tensor([*(float(one - before[0]) for one in found.values()), float(peak.most[1] - before[1])])
total = accelerator.reduce(mine, "sum") / size
if accelerator.is_main_process:
    folder.mkdir(parents=True, exist_ok=True)
    result = dict(zip((*found, "files"), total.tolist(), strict=True))
    (folder / "result.json").write_text(json.dumps({**result, "bytes": size}))
