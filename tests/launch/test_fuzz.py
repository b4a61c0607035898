"""Command lines, files, variables, rows and model folders that nobody meant to write, for `sft`, `launch` and `plan`:
each gives an answer or one clear error, without a traceback and in finite time.

Inputs follow from their number, so `FUZZ_FIRST=123 FUZZ_INPUTS=1` runs one of them again. Nothing is started: a run
ends where its processes would start, after its data, tokenizer and model have been looked at.
"""
# ruff: noqa: E501 - tables of inputs

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import cli
from fullshard.config.options import Option, options_of
from fullshard.launch import agent, command, preview, sft_command
from fullshard.launch.config import launch_options
from fullshard.launch.plan_command import plan_options
from fullshard.parallel.settings import EngineSettings
from fullshard.sft import base_model, trainer
from fullshard.sft.cli_args import command_options
from tests.data.tiny import make_tokenizer, text_rows
from tests.sft.tiny import make_folder

FIRST, INPUTS = int(os.environ.get("FUZZ_FIRST", "0")), int(os.environ.get("FUZZ_INPUTS", "2000"))
SECONDS = 120
"""An input that takes longer hangs."""
LONGEST = 4000
"""The most characters of an error."""
NEST = "[" * 4000 + "]" * 4000
TEXTS = [
    "", " ", "-1", "0", "1", "2", "7", "0.5", "-0.0", "1e999", "1.0e999", "-1e999", "nan", "inf", "9" * 400, "9" * 5000,
    "true", "no", "none", "null", "auto", "bf16", "\udcff", "\ud800", "a\udcffb", "x" * 5000, "/" * 5000, "{", "{}",
    "[]", NEST, '{"a": 1}', '{"a": 1e999}', '{"a":' * 2000 + "1" + "}" * 2000, "a=b", "a=", "=", ",", ",,", "~", "~nobody/x",
    ".", "..", "/", "/dev/null", "/proc/self/status", "model", "data", "model/config.json", "%s", "{0}", "{a.b[0]}",
    "line\nbreak", "tab\t", "\x1b[31m", "\u202e", "٣", "1_000", "0x10", "1e3", "80GiB", "1e30GiB", "-5GB", "NaNGiB", "--", "-",
    "1:30", "2024-01-01", "all", "all-linear", "q_proj", "(", "*", "[", "\\", "0,1", "0-7", "1-0", "0-99999999999", "é" * 300,
]  # fmt: skip
SCALARS = [
    ".inf", "-.inf", ".nan", "1.0e999", "1e999", "~", "''", "yes", "0o17", "0x1F", "1:30", "2024-01-01", "9999-99-99",
    "2024-01-01 99:99:99", "!!binary aGk=", "!!binary '*'", "!!python/object:os.system {}", "!!set {a, b}", "!!omap [a: 1]",
    "!!int x", "!!float x", "!!bool x", "!!timestamp x", "!unknown y", "[1, [2, {a: 3}]]", "{a: b}", "{1: 2}", "[]", "{}", '"\\ud800"',
    '"\\0"', "&a [*a]", "*nothing", "|\n  text\n  more", "'" + "x" * 5000 + "'", "'" + "9" * 5000 + "'", "9" * 5000, "model", "data",
    "-1", "0", "3", "0.5", "true", "null", "- a", "a: b: c", "@x", "`x", "%x", "\t", "\x00", "\x07", "\u0085", "\ufeff",
]  # fmt: skip
FILES: list[Callable[[bytes, random.Random], bytes]] = [
    lambda text, draw: b"",
    lambda text, draw: b"\0" + text,
    lambda text, draw: text.decode("utf-8", "replace").encode("utf-16"),
    lambda text, draw: b"\xef\xbb\xbf" + text,
    lambda text, draw: text[: draw.randrange(len(text) + 1)],
    lambda text, draw: text + b"\xff\xfe",
    lambda text, draw: (b"[" if draw.random() < 0.5 else b'{"a":') * 20_000,
    lambda text, draw: b"null",
    lambda text, draw: b"[]",
    lambda text, draw: b'"text"',
    lambda text, draw: b"1e999",
    lambda text, draw: text.replace(b":", draw.choice([b"", b"=", b"::", b":\0"]), draw.randrange(1, 4)),
    lambda text, draw: bytes(b if draw.random() > 0.01 else draw.randrange(256) for b in text),
]
"""Ways to damage a file."""
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 4, 5, 8, 64, 300, 2**31, 2**70, 0.5, -0.0, 1e-5, 1e30, float("inf"), float("nan"), "", "x", "\ud800", "a\0b", "x" * 5000,
    [], [1], ["a"], {}, {"a": 1}, [[[]]], {"rope_type": "yarn"}, {"rope_theta": None}, "bfloat16", "auto", "int4", "../x",
]  # fmt: skip
LIKELY: dict[type, list[str]] = {
    bool: ["true", "false", "yes", "0"], int: ["0", "1", "2", "3", "5", "7", "-1", "1e3", "4096", "999999999999"],
    float: ["0", "0.5", "1", "3", "1e-9", "-1", "1e9", "1e300"],
}  # fmt: skip
"""Values that the option's type allows, by which inputs get further."""
SIZES: list[Any] = [value for value in VALUES if not (isinstance(value, int) and value > 3)]
"""Values of a number of layers: very many are refused elsewhere."""
VARIABLE_OPTIONS = {one.env: one for one in options_of(EngineSettings) if one.env}
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "COLUMNS",
    "FULLSHARD_DEVICE", "FULLSHARD_CONFIG", "FULLSHARD_CACHE", "FULLSHARD_RESOLVED", "FULLSHARD_CHECK_GLOBAL", "SLURM_STEP_ID",
    "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST", "SLURM_JOB_ID",
    "SLURM_TASKS_PER_NODE", "TORCHELASTIC_RESTART_COUNT", "XDG_CONFIG_HOME", "CUDA_VISIBLE_DEVICES", "PJRT_DEVICE",
    "CPU_NUM_DEVICES", "ACCELERATE_USE_FSDP", "FSDP_VERSION",
    *VARIABLE_OPTIONS,
)  # fmt: skip
OWN = ("output_dir", "model_name_or_path", "dataset_name", "preview", "search", "out", "rdzv_conf")
"""Flags that the inputs give themselves."""


@dataclass
class Input:
    """What a user may type, and what lies around them."""

    words: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        files = {name: text if len(text) < 600 else text[:600] + b"..." for name, text in self.files.items()}
        return f"fullshard {self.words!r:.2000}\n  files {files!r}\n  variables {self.variables!r:.1000}"


class Writer:
    """Makes inputs from a number."""

    def __init__(self, place: Path) -> None:
        self.texts = {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in place.rglob("*.json*")
            if path.is_file() and "chats" not in path.parts
        }
        self.options = {
            "sft": (*command_options(), *launch_options()),
            "launch": launch_options(),
            "plan": (*plan_options(), *command_options(), *launch_options()),
        }

    def make(self, number: int) -> Input:
        draw = random.Random(number)
        name = ("sft", "launch", "plan")[number % 3]
        made = Input({"sft": self._sft, "launch": self._launch, "plan": self._plan}[name](draw))
        ways = {"sft": (5, 4, 2, 4, 2), "launch": (5, 5, 4, 0, 0), "plan": (4, 3, 1, 0, 5)}[name]
        (way,) = draw.choices((self._flags, self._file, self._variables, self._rows, self._model), ways)
        way(name, draw, made)
        return made

    def _sft(self, draw: random.Random) -> list[str]:
        words = ["sft", "--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out", "--use_cpu"]
        return [*words, *(["--preview"] if draw.random() < 0.3 else [])]

    def _launch(self, draw: random.Random) -> list[str]:
        return ["launch", *(["--cpu"] if draw.random() < 0.5 else []), "script.py", "--flag"]

    def _plan(self, draw: random.Random) -> list[str]:
        return ["plan", "model", "--max_length", "32", "--machine", draw.choice(["cpu", "h200"])]

    # --- what is wrong with it --------------------------------------------------------------------------------------

    def _flags(self, name: str, draw: random.Random, made: Input) -> None:
        words = []
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            one = self._option(name, draw)
            value = _value(one, draw)
            if draw.random() < 0.15:
                words.append(draw.choice(TEXTS))
            elif draw.random() < 0.5:
                words += [f"--{one.key}", value]
            else:
                words.append(f"--{one.key}={value}")
        place = draw.choice((1, len(made.words), draw.randrange(1, len(made.words) + 1)))
        made.words[place:place] = [word.replace("\0", "") for word in words]  # a program's arguments have no zeros
        if name == "launch" and draw.random() < 0.2:
            made.words[-2] = draw.choice(TEXTS)

    def _option(self, name: str, draw: random.Random) -> Option:
        return draw.choice([one for one in self.options[name] if one.name not in OWN])

    def _file(self, name: str, draw: random.Random, made: Input) -> None:
        lines = {"sft": ["model_name_or_path: model"], "launch": ["num_processes: 2"], "plan": ["bf16: true"]}[name]
        for _ in range(draw.choice((1, 1, 2, 5))):
            one = self._option(name, draw)
            odd = draw.random() < 0.15
            key = draw.choice((draw.choice(SCALARS), f"? {draw.choice(SCALARS)}\n", "<<")) if odd else one.key
            line = f"{key}: {draw.choice(SCALARS) if draw.random() < 0.4 else _value(one, draw)}"
            lines.append(f"{one.section}:\n  {line}" if one.section and draw.random() < 0.7 else line)
        text = "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"
        suffix = draw.choice((".yaml", ".yaml", ".json"))
        if suffix == ".json":
            keys = [self._option(name, draw).key for _ in range(3)]
            text = json.dumps({key: draw.choice(VALUES) for key in keys}).encode()
        made.files[f"x{suffix}"] = draw.choice(FILES)(text, draw) if draw.random() < 0.3 else text
        flag = draw.choice(("--config_file", "--config_file", "--fsdp_config", "--accelerator_config"))
        if name == "launch" or draw.random() < 0.4:
            made.words[1:1] = [flag if name != "launch" else "--config_file", f"x{suffix}"]
            if name == "plan":
                made.words = ["plan", *made.words[3:], *made.words[1:3]]
        else:
            made.words[1:1] = [f"x{suffix}"]
            if name == "plan":
                made.words[2] = "--model_name_or_path=model"

    def _variables(self, name: str, draw: random.Random, made: Input) -> None:
        for _ in range(draw.choice((1, 2, 5))):
            variable = draw.choice(VARIABLES)
            value = _value(VARIABLE_OPTIONS[variable], draw) if variable in VARIABLE_OPTIONS else draw.choice(TEXTS)
            made.variables[variable] = value.replace("\0", "").replace("\ud800", "")
        if draw.random() < 0.2:
            slurm = {
                "STEP_ID": "0",
                "PROCID": "0",
                "NODEID": "0",
                "LOCALID": "0",
                "NTASKS": "2",
                "NNODES": "1",
                "JOB_ID": "7",
            }
            slurm |= {"JOB_NODELIST": "a[1-2]", "TASKS_PER_NODE": "2", draw.choice(list(slurm)): draw.choice(TEXTS)}
            made.variables |= {f"SLURM_{name}": text.replace("\ud800", "") for name, text in slurm.items()}

    def _rows(self, name: str, draw: random.Random, made: Input) -> None:
        rows: list[Any] = text_rows(6, seed=draw.randrange(99))
        for row in rows[: draw.randrange(6)]:
            row[draw.choice(("text", "messages", "prompt", "completion", "input_ids", "labels"))] = draw.choice(
                (
                    *VALUES,
                    [{"role": draw.choice(("user", "x", 3)), "content": draw.choice(VALUES)}],
                    [draw.choice(VALUES)],
                )
            )
        text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        suffix = draw.choice((".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", ".jsonl.gz"))
        made.files[f"rows{suffix}"] = draw.choice(FILES)(text, draw) if draw.random() < 0.5 else text
        made.words[made.words.index("data")] = f"rows{suffix}"
        more = [
            [],
            ["--packing"],
            ["--on_bad_row", "skip"],
            ["--eval_strategy=steps", "--val_size=1"],
            ["--streaming", "--max_steps=1"],
        ]
        made.words += [*draw.choice(more), "--preview"]

    def _model(self, name: str, draw: random.Random, made: Input) -> None:
        files = [file for file in self.texts if file.startswith("model/")]
        file = "model/config.json" if name == "plan" or draw.random() < 0.4 else draw.choice(files)
        if draw.random() < 0.3:
            made.files[file] = draw.choice(FILES)(self.texts[file], draw)
        else:
            content = json.loads(self.texts[file])
            for _ in range(draw.choice((1, 1, 2, 3))):
                _change(content, draw)
            made.files[file] = json.dumps(content).encode()
        if draw.random() < 0.3:
            self._flags(name, draw, made)


def _value(one: Option, draw: random.Random) -> str:
    """A value for an option: mostly one of its type."""
    if draw.random() < 0.25:
        return draw.choice(TEXTS)
    return draw.choice(one.choices or LIKELY.get(one.kind, TEXTS))


def _change(content: Any, draw: random.Random) -> None:
    """Change one value somewhere in an object, remove it, or add one."""
    while isinstance(content, dict) and content:
        key = draw.choice(list(content))
        if isinstance(content[key], dict) and draw.random() < 0.5:
            content = content[key]
            continue
        if draw.random() < 0.15:
            del content[key]
        else:
            values = SIZES if "layers" in key else VALUES
            alike = [value for value in values if type(value) is type(content[key])]
            content[key] = copy.deepcopy(draw.choice(alike if alike and draw.random() < 0.7 else values))
        return


# --- running it -------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """An input takes too long."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_folder(tmp_path_factory.mktemp("fuzz"), rows=8)
    (place / "script.py").write_text("raise SystemExit('this must not run')")
    make_tokenizer().save_pretrained(place / "model")
    return place


def look(run: Any) -> None:
    """What a run reads before it trains, in place of its training: data, tokenizer and model."""
    preview.preview_run(run)
    base_model.read_model(run.config, Path(run.model), torch.device("cpu"), print)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "launch", lambda settings, say: len(json.dumps(settings.environment(os.environ))) * 0)
    monkeypatch.setattr(trainer, "train_run", look)
    monkeypatch.setattr(command, "count_gpus", lambda: 0)
    monkeypatch.setattr(sft_command, "count_gpus", lambda: 0)


def run_one(given: Input, place: Path, origin: Path) -> str | None:
    """What is wrong with what the command did; None if nothing."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(origin, place)
    for name, text in given.files.items():
        (place / name).write_bytes(text)
    before, here = dict(os.environ), os.getcwd()
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    os.chdir(place)
    os.environ |= {
        "XDG_CONFIG_HOME": "config",
        "HF_HOME": str(place / "hf"),
        "FULLSHARD_CACHE": "cache",
        **given.variables,
    }
    plain = sys.argv, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["fullshard", *given.words], stdout, stderr
    code: Any = "no exit code"
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    except Hang:
        return f"takes more than {SECONDS} s\n{traceback.format_exc()[-1500:]}"
    except BaseException:
        return traceback.format_exc()[-6000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.argv, sys.stdout, sys.stderr = plain
        os.chdir(here)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
    stderr.flush()
    said = stderr.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if code not in (0, 1, 2, 3):
        return f"exit code {code!r}"
    if "Traceback" in said or (code == 2 and not 0 < len(said[said.rfind("\nfullshard: ") + 1 :]) <= LONGEST):
        return f"exit code {code}: {said[:500]} … {said[-3000:]}"
    return None


@pytest.mark.slow
def test_no_input_gives_a_traceback_or_hangs(origin: Path, tmp_path: Path, nothing_starts: None) -> None:
    def hang(number: int, frame: Any) -> None:
        raise Hang

    earlier, writer, wrong = signal.signal(signal.SIGALRM, hang), Writer(origin), []
    try:
        for number in range(FIRST, FIRST + INPUTS):
            given = writer.make(number)
            if (fault := run_one(given, tmp_path / "here", origin)) is not None:
                wrong.append(f"FUZZ_FIRST={number}: {given}\n{fault}")
    finally:
        signal.signal(signal.SIGALRM, earlier)
    assert not wrong, f"{len(wrong)} of {INPUTS} inputs\n\n" + "\n\n".join(wrong[:40])
