"""Measures throughput and memory of streaming a dataset, also during training, compared with `datasets`.

    python benchmarks/stream.py                     # 1 GB of chats, generated in a temporary folder
    python benchmarks/stream.py --size 50e6         # a smaller file

The loaders of two ranks stream the whole file once, packed, with the loss on assistant turns: worker processes parse,
render and tokenize, rank 0 writes pages, and both ranks build tensors. Memory is anonymous memory (without file cache)
of each rank: the peak over the first tenth of the file, and over all of it. Then the ranks train a small Llama (the
size of the quickstart's) from a stream. Finally, `datasets` streams the start of the same file, with the same template,
tokens and loss mask computed in batches by `map`, without packing and tensors. One file is one shard for it, so more
processes would not help, but its tokenizer uses all cores. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
RANKS, LENGTH, ROWS_PER_RANK, GOAL = 2, 1024, 4, 5.0
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "ti", "vo", "den", "far", "gul", "hem", "jor", "lin", "mas", "nor")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with marks around what the assistant says: without them `datasets` and transformers could not tell."""
SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


# --- data -----------------------------------------------------------------------------------------------------------


def chats(count: int, seed: int) -> list[str]:
    """Conversations of one to three turns, about 1 KB each, over 20,000 words, the common ones often."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (i + 10) for i in range(len(words))]
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(draw.randint(1, 3)):
            for role, least, most in (("user", 5, 40), ("assistant", 20, 120)):
                text = " ".join(draw.choices(words, weights, k=draw.randint(least, most)))
                messages.append({"role": role, "content": text.capitalize() + "."})
        rows.append(json.dumps(messages))
    return rows


def write(path: Path, size: int) -> None:
    """Rows of the same few thousand conversations under running numbers, until the file is large enough."""
    found, number = chats(5000, seed=1), 0
    with path.open("w") as file:
        while file.tell() < size:
            file.writelines(f'{{"id": {number + i}, "messages": {row}}}\n' for i, row in enumerate(found))
            number += len(found)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"], special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(chats(1000, seed=2), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


# --- what is measured -----------------------------------------------------------------------------------------------


def anonymous() -> int:
    """This process's memory, in bytes, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("no RssAnon")


def config(path: Path, workers: int, steps: int) -> Any:
    from fullshard import SFTConfig

    return SFTConfig(
        output_dir=str(path.parent / "out"), cache_dir=str(path.parent / "cache"), overwrite=True, streaming=True,
        max_steps=steps, dataloader_num_workers=workers, packing=True, max_seq_len=LENGTH, assistant_only_loss=True,
        per_device_train_batch_size=ROWS_PER_RANK, progress="quiet", report_to="none", save_strategy="no",
        logging_steps=max(1, steps - 2), logging_first_step=True,
    )  # fmt: skip


def stream_all(path: Path, workers: int) -> dict[str, Any]:
    """One pass over the file by this rank's loader."""
    from fullshard.data.loader import Collator
    from fullshard.data.sources import file_source
    from fullshard.sft.batches import make_loader, make_stream

    settings = config(path, workers, 10**9)
    tokenizer = make_tokenizer()
    loader = make_loader(settings, make_stream(settings, file_source([path]), tokenizer), Collator(2))
    began, tokens, peaks, size = time.perf_counter(), 0, {"early": 0, "whole": 0}, path.stat().st_size
    steps = loader.steps(0, settings.max_steps)
    for step in steps:
        tokens += step.pick.tokens
        if step.number % 20 == 0:
            place = (step.pick.position or {})["place"]
            peaks["whole"] = max(peaks["whole"], anonymous())
            if place and _offset(place) <= size / 10:
                peaks["early"] = peaks["whole"]
        if step.pick.ends_epoch:
            facts = step.pick.facts
            break
    took = time.perf_counter() - began
    steps.close()
    return {"tokens": tokens, "seconds": took, "peaks": peaks, "facts": facts, "steps": step.number + 1}


def _offset(place: Any) -> int:
    """The byte a place in a JSON-lines file stands for: the first number of the innermost pair."""
    while isinstance(place[-1], list | tuple):
        place = place[-1]
    return int(place[0])


def train(path: Path, workers: int, steps: int) -> float:
    """Tokens per second of training, first step left out."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fullshard import SFTTrainer

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    trainer = SFTTrainer(
        model=model, args=config(path, workers, steps), train_dataset=str(path), tokenizer=make_tokenizer()
    )
    trainer.train()
    return [r["tokens_per_second"] for r in trainer.state.log_history if "loss" in r][1]


def measure(rank: int, port: int, file: str, workers: int, steps: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import fullshard.runtime as xr

    xr.use_spmd(device="cpu")
    found = stream_all(Path(file), workers)
    xr.barrier()
    rate = train(Path(file), workers, steps)
    results.put((rank, found, rate))
    xr.barrier()


def peer(path: Path, rows: int) -> float:
    """Tokens per second of `datasets` over the first rows of the file."""
    from datasets import load_dataset

    tokenizer = make_tokenizer()

    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer.apply_chat_template(
            batch["messages"], return_dict=True, return_assistant_tokens_mask=True, add_special_tokens=False
        )
        return {"input_ids": found["input_ids"], "learnt": found["assistant_masks"]}

    data = load_dataset("json", data_files=str(path), split="train", streaming=True)
    data = data.map(tokenize, batched=True, remove_columns=["id", "messages"])
    began, tokens = None, 0
    for number, row in enumerate(data.take(rows)):
        began = began or time.perf_counter()  # the first row waits for imports and a cache
        tokens += len(row["input_ids"]) if number else 0
    return tokens / (time.perf_counter() - (began or 0.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=float, default=1e9, help="bytes of JSON lines")
    parser.add_argument("--workers", type=int, default=2, help="processes that tokenise")
    parser.add_argument("--steps", type=int, default=8, help="training steps")
    parser.add_argument("--directory", default=None, help="where to write; removed afterwards")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="stream-", dir=options.directory) as folder:
        path = Path(folder) / "train.jsonl"
        write(path, int(options.size))
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure, (port, str(path), options.workers, options.steps, queue), nprocs=RANKS)
        heard = sorted((queue.get() for _ in range(RANKS)), key=lambda found: found[0])
        beside = peer(path, 20_000)
        size = path.stat().st_size
    (_, first, trained), (_, second, _) = heard
    rate, facts = first["tokens"] / first["seconds"], first["facts"]
    print(json.dumps({
        "benchmark": "stream", "torch": torch.__version__, "gb": round(size / 1e9, 3), "workers": options.workers,
        "rows": facts["documents"], "tokens": first["tokens"], "seconds": round(first["seconds"], 1),
        "tokens_per_s": round(rate), "mb_per_s": round(size / 1e6 / first["seconds"], 2),
        "packed": round(facts["tokens"] / (facts["rows"] * LENGTH), 4),
        "anonymous_mb_early": [round(f["peaks"]["early"] / 1e6) for f in (first, second)],
        "anonymous_mb_whole": [round(f["peaks"]["whole"] / 1e6) for f in (first, second)],
        "trained_tokens_per_s": round(trained), "over_training": round(rate / trained, 2), "goal": GOAL,
        "datasets_tokens_per_s": round(beside), "over_datasets": round(rate / beside, 2), "load_before": round(load, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
