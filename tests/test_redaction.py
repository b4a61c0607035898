"""Secrets: planted in every flag, setting and variable that can hold one, they are in no command line, file, log line,
error or upload."""
# ruff: noqa: E501 - tables of secrets

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from fullshard.config import redaction
from fullshard.config.errors import UserError, for_people
from fullshard.config.options import Option
from fullshard.config.redaction import hide, hide_in, hide_words, is_secret, learn
from fullshard.launch import agent
from fullshard.launch.config import file_options, launch_options
from fullshard.launch.plan_command import plan_options
from fullshard.launch.resolve import resolve
from fullshard.launch.worker import COMMAND_VARIABLE
from fullshard.sft import output_dir
from fullshard.sft.checked_run import check_command
from fullshard.sft.cli_args import command_options, parse
from tests.pool import ROOT
from tests.sft.tiny import children_of, make_folder

SECRET = "s3cr3t-Kx9/q+Zw"
OURS = "hub_token"
VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_SECRET_KEY",
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING", "GITHUB_TOKEN", "GITHUB_PAT", "PGPASSWORD", "SSHPASS",
    "SLACK_WEBHOOK_URL", "OPENAI_API_KEY", "SWANLAB_API_KEY", "DVC_STUDIO_TOKEN",
)  # fmt: skip
"""Variables from which transformers' loggers, the hub and storage take secrets."""
NO_SECRETS = (
    "pad_token", "eos_token", "BOS_TOKEN", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "TOKENIZERS_PARALLELISM", "tokens",
    "trainable_token_indices", "projection_prng_key", "monkey", "XAUTHORITY", "sample_max_new_tokens", "stop_token",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_learned", set())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("secrets"), rows=12)


# --- names ----------------------------------------------------------------------------------------------------------


def test_which_names_hold_secrets() -> None:
    assert all(map(is_secret, (*VARIABLES, "--hub-token", "token", "password", "x_api_key", "apiKey")))
    assert not [name for name in NO_SECRETS if is_secret(name)]
    every = {
        name for one in (*command_options(), *launch_options(), *plan_options()) for name in (*one.names, *one.flags)
    }
    assert {name for name in every if is_secret(name)} == {OURS}


@pytest.mark.parametrize(
    "write", [json.dumps, repr, quote_plus, quote, lambda value: json.dumps([value], ensure_ascii=False)]
)
def test_secrets_are_hidden_however_they_are_written(write: Callable[[str], str]) -> None:
    """In JSON, in Python's quotes, in a URL."""
    secret = "pä\"s's +wo/rd\\x&y"
    learn({"hub_token": secret})
    assert hide(f"a {write(secret)} b") in (f"a {q}<hidden>{q} b" for q in ("", '"', "'")) or "[" in write(secret)
    assert "wo" not in hide(write(secret)) and "x&y" not in hide(write(secret))


def test_secrets_without_a_name_are_recognized() -> None:
    for text in (
        "Authorization: Bearer abcdef.123456", "authorization: bearer abcdef.123456", "https://a.b/c?x=1&sig=ab%3Dcdef&y=1",
        "xoxb-123456789012-abcdefgh", "https://user:abcdef@host/x",
    ):  # fmt: skip
        assert "<hidden>" in hide(text) and "abcdef" not in hide(text) and "ab%3Dcdef" not in hide(text)


def test_text_is_hidden_by_value() -> None:
    given = {"a": {"token": SECRET}, "list": ["API_KEY=k-123456", {"eos_token": "</s>"}], "number": {"token": 7}}
    learn(given)
    assert hide(f"failed with {SECRET} and k-123456 at </s>") == "failed with <hidden> and <hidden> at </s>"
    assert hide_in(given) == {
        "a": {"token": "<TOKEN>"}, "list": ["API_KEY=<hidden>", {"eos_token": "</s>"}], "number": {"token": 7},
    }  # fmt: skip
    assert hide("see https://me:pw@host/x and https://host:80/y") == "see https://<hidden>@host/x and https://host:80/y"
    assert hide("hf_abcdefghijklmnopqrstu") == "<hidden>"
    words = ("train.py", "--api-key", "k", "--token=" + SECRET, "--lr", "0.1", "--eos_token", "</s>")
    assert hide_words(words) == ("train.py", "--api-key", "k", "--token=<hidden>", *words[4:]), "k is too short"


# --- every option ---------------------------------------------------------------------------------------------------


def plants(one: Option) -> Iterator[str]:
    """Values of an option with a secret in them."""
    if one.name == OURS:
        yield SECRET
    yield f"https://me:{SECRET.replace('/', '')}@host/x"
    if one.kind in (dict, object, tuple, list):
        yield json.dumps({"token": SECRET})
        yield json.dumps({"deep": {"api_key": SECRET}})
        yield f"token={SECRET}"
        yield f"HF_TOKEN={SECRET},other=1"


@pytest.mark.parametrize("secret_in", ["flag", "file"])
def test_no_setting_shows_a_secret(secret_in: str, place: Path, tmp_path: Path) -> None:
    run = {"model_name_or_path": str(place / "model"), "dataset_name": str(place / "data"), "output_dir": str(tmp_path)}
    written = 0
    for one in command_options():
        for value in plants(one):
            redaction._learned.clear()
            words = [word for name, text in run.items() if name != one.name for word in (f"--{name}", text)]
            if secret_in == "file":
                (tmp_path / "run.yaml").write_text(json.dumps({one.key: value}))
                words = [str(tmp_path / "run.yaml"), *words]
            else:
                words = [*words, f"--{one.key}", value]
                redaction.learn_words(words)  # as the command line does first
            try:
                config = parse(words).config
                shown = [json.dumps(config.to_dict()), json.dumps(config.changed()), config.to_json_string()]
                shown.append(output_dir.describe_changes({one.name: "other"}, config))
                shown.append(hide(str(check_command(parse(words)).notes)))
                written += 1
            except UserError as error:
                shown = [for_people(error)]
            bare = SECRET.replace("/", "")
            assert not [text for text in shown if SECRET in text or bare in text], (one.name, value, shown)
    assert written >= 10, "settings that take any text"


def test_no_setting_of_the_launcher_shows_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what a run stores of its launch, and in the command line of a rank; the script still gets it."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "w-" + SECRET)
    started, refusals = 0, list[str]()
    script = ["train.py", "--hub_token", SECRET, f"--api_key=x{SECRET}", "--env", f"w-{SECRET}", "--lr", "1"]
    for one in launch_options():
        for value in plants(one):
            redaction._learned.clear()
            words = [f"--{one.key}={value}", *script]
            if one in file_options() and started % 2:
                values: Any = {one.key: value}
                (tmp_path / "file.yaml").write_text(json.dumps({one.section: values} if one.section else values))
                words = ["--config_file", "file.yaml", *script]
            redaction.learn_words(words)
            try:
                settings = resolve(words)
            except UserError as error:
                refusals.append(for_people(error))
                continue
            started += 1
            made = settings.environment({})
            argv = " ".join(agent.command(settings))
            assert SECRET not in settings.to_json() + argv + str(hide_in(settings.describe())), (one.name, value)
            assert argv.endswith("train.py --hub_token <hidden> --api_key=<hidden> --env <hidden> --lr 1")
            assert json.loads(made[COMMAND_VARIABLE]) == script
    assert started >= 10 and refusals and not [text for text in refusals if SECRET in text]
    assert COMMAND_VARIABLE not in resolve(["train.py", "--lr", "1"]).environment({})


# --- whole runs -------------------------------------------------------------------------------------------------------


def run_and_watch(words: list[str], place: Path, **variables: str) -> tuple[int, str, set[str]]:
    """A command's exit code, its output, and the command lines of all processes below it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": str(place),
        "HF_HOME": str(place),
        **variables,
    }
    environment |= {"FULLSHARD_CACHE": str(place / "cache"), "TMPDIR": str(place)}
    lines: set[str] = set()
    with (place / "output").open("w") as output:
        command = [sys.executable, "-m", "fullshard", *words]
        process = subprocess.Popen(command, env=environment, cwd=place, stdout=output, stderr=output)
        while process.poll() is None:
            below = children_of(process.pid)
            for child in below:
                below += children_of(child)
                try:
                    lines.add(Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "))
                except OSError:
                    continue
            time.sleep(0.02)
    lines.discard(" ".join(command) + " ")  # what the user typed: a process that was forked and is not replaced yet
    return process.returncode, (place / "output").read_text(), lines


def holding(place: Path, *secrets: str) -> list[str]:
    """The files that hold a secret."""
    files = [file for file in place.rglob("*") if file.is_file()]
    return [str(file) for file in files if any(secret.encode() in file.read_bytes() for secret in secrets)]


@pytest.mark.slow
def test_a_run_leaves_no_secret_behind(place: Path, tmp_path: Path) -> None:
    """Two ranks; tokens in the file of settings, in a flag and in variables."""
    (tmp_path / "run.yaml").write_text("report_to: tensorboard\npush_to_hub: true\nmax_steps: 2\nsave_steps: 1\n")
    words = ["sft", "run.yaml", "--hub_token", SECRET, "--num_processes", "2", "--use_cpu", "--log_dir", "logs"]
    words += [
        "--model_name_or_path",
        str(place / "model"),
        "--dataset_name",
        str(place / "data"),
        "--output_dir",
        "out",
    ]
    variables = {name: f"{name.lower()}-{SECRET}" for name in VARIABLES}
    code, output, lines = run_and_watch(words, tmp_path, **variables, HF_HUB_OFFLINE="1")
    assert code == 0, output
    ranks = [line for line in lines if "worker.py" in line]
    assert ranks and all("--hub_token <hidden>" in line for line in ranks) and not [x for x in lines if SECRET in x]
    assert "not uploaded to" in output and holding(tmp_path, SECRET) == []
    stored = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert stored["settings"]["hub_token"] == "<HUB_TOKEN>" and "<hidden>" in stored["launch"]["command"]


FAILS = """
import sys, warnings
from fullshard.config.errors import ConfigError
from fullshard.distributed.rank_logging import get_logger
key = sys.argv[sys.argv.index("--api_key") + 1]
assert len(key) == 15 and "FULLSHARD_COMMAND" not in __import__("os").environ
get_logger().warning("cannot log in with %s", key)
raise ConfigError(f"the key {key} was refused")
"""


@pytest.mark.slow
def test_errors_and_log_lines_of_a_script_show_no_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    words = shlex.split(f"launch --cpu -n 2 --log_dir logs train.py --api_key {SECRET}")
    code, output, lines = run_and_watch(words, tmp_path)
    assert (code, len(SECRET)) == (2, 15), output
    assert "cannot log in with <hidden>" in output and "the key <hidden> was refused" in output
    assert not [line for line in lines if SECRET in line] and holding(tmp_path, SECRET) == []
