"""Saves twice into one folder with Accelerate, and loses a rank in the second save; or loads. argv: FOLDER HOW"""

import os
import signal
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint import filesystem

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
if sys.argv[2] == "load":
    accelerator.load_state(sys.argv[1])
    raise SystemExit
accelerator.save_state(sys.argv[1])
if accelerator.process_index == 1:
    filesystem.FileSystemWriter.write_data = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
accelerator.save_state(sys.argv[1])
