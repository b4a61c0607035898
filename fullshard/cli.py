"""The `fullshard` command: parses, calls, prints. What takes long to import, the command that needs it imports."""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Annotated, Any

import typer
import typer.core

from fullshard import log_filter
from fullshard.errors import ConfigError, UserError
from fullshard.version import __version__

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class Commands(typer.core.TyperGroup):
    """The commands. Ctrl-C ends each of them with one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("\nfullshard: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


# Options are declared with underscores, as everywhere in fullshard; with hyphens they are the same.
_NAMES = {"token_normalize_func": lambda name: name.replace("_", "-")}
app = typer.Typer(
    name="fullshard",
    cls=Commands,
    help="Train and fine-tune transformer models fully sharded.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line. What the user can put right is one message and exit code 2, without a traceback."""
    log_filter.leave_out()
    try:
        app()
    except UserError as error:
        print(f"fullshard: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fullshard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=_NAMES, short_help="Show versions, devices and ranks.")
def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show what fullshard would run on: Python, torch, backend, devices, ranks."""
    facts = describe_environment()
    if facts["rank"] != 0:
        return
    if as_json:
        print(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        shown = (", ".join(value) or "none") if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)


_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
"""For commands whose flags come from a typed configuration."""


@app.command(context_settings=_PASS_ON, add_help_option=False, short_help="Start a script on every rank.")
def launch(words: Annotated[list[str] | None, typer.Argument(metavar="[FLAGS] SCRIPT [ARGUMENTS]…")] = None) -> None:
    """Start a script on every rank, with the settings of a configuration file."""
    from fullshard.launch import command

    raise typer.Exit(command.launch(words or []))


@app.command(context_settings=_NAMES, short_help="Ask how to train; write the configuration file.")
def config(
    action: Annotated[str, typer.Argument(help="ask (the questionnaire), default or update")] = "ask",
    config_file: Annotated[str | None, typer.Option("--config_file", help="The file to write; YAML or JSON.")] = None,
    default: Annotated[bool, typer.Option("--default", help="Write a file for this machine without asking.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Rewrite a file in today's spelling.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    mixed_precision: Annotated[str | None, typer.Option("--mixed_precision", help="no, fp16 or bf16.")] = None,
) -> None:
    """Ask how you want to train, and write the configuration file that fullshard launch and Accelerate read."""
    from fullshard.launch import command

    chosen = "default" if default else "update" if update else action
    if chosen not in ("ask", "default", "update"):
        raise ConfigError(f"fullshard config {chosen}: expected ask, default or update")
    command.config(chosen, config_file, force, mixed_precision)


@app.command(
    "test", context_settings=_PASS_ON, add_help_option=False, short_help="Try a configuration on a tiny model."
)
def try_configuration(words: Annotated[list[str] | None, typer.Argument(metavar="[FLAGS]…")] = None) -> None:
    """Train a tiny model for a moment under your configuration, and say what works."""
    from fullshard.launch import command

    raise typer.Exit(command.test(words or []))


@app.command("merge-weights", context_settings=_NAMES, short_help="Make whole weights of a sharded checkpoint.")
def merge_weights(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint: a directory such as RUN/checkpoints/step-100.")],
    out: Annotated[str, typer.Argument(help="Where to write the weights: a directory that does not exist yet.")],
    dtype: Annotated[str | None, typer.Option(help="Convert to float32, bfloat16 or float16.")] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", help="Larger models become several files.")
    ] = "10GB",
    model: Annotated[str | None, typer.Option(help="Which model, where the checkpoint holds several.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every file's checksum first.")] = True,
) -> None:
    """Turn a sharded checkpoint into whole weights that from_pretrained reads."""
    from fullshard.checkpoint.consolidate import merge_weights as merge

    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "model": model, "verify": verify}
    for file in merge(checkpoint, out, progress=True, **options):
        print(file)


@app.command("inspect", context_settings=_NAMES, short_help="Show what is inside a checkpoint.")
def inspect_checkpoint(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a directory of them.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is inside a checkpoint: steps, mesh, plan, sizes, versions, health. Exit code 1 if it is damaged."""
    from fullshard.checkpoint import inspect

    facts = inspect.inspect_checkpoint(checkpoint, verify)
    if as_json:
        print(json.dumps(facts))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in inspect.lines(facts):
            table.add_row(name, value)
        Console().print(table)
    if any(one["health"] == "damaged" for one in facts.get("checkpoints", [facts])):
        raise typer.Exit(1)


@app.command(context_settings=_PASS_ON, add_help_option=False, short_help="Fine-tune a language model.")
def sft(words: Annotated[list[str] | None, typer.Argument(metavar="[RUN.YAML] [FLAGS]…")] = None) -> None:
    """Fine-tune a language model, fully sharded."""
    from fullshard.launch import sft_command

    raise typer.Exit(sft_command.sft(words or []))


@app.command(context_settings=_NAMES, short_help="Talk to a model or to the result of a run.")
def chat(
    model: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, a model, or an adapter.")],
    prompt: Annotated[
        str | None, typer.Option(help="Answer this and leave: only the answer is printed. - reads it from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Who the assistant is: the conversation's first turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max_new_tokens", help="The longest answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest token each time; above, chosen by chance.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top_p", help="Choose among the likeliest tokens of this probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Repeats what chance chooses.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (that of the files), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one if not given.")] = None,
    base: Annotated[str | None, typer.Option(help="Where an adapter's base model lies now.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="A run's checkpoint instead: a step, or latest.")] = None,
    use_4bit_quantization: Annotated[
        bool | None,
        typer.Option(
            "--use_4bit_quantization/--no_use_4bit_quantization",
            help="Hold the model in 4 bits; as the run did if not given.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: print one JSON object.")] = False,
) -> None:
    """Talk to a model, or to what a run has made of one. Answers appear as they come."""
    from fullshard.results import command

    command.chat(model, command.ChatOptions(
        prompt, system, max_new_tokens, temperature, top_p, seed, dtype, device, base, checkpoint,
        use_4bit_quantization, as_json,
    ))  # fmt: skip


@app.command("export", context_settings=_NAMES, short_help="Write a result for others; --merge: whole weights.")
def export_result(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, a model, an adapter, or a checkpoint.")],
    out: Annotated[str, typer.Argument(help="Where to write: a folder that does not exist yet.")],
    merge: Annotated[bool, typer.Option("--merge", help="Add an adapter to its base: whole weights.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert to float32, bfloat16 or float16.")] = None,
    dequantized: Annotated[
        bool,
        typer.Option("--dequantized", help="With --merge: add it to the base as it comes back from 4 bits (QLoRA)."),
    ] = False,
    base: Annotated[str | None, typer.Option(help="Where an adapter's base model lies now.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="A run's checkpoint instead: a step, or latest.")] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", help="Larger models become several files.")
    ] = "10GB",
    verify: Annotated[bool, typer.Option(help="Read everything back and compare checksums.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a result as transformers, PEFT, vLLM and llama.cpp read it; with --merge as whole weights."""
    from fullshard.results import command

    command.export(run, out, command.ExportOptions(
        merge, dtype, dequantized, base, checkpoint, max_shard_size, verify, as_json
    ))  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """The facts that decide how a run behaves here; nothing is initialised to find them."""
    import torch

    import fullshard.runtime as xr
    from fullshard import accelerator, groups
    from fullshard.launch.config import find_file
    from fullshard.rank_env import choose_backend, gpu_count

    gpus, kind = gpu_count(), xr.device().type
    file, reason = find_file(None)
    return {
        "fullshard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": str(xr.device()),
        "backend": choose_backend(kind, own=groups.has_own(kind) and xr.local_world_size() <= gpus),
        "gpus": accelerator.names(),
        "cpus": os.cpu_count(),
        "rank": xr.rank(),
        "world_size": xr.world_size(),
        "local_world_size": xr.local_world_size(),
        "nodes": xr.node_count(),
        "config_file": f"{file} ({reason})" if file else reason,
    }
