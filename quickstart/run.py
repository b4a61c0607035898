"""The quickstart: fine-tunes a small model on two CPU processes and compares it before and after.

`make quickstart` runs this. The run itself is `fullshard sft` with the settings in `lora.yaml`. The losses and answers
shown here come from the files of the run; `quiz.py` counts the correct answers.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fullshard.distributed import log_filter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODEL, DATA = HERE / "model", HERE / "data"
SETTINGS, RUN = HERE / "lora.yaml", HERE / "out" / "lora"
FLAGS = ["sft", "quickstart/lora.yaml", "--num_processes", "2", "--use_cpu", "--overwrite"]
STOPPED = 75
"""The exit code of a run that was interrupted and has saved a checkpoint."""
FILES = {
    "adapter_model.safetensors": "the trained LoRA weights, in PEFT's format",
    "adapter_config.json": "PEFT's configuration of the adapter",
    "tokenizer.json": "the tokenizer",
    "chat_template.jinja": "the chat template",
    "metrics.jsonl": "all logged metrics",
    "samples.jsonl": "the sample answers above",
    "report.html": "the run on one page: curves, answers, memory, data",
    "settings.json": "every setting and version",
    "README.md": "the model card",
}


def main(console: Console) -> int:
    say = console.print
    say("\n[bold]fullshard quickstart[/]: fine-tune a small model to answer questions, on two CPU processes\n")
    say(
        f"[cyan]{shown(MODEL)}[/] is a Llama with 1.3 million parameters. It was pretrained on sentences about a small "
        "made-up world (a village, islands, opposites, plurals, sums, …), without questions, so it cannot answer any.\n"
        f"[cyan]{shown(DATA)}[/] contains questions with answers. We train on [bold]train.jsonl[/] and evaluate on "
        "[bold]test.jsonl[/], which asks about residents, words and numbers that train.jsonl never asks about.\n"
    )
    with console.status("evaluating the model before training …"):
        asked = questions()
        right_before = count_right(asked, None)
    say(f"Before training, the model answers {right_before} of {len(asked)} test questions correctly.\n")
    say(
        "Now LoRA training, with model, gradients and optimizer state sharded over two processes (FSDP). This takes "
        f"about a minute on two cores. [cyan]{shown(SETTINGS)}[/] has the settings, with explanations.\n"
    )
    say(f"[bold green]$[/] {command_shown()}\n", soft_wrap=True)
    if code := train():
        return stopped(console, code)
    with console.status("evaluating the fine-tuned model …"):
        right_after = count_right(asked, RUN)

    losses = [record["eval_loss"] for record in read(RUN / "metrics.jsonl") if "eval_loss" in record]
    say("\n[bold]Five test questions[/], before and after training\n")
    say(answers_table())
    say()
    say(numbers_table(losses, right_before, right_after, len(asked)))
    say(f"\n[bold]Files in[/] [cyan]{shown(RUN)}[/]\n")
    say(files_table())
    say("\n[bold]What to try next[/]\n")
    for words, what in following():
        say(f"  {what}")
        say(f"  [bold green]$[/] {escape(words)}\n", soft_wrap=True)
    return 0


# --- the run ------------------------------------------------------------------------------------------------------


def train() -> int:
    """Run the command and return its exit code. Signals are forwarded, so that it can save and exit."""
    # In its own process group the run receives Ctrl-C once, from here, and not also from the terminal.
    run = subprocess.Popen(command(), cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, process_group=0)
    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    usual = {number: signal.signal(number, lambda n, _: run.send_signal(n)) for number in passed_on}
    try:
        return run.wait()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def stopped(console: Console, code: int) -> int:
    if code == STOPPED:
        again = command_shown().replace("--overwrite", "--resume")
        console.print(
            f"\nStopped. `make quickstart` starts again from the beginning; to resume:\n  {again}", soft_wrap=True
        )
        return 128 + signal.SIGINT
    console.print(f"\n[red]The run failed with exit code {code}[/]; see its message above.")
    return 1


def command() -> list[str]:
    return [sys.executable, "-m", "fullshard", *FLAGS]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def fullshard_shown() -> str:
    """How to call the `fullshard` command of this interpreter."""
    own = Path(sys.executable).with_name("fullshard")
    if own.exists():
        return "fullshard" if shutil.which("fullshard") == str(own) else shown(own)
    return f"{Path(sys.executable).name} -m fullshard"


def command_shown() -> str:
    return shlex.join([*fullshard_shown().split(), *FLAGS])


# --- results ------------------------------------------------------------------------------------------------------


def questions() -> list[tuple[str, str]]:
    from quickstart import quiz  # imports torch

    return quiz.read_questions(DATA / "test.jsonl")


def count_right(asked: list[tuple[str, str]], adapter: Path | None) -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    from quickstart import quiz

    logging.disable_progress_bar()
    return quiz.count_right(*quiz.load(MODEL, adapter), asked)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answers_table() -> Table:
    samples = read(RUN / "samples.jsonl")
    last = max(sample["step"] for sample in samples)
    before, after = ({s["prompt"]: s for s in samples if s["step"] == step} for step in (0, last))
    table = Table(show_lines=True, expand=True)
    for name, share in (("question", 4), ("before", 5), ("after", 4)):
        table.add_column(name, ratio=share)
    for prompt, sample in after.items():
        right = sample["answer"].strip() == sample["reference"]
        style = "green" if right else "red"
        table.add_row(
            escape(prompt), f"[dim]{escape(before[prompt]['answer'].strip())}[/]",
            f"[{style}]{escape(sample['answer'].strip())}[/]",
        )  # fmt: skip
    return table


def numbers_table(losses: list[float], right_before: int, right_after: int, asked: int) -> Table:
    table = Table(expand=False)
    for name in ("on held-out questions", "before", "after", "change"):
        table.add_column(name, justify="left" if name.startswith("on") else "right")
    before, after = losses[0], losses[-1]
    table.add_row("loss", f"{before:.3f}", f"{after:.3f}", f"[green]{after - before:+.3f}[/]")
    gained = f"[green]{(right_after - right_before) / asked:+.0%}[/]"
    table.add_row("exactly correct answers", f"{right_before} of {asked}", f"{right_after} of {asked}", gained)
    return table


def files_table() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for name, meaning in FILES.items():
        if (RUN / name).exists():
            table.add_row(name, size((RUN / name).stat().st_size), meaning)
    return table


def following() -> list[tuple[str, str]]:
    """Commands to try next, with a description."""
    fullshard, out, more = fullshard_shown(), shown(HERE / "out"), " \\\n      "
    again = f"{fullshard} sft {shown(SETTINGS)} --use_cpu"
    return [
        (f"{fullshard} chat {shown(RUN)}", "Chat with it. It only knows its small world: ask about Mara, or 7 plus 5."),
        (f"{again} --num_processes 2{more}--output_dir {out}/qlora --use_4bit_quantization",
         "QLoRA: the same adapter on a model frozen in 4 bits."),
        (f"{again} --num_processes 4{more}--output_dir {out}/four --per_device_train_batch_size 8",
         "Four processes with the same effective batch size: the losses are the same."),
        (f"{fullshard} export {shown(RUN)} {out}/merged --merge --dtype bfloat16",
         "Merge the adapter into the model, for programs without adapter support."),
        (f"{fullshard} sft --help", "Use your own model and data. Every setting in lora.yaml is also a flag."),
    ]  # fmt: skip


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def shown(path: Path) -> str:
    """A path relative to the repository's folder, if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    log_filter.install_filters()
    try:
        terminal = Console(highlight=False)
        terminal.width = min(terminal.width, 110)
        sys.exit(main(terminal))
    except KeyboardInterrupt:
        print("\nStopped.")
        sys.exit(128 + signal.SIGINT)
