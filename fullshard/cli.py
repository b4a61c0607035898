"""The `fullshard` command: parses, calls, prints. What takes long to import, the command that needs it imports."""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Annotated, Any

import typer

from fullshard import UserError, __version__

app = typer.Typer(
    name="fullshard",
    help="Train and fine-tune transformer models fully sharded.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. What the user can put right is one message and exit code 2, without a traceback."""
    try:
        app()
    except UserError as error:
        print(f"fullshard: {error}", file=sys.stderr)
        sys.exit(2)


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


@app.command()
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


def describe_environment() -> dict[str, Any]:
    """The facts that decide how a run behaves here; nothing is initialised to find them."""
    import torch

    import fullshard.runtime as xr
    from fullshard.launcher import choose_backend, gpu_count

    gpus = gpu_count()
    return {
        "fullshard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": str(xr.device()),
        "backend": choose_backend(xr.device().type, xr.local_world_size(), gpus),
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
        "cpus": os.cpu_count(),
        "rank": xr.rank(),
        "world_size": xr.world_size(),
        "local_world_size": xr.local_world_size(),
        "nodes": xr.node_count(),
    }
