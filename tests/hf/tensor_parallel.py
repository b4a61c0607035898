"""A script for Accelerate's `ParallelismConfig`, with a model loaded by `tp_plan="auto"`; alone an ordinary loop."""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--output_dir", type=Path, required=True)
options = parser.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
set_seed(7)
sizes = ParallelismConfig(tp_size=2, dp_shard_size=ranks // 2) if ranks > 1 else None
accelerator = Accelerator(parallelism_config=sizes)
split = {"tp_plan": "auto", "tp_size": 2, "device_mesh": accelerator.torch_device_mesh} if sizes else {}
model = AutoModelForCausalLM.from_pretrained(options.model, **split)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randint(3, 64, (22, 9), generator=torch.Generator().manual_seed(1))
groups = max(1, ranks // 2)
loader, test = DataLoader(rows[:16], batch_size=4 // groups), DataLoader(rows[16:], batch_size=4 // groups)
model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
losses, norms = [], []
for _ in range(2):
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
with torch.no_grad():
    found = [accelerator.gather_for_metrics(model(input_ids=ids).logits.argmax(-1)) for ids in test]
    names = [name for ids in test for name in accelerator.gather_for_metrics([str(row.tolist()) for row in ids])]
if accelerator.is_main_process:
    answers = torch.cat(found).tolist()
    result = {"losses": losses, "norms": norms, "answers": answers, "rows": names}
    (options.output_dir / "result.json").write_text(json.dumps(result))
