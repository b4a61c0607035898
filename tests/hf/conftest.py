"""What the tests of the integrations share: a small model, and one launch of the scripts that need no flags."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hf.launched import EXAMPLES, launched

SCRIPTS = {
    "loop": EXAMPLES / "accelerate_loop.py",
    "idioms": Path(__file__).with_name("fsdp1_idioms.py"),
    "trainer": EXAMPLES / "trainer_fsdp.py",
}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def together(model, tmp_path_factory):
    """The scripts, one after another on two ranks of one launch: the folder of each by name, and all they printed."""
    folder = tmp_path_factory.mktemp("together")
    runs = []
    for name, script in SCRIPTS.items():
        (folder / name).mkdir()
        more = ["--model", str(model)] if name == "trainer" else []
        runs.append([str(script), *more, "--output_dir", str(folder / name)])
    text = launched(Path(__file__).with_name("in_turn.py"), json.dumps(runs))
    return {name: folder / name for name in SCRIPTS}, text
