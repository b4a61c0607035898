"""Writes docs/options.md from the typed configuration classes: `python tools/options.py`.

A class is added by a line in `PAGES`; tests/launch/test_page.py fails while the page is not what this writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fullshard.config.options import Option, options_of
from fullshard.launch.config import ProcessSettings, RunSettings
from fullshard.launch.help_text import default_of
from fullshard.launch.plan_command import plan_options
from fullshard.launch.show_command import ShowOptions
from fullshard.parallel.ignored_options import IGNORED_OPTIONS
from fullshard.parallel.settings import EngineSettings
from fullshard.sft.cli_args import command_options
from fullshard.sft.sft_config import SFTConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
PAGES: list[tuple[str, str, Sequence[Option]]] = [
    ("`fullshard launch`: the run", "Flags only.", options_of(RunSettings)),
    (
        "`fullshard launch`: processes",
        "Flags, and keys at the top level of the configuration file.",
        options_of(ProcessSettings),
    ),
    (
        "`fullshard launch`: the engine",
        "Flags, keys of the configuration file (the section is named where there is one; inside it the prefix `fsdp_`, "
        "`dynamo_` or `parallelism_config_` may be left out), and environment variables.",
        options_of(EngineSettings),
    ),
    (
        "`fullshard sft`",
        "Flags, keys of the run's YAML file, and arguments of `SFTConfig`. In a script some defaults are others, those "
        "of TRL's `SFTConfig`; they are named.",
        [one for one in command_options() if not (one.no_op or one.refused)],
    ),
    (
        "`fullshard plan`",
        "Flags, besides all of `fullshard sft` and `fullshard launch`. [planning.md](planning.md) explains them.",
        plan_options(),
    ),
    (
        "`fullshard show`",
        "Flags, besides all of `fullshard plan`. [show.md](show.md) explains them.",
        options_of(ShowOptions),
    ),
    (
        "`SFTConfig` alone",
        "Arguments of `SFTConfig`; `fullshard launch` has its own flag.",
        [one for one in options_of(SFTConfig) if one.script_only and not one.refused],
    ),
]
IN_SCRIPTS = {one.name: one for one in options_of(SFTConfig)}
HEAD = """# Options

After reading this page you can look up every flag, key and environment variable: its meaning, values and default.

Written by `tools/options.py` from the typed configuration classes. Flags take hyphens or underscores.
[launch.md](launch.md) explains the first three tables.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, text, options in PAGES:
        rows = [row(one) for one in options]
        parts.append(
            f"## {title}\n\n{text}\n\n| option | values | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"
        )
    unused = [one for one in options_of(SFTConfig) if one.no_op]
    refused = [one for one in options_of(SFTConfig) if one.refused]
    parts.append(
        "## Accepted and ignored\n\nOptions of `fullshard launch` that are read from files and commands written for "
        f"other launchers, and have no effect.\n\n{reasons(IGNORED_OPTIONS)}"
    )
    parts.append(
        "## Settings of other trainers without effect\n\nArguments of transformers' `TrainingArguments` and TRL's "
        f"`SFTConfig` that `SFTConfig` and `fullshard sft` accept, and that change nothing.\n\n{reasons(unused)}"
    )
    parts.append(
        "## Settings of other trainers that are refused\n\nArguments of the same classes that are accepted at their "
        f"default only.\n\n{reasons(refused)}"
    )
    return "\n".join(parts)


def reasons(options: Iterable[Option]) -> str:
    rows = [f"| {name_of(one)} | {cell(one.no_op or one.refused)} |\n" for one in options]
    return f"| option | reason |\n|---|---|\n{''.join(rows)}"


def row(one: Option) -> str:
    default, other = default_of(one), IN_SCRIPTS.get(one.name)
    if other is not None and other.help == one.help and default_of(other) != default:
        default += f"; in a script {default_of(other)}"
    return f"| {name_of(one)} | {cell(one.values)} | {cell(default)} | {cell(one.help)} |\n"


def name_of(one: Option) -> str:
    """Its key, where it stands, and its other names."""
    text = f"`{one.key}`"
    if one.section:
        text += f" in `{one.section}`"
    others = [
        *(f"`{'-' if len(name) == 1 else '--'}{name}`" for name in one.flags),
        *(f"`{name}`" for name in one.aliases),
    ]
    if others:
        text += f"; also {', '.join(others)}"
    if one.wrong:
        text += f"; read with a note: {', '.join(f'`{one.prefix}{name}`' for name in one.wrong)}"
    if one.env:
        text += f"; variable `{one.env}`"
    return text


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}")
