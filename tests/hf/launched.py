"""Starting scripts for the tests of the integrations: under `fullshard launch`, and by their own libraries alone."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM

from tests.pool import ROOT

EXAMPLES = ROOT / "examples"
ORACLE = Path(__file__).with_name("accelerate_fsdp2.py")
"""Accelerate's own FSDP 2 on CPU ranks."""


def write_llama(folder: Path) -> None:
    """A small Llama with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def alone(script: Path, *arguments: object) -> None:
    """Run a script in one process, this one, without fullshard."""
    words = [str(word) for word in (script, *arguments)]
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", words):
        try:
            runpy.run_path(words[0], run_name="__main__")
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def launched(script: Path, *arguments: object, flags: tuple[str, ...] = (), processes: int = 2) -> str:
    """What it prints under `fullshard launch`, on CPU ranks."""
    words = ["-m", "fullshard", "launch", "--use_cpu", "--quiet", "--num_processes", processes, *flags]
    return _run([sys.executable, *words, script, *arguments])


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def _run(command: list[object]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
