"""README and docs hold: Python blocks run as printed, commands and files can be parsed, links lead somewhere.

Blocks marked `text` and `diff` show what others write, output, or drawings, and are not run.
"""

import itertools
import json
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

import peft  # noqa: F401 - imported here, so that the workers, which are forked, need not import it each
import pytest
import torch
import transformers  # noqa: F401
import typer.main
import yaml

from fullshard.cli import app
from fullshard.config.configfile import read_file, sort_keys
from fullshard.config.options import options_of, parse_flags
from fullshard.launch.config import file_options, launch_options
from fullshard.launch.plan_command import plan_options, read_request
from fullshard.launch.sft_command import split
from fullshard.launch.show_command import ShowOptions, read_options
from fullshard.sft.cli_args import CommandConfig, command_options
from tests.pool import ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "console", "bash", "yaml", "json", "text", "diff", ""}
PROGRAM = typer.main.get_command(app)
COMMANDS = PROGRAM.commands  # type: ignore[attr-defined]
OURS = ("examples/", "benchmarks/", "quickstart/", "tools/", "tests/", "docs/")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^( *)```(\S*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[2], textwrap.dedent(match[3])))
    return [block for block in found if block.language in languages] if languages else found


# --- Python ---------------------------------------------------------------------------------------------------------


def programs() -> dict[str, str]:
    found: dict[str, str] = {}
    for block in blocks("python"):
        number = sum(name.rpartition("-")[0] == block.page.stem for name in found)
        found[f"{block.page.stem}-{number}"] = block.text
    return found


@ranks(1, 2, 4, slow=(1, 4))
@pytest.mark.parametrize("block", programs())
def test_a_block_runs_as_printed(block):
    exec(compile(programs()[block], block, "exec"), {"__name__": "__main__"})


@ranks(1, 2)
def test_the_readme_s_example_has_the_loss_of_one_device():
    (text,) = [text for name, text in programs().items() if name.startswith("README")]
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text, "README", "exec"), names)
    torch.manual_seed(0)
    x, w = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
    loss = (x @ w).relu().mean()
    loss.backward()
    torch.testing.assert_close(names["loss"].full_tensor(), loss, rtol=1e-6, atol=0)  # type: ignore[attr-defined]
    torch.testing.assert_close(names["w"].grad.full_tensor(), w.grad)  # type: ignore[attr-defined]


def test_there_are_blocks_to_run():
    assert {name.rpartition("-")[0] for name in programs()} >= {"README", "spmd", "fsdp", "qlora", "coming-from"}


def test_every_fence_is_of_a_kind_that_is_checked():
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(blocks()), "a fence that is not closed, or closed at another indentation"
    assert {block.language for block in blocks()} <= LANGUAGES


# --- commands -------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    """Every command line of console and bash blocks, and the place it stands at."""
    found = []
    for block in blocks("console", "bash"):
        prompted = any(line.startswith("$ ") for line in block.text.splitlines())
        for line in block.text.replace("\\\n", " ").splitlines():
            if prompted and not line.startswith("$ "):
                continue  # output
            for part in re.split(r"&&|;|\bthen\b", line.removeprefix("$ ")):
                if part.strip() and not part.strip().startswith("#"):
                    found.append((str(block), " ".join(part.split(" #")[0].split())))
    return found


@pytest.mark.parametrize(("where", "command"), commands())
def test_a_command_is_one_that_exists(where, command):
    words = list(itertools.takewhile(lambda word: word not in ("<", ">", "|"), shlex.split(command)))
    for word in words:
        if word.startswith(OURS):
            assert (ROOT / word).exists(), f"{where}: {word} does not exist"
    if words[0] == "make":
        targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= {*targets}, f"{where}: make has {targets}"
    if "fullshard" in words and words[0] != "pip":
        check_fullshard(words[words.index("fullshard") + 1 :])


def check_fullshard(words: list[str]) -> None:
    """Parse the words as the command itself would; nothing is started."""
    name, *left = [word for word in words if not word.startswith("$")]  # a shell variable may hold anything
    assert name in COMMANDS, f"there is no fullshard {name}; there are {sorted(COMMANDS)}"
    if name == "sft":
        mine, launchers = split(left)
        file, flags = (mine[:1], mine[1:]) if mine and not mine[0].startswith("-") else ([], mine)
        parsed = parse_flags(flags, command_options(), name)
        assert not parsed.rest, parsed.rest
        assert file or parsed.values.get("model_name_or_path")
        CommandConfig(**parsed.values)
        assert not parse_flags(launchers, launch_options(), "launch").rest
    elif name in ("plan", "show"):
        read_request(
            ["model" if word == "run.yaml" else word for word in (read_options(left)[1] if name == "show" else left)]
        )
    elif name in ("launch", "test"):
        parsed = parse_flags(left, launch_options(), name)
        assert bool(parsed.rest) == (name == "launch")
    else:
        COMMANDS[name].make_context(name, left)  # raises on unknown options, missing and surplus arguments


FOREIGN = {"help", "version", "nproc_per_node", "ntasks_per_node", "no"}
"""Flags of torchrun and srun, and half of `--no_…`, that pages mention."""


def test_flags_mentioned_in_the_text_exist():
    known = set(FOREIGN)
    for one in (*command_options(), *launch_options(), *plan_options(), *options_of(ShowOptions)):
        known |= {one.key, *one.flags, f"no_{one.key}"}
    for command in (PROGRAM, *COMMANDS.values()):
        for parameter in command.params:
            known |= {name.lstrip("-").replace("-", "_") for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = []
    for page in PAGES:
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _without_blocks(page)):
            flags = re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", span)
            unknown += [f"{page.name}: --{flag}" for flag in flags if flag.replace("-", "_") not in known]
            if (found := re.match(r"fullshard ([a-z-]+)", span)) and found[1] not in COMMANDS:
                unknown.append(f"{page.name}: {span}")
    assert not unknown, unknown


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_yaml_block_is_a_configuration(block, tmp_path):
    file = tmp_path / "block.yaml"
    file.write_text(block.text)
    notes: list[str] = []
    if {"distributed_type", "fsdp_config", "num_processes"} & set(yaml.safe_load(block.text)):
        assert sort_keys(read_file(file), file_options(), notes).values
    else:
        CommandConfig(**sort_keys(read_file(file), command_options(), notes).values)
    assert not notes, "shown to users, and yet it has to be interpreted"


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_a_json_block_is_json(block):
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():  # JSON lines
            json.loads(line)


def _without_blocks(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The names that headings can be linked by, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"], ids=lambda p: p.name
)
def test_links_and_pictures_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_blocks(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken, broken


def test_every_page_can_be_found_from_the_readme():
    linked = re.findall(r"\]\(docs/([\w.-]+\.md)", (ROOT / "README.md").read_text())
    assert {page.name for page in PAGES[1:]} == set(linked)


def test_every_page_says_first_what_one_can_do_after_reading_it():
    bare = [
        page.name for page in PAGES[1:] if not re.match(r"# .+\n\nAfter reading this page you can ", page.read_text())
    ]
    assert not bare, bare


def test_the_site_has_every_page_once():
    """`make docs` checks it too, and needs MkDocs, which `make test` does not install."""
    listed = re.findall(r": ([\w.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*(page.name for page in PAGES[1:]), "index.md", "changelog.md", "benchmarks.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_are_read_alike_in_the_repository_and_on_the_site(page):
    """GitHub takes any indentation below an item, and an item right after a paragraph; the site takes neither."""
    lines = page.read_text().splitlines()
    fences = [line for line in lines if re.match(r" +```", line)]
    assert not [line for line in fences if (len(line) - len(line.lstrip())) % 4], "indent by 4 below an item"
    text = _without_blocks(page).splitlines()
    items = [i for i, line in enumerate(text) if re.match(r" *(?:[-*]|\d+\.) ", line)]
    joined = [text[i] for i in items if text[i - 1].strip() and i - 1 not in items and not text[i - 1].startswith("  ")]
    assert not joined, "leave a line before the list"
    assert not [text[i] for i in items if (len(text[i]) - len(text[i].lstrip())) % 4], "indent by 4 below an item"


def test_files_of_the_package_mentioned_in_the_text_exist():
    rooms = [folder.name for folder in (ROOT / "fullshard").iterdir() if (folder / "__init__.py").exists()]
    pages = [page for page in PAGES if not page.name.startswith("release-")]  # what a release had may have moved since
    absent = []
    for page in pages:
        for name in re.findall(rf"`((?:{'|'.join(rooms)})/[\w/]*(?:\.py)?)`", _without_blocks(page)):
            place = ROOT / "fullshard" / name
            if not place.exists() and not place.with_suffix(".py").exists():
                absent.append(f"{page.name}: {name}")
    assert not absent, absent


def test_files_mentioned_in_the_text_exist():
    absent = []
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}  # what runs leave
    for page in PAGES:
        for name in re.findall(r"`((?:examples|benchmarks|quickstart|tools|tests|docs)/[\w./-]*)`", page.read_text()):
            if not (ROOT / name).exists() and name.rstrip("/") not in ignored:
                absent.append(f"{page.name}: {name}")
    assert not absent, absent


def test_variables_mentioned_in_the_text_exist():
    tests = ROOT / "tests"
    places = [
        *(ROOT / "fullshard").rglob("*.py"),
        *(tests / "gpu").glob("*.py"),
        tests / "pool.py",
        tests / "browser.py",
        *(tests / "xla").glob("*.py"),
    ]
    source = "".join(path.read_text() for path in places)
    mentioned = {name for page in PAGES for name in re.findall(r"FULLSHARD_[A-Z_]+", page.read_text())}
    assert "FULLSHARD_CACHE" in mentioned
    assert not [name for name in mentioned if f'"{name}"' not in source]
