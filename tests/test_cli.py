"""The command line: versions, the environment report, and errors without tracebacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main

import fullshard
from fullshard import cli
from fullshard.config.errors import MeshError
from fullshard.config.options import options_of
from fullshard.launch import environment_report, worker
from fullshard.launch.config import launch_options
from fullshard.launch.help_text import NEEDS_SCRIPT
from fullshard.launch.plan_command import plan_options
from fullshard.launch.show_command import ShowOptions
from fullshard.sft.cli_args import command_options
from tests.pool import ROOT


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `fullshard ...` in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["fullshard", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)


IMPORTED = """
import logging, sys, warnings
before = list(warnings.filters)
import fullshard, fullshard.cli
assert not {"torch", "transformers", "rich"} & set(sys.modules)
print(dir(fullshard))
assert warnings.filters == before and not logging.getLogger("bitsandbytes.backends.cpu.ops").filters
"""


def test_version_and_import_do_without_torch() -> None:
    run = python("-c", IMPORTED)
    assert run.returncode == 0, run.stderr
    assert "'runtime'" in run.stdout
    run = python("-m", "fullshard", "--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"fullshard {fullshard.__version__}\n", "")


KERNEL_IS_MISSED = """
import logging, sys, types
backend = types.ModuleType("bitsandbytes.backends.cpu")
backend.ops = None
sys.modules |= {"kernels": None, "bitsandbytes.backends.cpu": backend}
import bitsandbytes.functional
bitsandbytes.functional.has_avx512bf16 = lambda: True  # on this processor too
del sys.modules["bitsandbytes.backends.cpu"]
from bitsandbytes.backends.cpu import ops
assert ops.gemm_4bit_forward_kernel is None
ops.logger.warning("another message")
"""


@pytest.mark.slow
def test_bitsandbytes_does_not_ask_for_its_kernel(tmp_path: Path) -> None:
    """In a process as the launcher starts it; the script itself need not import fullshard."""
    package = importlib.util.find_spec("bitsandbytes")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("backends") / "cpu" / "ops.py"
    assert "Failed to load CPU gemm_4bit_forward" in source.read_text(), "else this test shows nothing"
    script = tmp_path / "script.py"
    script.write_text(KERNEL_IS_MISSED)
    run = python(worker.__file__, "file", str(script))
    assert run.returncode == 0 and "another message" in run.stderr, run.stderr
    assert "gemm_4bit_forward" not in run.stderr


def test_env_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FULLSHARD_DEVICE", "cpu")
    assert command(monkeypatch, "env", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    assert (facts["device"], facts["backend"], facts["world_size"]) == ("cpu", "gloo", 1)
    assert (facts["engine"], facts["torch_engine"]) == ("torch", "can be used")
    assert facts["xla_engine"].startswith("cannot be used: torch 2.") and facts["torch_xla"] == "not installed"
    assert facts["torch_tpu"] == "not installed" and facts["xla_devices"].startswith("none")


def test_env_tells_of_an_accelerator_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, said in (
        ("", "none"),
        ("cuda", "cuda: supported"),
        ("mps", "torch reports an accelerator of type 'mps'"),
    ):
        monkeypatch.setattr("fullshard.device.accelerator.reported_kind", lambda found=found: found)
        assert environment_report.describe_environment({})["accelerator"].startswith(said)


def test_env_as_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "env") == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown and "world size" in shown and "backend" in shown


def test_env_hides_secrets() -> None:
    given = {
        "FULLSHARD_DEVICE": "cpu", "NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_x", "HOME": "/root",
        "TORCH_AUTH_TOKEN": "short", "FULLSHARD_CACHE": "/data/cache/of/mine/2026-11-15/shared",
        "NCCL_NET": "a1B2c3D4e5F6g7H8i9J0k1L2", "TORCH_PROXY": "http://me:word@host/x", "FULLSHARD_RESOLVED": "{}",
        "NCCL_LONG": "x " * 200,
    }  # fmt: skip
    shown = environment_report.variables(given)
    assert shown == {
        "FULLSHARD_CACHE": given["FULLSHARD_CACHE"], "FULLSHARD_DEVICE": "cpu", "HF_HUB_OFFLINE": "1",
        "FULLSHARD_RESOLVED": "(set by fullshard launch)", "NCCL_DEBUG": "INFO", "NCCL_NET": "(hidden)",
        "NCCL_LONG": f"{given['NCCL_LONG'][:200]}…", "TORCH_AUTH_TOKEN": "(hidden)", "TORCH_PROXY": "(hidden)",
    }  # fmt: skip


def test_env_without_a_working_torch(tmp_path: Path) -> None:
    """A bug report can be made where nothing else works."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: not found')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FULLSHARD_DEVICE": "nothing"}
    command = [sys.executable, "-m", "fullshard", "env", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    facts = json.loads(run.stdout)
    assert run.returncode == 0 and not run.stderr
    assert facts["torch"] == "unavailable: ImportError: libcudart.so.12: not found" == facts["gpus"]
    assert facts["safetensors"] == importlib.metadata.version("safetensors")
    assert facts["variables"]["FULLSHARD_DEVICE"] == "nothing"


@pytest.mark.parametrize("width", [80, 60])
def test_help_is_whole(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a narrow window too: nothing is cut off, nothing is too wide, and each command has its own."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name in commands:
        assert command(monkeypatch, name, "--help") == 0
        lines = capsys.readouterr().out.splitlines()
        text = " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= width, name
        assert re.search(rf"^Usage: .*fullshard {name} ", lines[0])
        wanted = {flag for one in commands[name].params for flag in one.opts if flag.startswith("-")}
        if name in ("launch", "test", "sft", "plan", "show"):
            options = [o for o in command_options() if not o.refused] if name == "sft" else launch_options()
            options = {"plan": plan_options(), "show": options_of(ShowOptions)}.get(name, options)
            wanted = {f"--{one.key}" for one in options if name != "test" or one.name not in NEEDS_SCRIPT}
            texts = {one.key: one.help or one.no_op for one in options}
            assert not [one.key for one in options if f"--{one.key}" in wanted and texts[one.key][:20] not in text]
        assert len(wanted) >= 1 and not [flag for flag in wanted if flag not in text.split() and f"{flag}," not in text]
    assert command(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert "..." not in shown.partition("Commands:")[2] and all(f"  {name} " in shown for name in commands)


WRONG = [
    ["nothing"], ["chat"], ["chat", "x", "--what"], ["chat", "x", "--top_p", "warm"], ["chat", "/nowhere"],
    ["chat", "/nowhere", "--json"], ["export", "x"], ["export", "/nowhere", "out"], ["merge-weights", "/nowhere", "o"],
    ["inspect", "/nowhere"], ["config", "ask", "now"], ["config", "maybe"], ["config", "--config_file", "a.txt"],
    ["env", "--what"], ["launch"], ["launch", "/nowhere.py"], ["launch", "--what", "x.py"], ["launch", "-n", "x", "y"],
    ["show", "/nowhere"], ["show", "x", "--out", "x.pdf"], ["test", "--what"], ["test", "x.py"],
    ["sft"], ["sft", "/nowhere.yaml"], ["sft", "--what"],
    ["sft", "--model_name_or_path", "/nowhere", "--dataset_name", "x"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_command_line_is_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err and "Traceback" not in captured.err


def test_hyphens_and_underscores_are_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--max_new_tokens", "--max-new-tokens"):
        assert command(monkeypatch, "chat", "x", "--no-use_4bit-quantization", flag, "0") == 2
        assert capsys.readouterr().err == "fullshard: --max_new_tokens is 0; expected 1 or more.\n"


def test_ctrl_c_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment_report, "describe_environment", fail)
    assert command(monkeypatch, "env") == 130
    assert capsys.readouterr() == ("", "\nfullshard: interrupted\n")


def test_user_errors_are_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise MeshError("3 devices do not fill a mesh of shape (2, 2); use 4")

    monkeypatch.setattr(environment_report, "describe_environment", fail)
    assert command(monkeypatch, "env") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "fullshard: 3 devices do not fill a mesh of shape (2, 2); use 4\n")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(environment_report, "describe_environment", fail)
    monkeypatch.setattr(sys, "argv", ["fullshard", "env"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_unknown_attribute_of_the_package() -> None:
    assert fullshard.use_spmd is fullshard.runtime.use_spmd
    assert fullshard.xm.xla_device() == fullshard.runtime.device()
    with pytest.raises(AttributeError, match="'fullshard' has no attribute 'nothing'"):
        _ = fullshard.nothing


# --- help and completion ----------------------------------------------------------------------------------------------


def test_the_bare_command_prints_its_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch) == 0
    shown = capsys.readouterr()
    assert "Commands:" in shown.out and "--install-completion" in shown.out and shown.err == ""


COMPLETED = {
    "fullshard mer": ["merge-weights"],
    "fullshard sft --lora_": ["--lora_alpha", "--lora_dropout", "--lora_experts", "--lora_r", "--lora_target_modules"],
    "fullshard sft --lora-r": ["--lora-r"],
    "fullshard sft run.yaml --use_dora --packing_strategy w": ["wrapped"],
    "fullshard sft --num_proc": ["--num_processes"],
    "fullshard plan model --gpus_": ["--gpus_per_node"],
    "fullshard launch --fsdp_shard": ["--fsdp_sharding_strategy"],
    "fullshard show model --ou": ["--out", "--output_dir"],
    "fullshard sft run.y": [],
}


@pytest.mark.parametrize("line", COMPLETED)
def test_shells_complete_flags_and_values(line: str) -> None:
    """As bash asks; without torch, since it is asked at every Tab."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_FULLSHARD_COMPLETE": "complete_bash"}
    code = "import sys; from fullshard import cli; sys.argv[:] = ['fullshard']; sys.modules['torch'] = None; cli.main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == COMPLETED[line], run.stderr


def test_every_flag_is_completed() -> None:
    from fullshard.launch.completion import OPTIONS, complete

    for name, options in OPTIONS.items():
        found = {flag for flag, _ in complete(name, [], "--")}
        assert found == {f"--{one.key}" for one in options() if not one.refused} and len(found) > 20
