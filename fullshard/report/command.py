"""`fullshard report`: rebuilds the report of a run from the files in its folder, or compares several runs on one page.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.paths import list_contents, replace_text
from fullshard.distributed.terminal_text import print_text
from fullshard.report.compare import ABSENT, comparison, different_settings, numbers
from fullshard.report.html_report import contents
from fullshard.report.page import whole_page
from fullshard.report.records import METRICS_FILE, REPORT_FILE, SETTINGS_FILE
from fullshard.report.run_record import RunRecord, read_run
from fullshard.report.serve import serve
from fullshard.sft.output_dir import lock_owner

COMPARISON_FILE = "comparison.html"
"""Where a comparison is written, in the current folder."""
NAMED = 4
"""The most names in a message."""


@dataclass(frozen=True)
class ReportOptions:
    """The flags of `fullshard report`."""

    out: str | None = None
    serve: bool = False
    port: int | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.serve and (self.out is not None or self.as_json):
            raise ConfigError("--serve writes no file and prints no numbers; leave --out and --json out.")
        if self.port is not None and not self.serve:
            raise ConfigError("--port is for --serve.")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; expected 0 (any free port) to 65535.")
        if self.out is not None and Path(self.out).suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"--out is {self.out!r}; expected the name of an HTML file, such as {COMPARISON_FILE}.")


def report(names: Sequence[str], options: ReportOptions) -> None:
    """Write the report of one run, or a comparison of several; or show it live."""
    folders = list({folder.resolve(): folder for folder in map(run_folder, names)}.values())
    if options.serve:
        print_text(serve(folders, options.port))
        return
    runs = [read_run(folder) for folder in folders]
    default = folders[0] / REPORT_FILE if len(runs) == 1 else Path(COMPARISON_FILE)
    target = Path(options.out).expanduser() if options.out is not None else default
    _write(target, whole_page(contents(runs[0]) if len(runs) == 1 else comparison(runs)))
    if options.as_json:
        print_text(json.dumps(_summary(runs, target)))
        return
    for run in runs:
        for sentence in run.missing:
            print_text(f"{run.folder}: {sentence}", sys.stderr)
    print_text(str(target))


def run_folder(name: str) -> Path:
    """The folder of a run. Refuses what is none."""
    folder = Path(name).expanduser()
    if not folder.exists():
        raise ConfigError(f"{name} does not exist; expected the output_dir of a run.")
    if not folder.is_dir():
        near = f", such as {folder.parent}" if _is_run(folder.parent) else ""
        raise ConfigError(f"{name} is a file; expected the output_dir of a run{near}.")
    try:
        if _is_run(folder) or lock_owner(folder) is not None:
            return folder
        inner = sorted(str(one) for one in folder.iterdir() if one.is_dir() and _is_run(one))
        entries = list_contents(folder)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}.") from None
    runs = f" It contains runs: {', '.join(inner[:NAMED])}{', …' if len(inner) > NAMED else ''}." if inner else ""
    raise ConfigError(
        f"{name} is not the output_dir of a run: it has neither {METRICS_FILE} nor {SETTINGS_FILE}, but "
        f"{entries}.{runs}"
    )


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or (folder / SETTINGS_FILE).is_file()


def _write(target: Path, text: str) -> None:
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; --out names an HTML file.")
    try:
        replace_text(target, text)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; --out names another file.") from None


def _summary(runs: Sequence[RunRecord], target: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"report": str(target.resolve()), "runs": [numbers(run) for run in runs]}
    if len(runs) > 1:
        facts["different_settings"] = {
            name: {str(run.folder): value for run, value in zip(runs, values, strict=True) if value is not ABSENT}
            for name, values in different_settings(runs).items()
        }
    return facts
