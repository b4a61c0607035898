"""A script for Accelerate that uses torch's own `FullyShardedDataParallel` on its model, as scripts for FSDP 1 do."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
folder = parser.parse_args().output_dir
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
whole = {name: value.clone() for name, value in plain.state_dict().items()}
accelerator = Accelerator()
model = accelerator.prepare(plain)

with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)):
    saved = model.state_dict()
kinds = {type(value).__name__ for value in saved.values()}
same = not accelerator.is_main_process or all(torch.equal(saved[name], value) for name, value in whole.items())
with FSDP.summon_full_params(model, writeback=False):
    summoned = all(type(p) is nn.Parameter and torch.equal(p, whole[name]) for name, p in model.named_parameters())
refused = ""
try:
    FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters()))
except Exception as error:
    refused = str(error)
untouched = FSDP.fsdp_modules(model)
get_model_state_dict(model)
if accelerator.is_main_process:
    found = {"kinds": sorted(kinds), "same": same, "summoned": summoned, "refused": refused, "untouched": untouched}
    (folder / "result.json").write_text(json.dumps(found))
