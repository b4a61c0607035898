"""Pretrains the quickstart's model: text → tokenizer → random weights → `fullshard sft` → `quickstart/model`.

    python -m quickstart.recipe     # flags are passed to `fullshard sft`; README.md lists those for CPUs

Intermediate files are written to `quickstart/out/base`. Text and tokenizer are reproducible byte for byte; the weights
are reproducible on the same hardware with the same versions. `base.yaml` has the settings of the training run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from quickstart import data

HERE = Path(__file__).resolve().parent
WORK = HERE / "out" / "base"
MODEL = HERE / "model"
VOCABULARY = 2048
"""Rows of the embedding. A few are unused, for special tokens of other chat templates."""
FREE_ROWS = 16
PAD, END, ROLES = "<pad>", "</s>", ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + ('</s>' if m['role'] == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "rope_theta": 10_000.0, "initializer_range": 0.05,
}  # fmt: skip


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the text and give it a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a word has the same tokens at any position
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - FREE_ROWS, special_tokens=[PAD, END, *ROLES], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    # A few words are in questions only; one copy of those is enough to know them.
    rows = [json.loads(line) for line in data.instruction_set()["train.jsonl"].splitlines()]
    base.train_from_iterator([*data.documents(), *(m["content"] for row in rows for m in row["messages"])], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token=PAD, eos_token=END, additional_special_tokens=list(ROLES)
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def make_start(folder: Path) -> None:
    """Write a small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(data.SEED)
    shape = LlamaConfig(**SHAPE, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = LlamaForCausalLM(shape)
    model.save_pretrained(folder)
    print(f"{model.num_parameters():,} parameters", flush=True)


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    data.write_questions(HERE / "data")
    data.write_text(WORK / "text" / "train.jsonl")
    make_start(WORK / "start")
    make_tokenizer(WORK / "start")
    flags = ["--model_name_or_path", str(WORK / "start"), "--dataset_name", str(WORK / "text"), "--output_dir",
             str(WORK / "run"), "--cache_dir", str(WORK / "cache")]  # fmt: skip
    command = [sys.executable, "-m", "fullshard", "sft", str(HERE / "base.yaml"), *flags, *sys.argv[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    if code := subprocess.run(command, env=environment).returncode:
        sys.exit(code)
    MODEL.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                 "tokenizer_config.json", "chat_template.jinja"):  # fmt: skip
        shutil.copyfile(WORK / "run" / name, MODEL / name)


if __name__ == "__main__":
    main()
