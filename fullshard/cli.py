"""The `fullshard` command line. Each command imports what it needs, so that the others start quickly."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from fullshard.config import redaction
from fullshard.config.errors import ConfigError, UserError, for_people
from fullshard.distributed import log_filter
from fullshard.distributed.terminal_text import print_text
from fullshard.version import __version__

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as in shells."""


class Commands(typer.core.TyperGroup):
    """The group of commands. Ctrl-C ends a command with one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the words name."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_text("\nfullshard: interrupted", sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


class OwnFlags(typer.core.TyperCommand):
    """A command that parses its own flags: shells complete them as they complete its words."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The completions of a word, flags among them."""
        return self.params[0].shell_complete(ctx, incomplete)


# Options are declared with underscores; hyphens are accepted as well.
_NAMES = {"token_normalize_func": lambda name: name.replace("_", "-")}
app = typer.Typer(
    name="fullshard",
    cls=Commands,
    help="Train and fine-tune transformer models fully sharded.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line. A `UserError` becomes one message and its exit code, without a traceback."""
    log_filter.install_filters()
    redaction.learn_words(sys.argv[1:])
    try:
        app()
    except UserError as error:
        print_text(f"fullshard: {for_people(error)}", sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print_text(f"fullshard: {for_people(error)}; expected a path.", sys.stderr)
        sys.exit(ConfigError.exit_code)


def _print_version(requested: bool) -> None:
    if requested:
        print_text(f"fullshard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


@app.command(context_settings=_NAMES, short_help="Show versions, devices and ranks.")
def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, devices, backends, ranks and environment variables, for bug reports. Secrets are hidden."""
    from fullshard.launch import environment_report

    facts = environment_report.describe_environment()
    if isinstance(facts["rank"], int) and facts["rank"] != 0:
        return
    print_text(json.dumps(facts) if as_json else "\n".join(environment_report.as_lines(facts)))


def _own_flags(command: str) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """What shells ask to complete the flags of a command that parses its own."""

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        from fullshard.launch import completion

        return list(completion.complete(command, ctx.params.get("words") or (), incomplete))

    return complete


_PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
"""For commands that parse their own flags from a configuration class."""


@app.command(cls=OwnFlags, context_settings=_PASS_ON, add_help_option=False, short_help="Run a script on every rank.")
def launch(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS] SCRIPT [ARGUMENTS]…", autocompletion=_own_flags("launch"))
    ] = None,
) -> None:
    """Run a script on every rank, with the settings of a configuration file."""
    from fullshard.launch import command

    raise typer.Exit(command.launch(words or []))


@app.command(context_settings=_NAMES, short_help="Create a configuration file.")
def config(
    action: Annotated[str, typer.Argument(help="ask (questionnaire), default or update")] = "ask",
    config_file: Annotated[str | None, typer.Option("--config_file", help="The file to write: YAML or JSON.")] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Write a file with defaults for this machine, without questions.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Rewrite an existing file with current key names.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    mixed_precision: Annotated[str | None, typer.Option("--mixed_precision", help="no, fp16 or bf16.")] = None,
) -> None:
    """Create the configuration file that fullshard launch and Accelerate read, from questions or defaults."""
    from fullshard.launch import command

    chosen = "default" if default else "update" if update else action
    if chosen not in ("ask", "default", "update"):
        raise ConfigError(f"fullshard config {chosen}: expected ask, default or update")
    command.config(chosen, config_file, force, mixed_precision)


@app.command(
    "test",
    cls=OwnFlags,
    context_settings=_PASS_ON,
    add_help_option=False,
    short_help="Test a configuration with a tiny model.",
)
def try_configuration(
    words: Annotated[list[str] | None, typer.Argument(metavar="[FLAGS]…", autocompletion=_own_flags("test"))] = None,
) -> None:
    """Train a tiny model for a few steps with your configuration and report what works."""
    from fullshard.launch import command

    raise typer.Exit(command.test(words or []))


@app.command("merge-weights", context_settings=_NAMES, short_help="Convert a sharded checkpoint to full weights.")
def merge_weights(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, such as RUN/checkpoints/step-100.")],
    out: Annotated[str, typer.Argument(help="The output folder; it must not exist yet.")],
    dtype: Annotated[str | None, typer.Option(help="Convert to float32, bfloat16 or float16.")] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", help="Maximum size of each file; larger models are split.")
    ] = "10GB",
    model: Annotated[str | None, typer.Option(help="The name of the model, if the checkpoint has several.")] = None,
    verify: Annotated[bool, typer.Option(help="Verify the checksum of every file first.")] = True,
) -> None:
    """Convert a sharded checkpoint to full weights that from_pretrained reads."""
    from fullshard.checkpoint.consolidate import merge_weights as merge

    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "model": model, "verify": verify}
    for file in merge(checkpoint, out, progress=True, **options):
        print_text(str(file))


@app.command("inspect", context_settings=_NAMES, short_help="Show the contents of a checkpoint.")
def inspect_checkpoint(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a folder of checkpoints.")],
    verify: Annotated[bool, typer.Option("--verify", help="Verify the checksum of every file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the contents of a checkpoint: steps, mesh, plan, sizes, versions, health. Exit code 1 if it is damaged."""
    from fullshard.checkpoint import inspect

    facts = inspect.inspect_checkpoint(checkpoint, verify)
    if as_json:
        print_text(json.dumps(facts))
    else:
        from rich.table import Table

        from fullshard.distributed.console import Terminal

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in inspect.lines(facts):
            table.add_row(name, value)
        Terminal().print(table)
    if any(one["health"] == "damaged" for one in facts.get("checkpoints", [facts])):
        raise typer.Exit(1)


@app.command(cls=OwnFlags, context_settings=_PASS_ON, add_help_option=False, short_help="Fine-tune a language model.")
def sft(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN.YAML] [FLAGS]…", autocompletion=_own_flags("sft"))
    ] = None,
) -> None:
    """Fine-tune a language model, fully sharded."""
    from fullshard.launch import sft_command

    raise typer.Exit(sft_command.sft(words or []))


@app.command(
    cls=OwnFlags, context_settings=_PASS_ON, add_help_option=False, short_help="Show what a run needs before it runs."
)
def plan(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL_OR_RUN.YAML [FLAGS]…", autocompletion=_own_flags("plan"))
    ] = None,
) -> None:
    """Show what a training run needs in memory and time, and whether it fits on a machine."""
    from fullshard.launch import plan_command

    raise typer.Exit(plan_command.plan(words or []))


@app.command(
    cls=OwnFlags, context_settings=_PASS_ON, add_help_option=False, short_help="Draw how a model lies over the ranks."
)
def show(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL_OR_RUN [FLAGS]…", autocompletion=_own_flags("show"))
    ] = None,
) -> None:
    """Draw how a model lies over the ranks: mesh, units, gathered bytes over a step, memory by part."""
    from fullshard.launch import show_command

    raise typer.Exit(show_command.show(words or []))


@app.command(context_settings=_NAMES, short_help="Chat with a model or the result of a run.")
def chat(
    model: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, a model, or an adapter.")],
    prompt: Annotated[
        str | None, typer.Option(help="Print the answer to this prompt and exit. - reads the prompt from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max_new_tokens", help="The maximum length of an answer, in tokens.")
    ] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top_p", help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the dtype of the files), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … Default: a GPU if there is one.")] = None,
    base: Annotated[str | None, typer.Option(help="The folder of the adapter's base model, if it has moved.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Use a checkpoint of the run: a step, or latest.")] = None,
    use_4bit_quantization: Annotated[
        bool | None,
        typer.Option(
            "--use_4bit_quantization/--no_use_4bit_quantization",
            help="Load the model in 4 bits. Default: as in the run.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: print one JSON object.")] = False,
) -> None:
    """Chat with a model or the result of a run. Answers are streamed."""
    from fullshard.launch import result_commands as command

    command.chat(model, command.ChatOptions(
        prompt, system, max_new_tokens, temperature, top_p, seed, dtype, device, base, checkpoint,
        use_4bit_quantization, as_json,
    ))  # fmt: skip


@app.command("export", context_settings=_NAMES, short_help="Export a result; --merge merges an adapter.")
def export_result(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, a model, an adapter, or a checkpoint.")],
    out: Annotated[str, typer.Argument(help="The output folder; it must not exist yet.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base model.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert to float32, bfloat16 or float16.")] = None,
    dequantized: Annotated[
        bool,
        typer.Option("--dequantized", help="With --merge: merge into the dequantized 4-bit base (QLoRA)."),
    ] = False,
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize", help="With --merge: quantize the result into the base's format (MXFP4, fp8, …) again."
        ),
    ] = False,
    base: Annotated[str | None, typer.Option(help="The folder of the adapter's base model, if it has moved.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Use a checkpoint of the run: a step, or latest.")] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", help="Maximum size of each file; larger models are split.")
    ] = "10GB",
    verify: Annotated[bool, typer.Option(help="Read the files back and verify checksums.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export a result for transformers, PEFT, vLLM and llama.cpp; with --merge as full weights."""
    from fullshard.launch import result_commands as command

    command.export(run, out, command.ExportOptions(
        merge, dtype, dequantized, requantize, base, checkpoint, max_shard_size, verify, as_json
    ))  # fmt: skip


@app.command("report", context_settings=_NAMES, short_help="Rebuild, compare or watch the reports of runs.")
def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="The folders of runs; several are compared.")],
    out: Annotated[
        str | None,
        typer.Option(help="The HTML file to write. Default: report.html in the run's folder, or comparison.html here."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show running jobs live, on this machine only, until they end.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="With --serve: the port; 0 is any free one. Default: 8765 if it is free.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the results as one JSON object.")] = False,
) -> None:
    """Rebuild the report of a run from the files in its folder, compare several runs on one page, or watch them."""
    from fullshard.report import command as report

    report.report(runs, report.ReportOptions(out, serve, port, as_json))
