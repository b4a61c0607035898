"""A long run of a tiny model that looks at itself: `long_run.py FOLDER LOOKS ROWS WORDS SETTINGS`.

It trains on so many rows of so many words, with SETTINGS as JSON, and prints a line of JSON for each look at what the
process holds; looks are evenly spread over the steps.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fullshard.distributed import runtime
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.sft.runs import settings
from tests.sft.tiny import make_model

RECORDS = ("metrics.jsonl", "samples.jsonl", "events.jsonl")
"""Files that get a line for each logged step and each checkpoint."""


def look(step: int, folder: Path) -> dict[str, float]:
    """What the process holds, and what the run's folder holds besides its records."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    files = [one for one in folder.rglob("*") if one.is_file() and one.name not in RECORDS]
    return {
        "step": step, "seconds": time.perf_counter(), "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()), "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")), "python_threads": threading.active_count(),
        "mib": int(status.split("VmRSS:")[1].split()[0]) / 1024, "files": len(files),
        "bytes": sum(one.stat().st_size for one in files),
    }  # fmt: skip


class Looks(TrainerCallback):  # type: ignore[misc] - transformers is not typed here
    """Looks at the process after every so many steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.found: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step % self.every == 0:
            self.found.append(look(state.global_step, self.folder))


def rows_of(count: int, words: int) -> list[dict[str, str]]:
    """So many rows of about so many words, few of them different."""
    some = [one["text"] for one in text_rows(60)]
    joined = (" ".join(some) + " ") * (1 + words // 300)
    different = [{"text": one if words < 30 else joined[n : n + 6 * words]} for n, one in enumerate(some)]
    return [different[n % len(different)] for n in range(count)]


def main(folder: Path, looks: int, rows: int, words: int, changes: dict[str, Any]) -> None:
    config = settings(folder, **changes)
    watch = Looks(folder / "out", config.max_steps // looks)
    trainer = SFTTrainer(
        model=make_model(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            max_position_embeddings=max(2048, config.max_length or 0),
        ),
        args=config, train_dataset=rows_of(rows, words), tokenizer=make_tokenizer(), callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    if runtime.is_main():
        for one in watch.found:
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    place, *numbers, words = sys.argv[1:]
    main(Path(place), *map(int, numbers), json.loads(words))
