"""What a user can get wrong on the command line: one clear line, exit code 2, nothing started, nothing written."""

from __future__ import annotations

import pytest

from fullshard.launch import command
from tests.test_cli import command as run_here
from tests.test_cli import python


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(command, "count_gpus", lambda: 2)
    monkeypatch.setattr(command, "gpu_type", lambda: "cuda")
    (tmp_path / "train.py").write_text("raise SystemExit('this must not run')")
    for name, text in {
        "good.yaml": "fsdp_config:\n  fsdp_version: 2\n",
        "broken.yaml": "fsdp_config:\n  fsdp_version: [2\nnum_processes: 2\n",
        "typo.yaml": "fsdp_config:\n  fsdp_shardng_strategy: 1\n",
        "strategy.yaml": "fsdp_config:\n  fsdp_sharding_strategy: SHARD_ALL\n",
        "xla.yaml": "fsdp_config:\n  xla: true\n",
        "words.yaml": "hello",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


CASES = [
    ("launch --config_file none.yaml train.py", "the configuration file none.yaml does not exist"),
    ("launch --config_file broken.yaml train.py", "broken.yaml:3: not YAML"),
    ("launch --config_file typo.yaml train.py", "unknown key; did you mean fsdp_sharding_strategy?"),
    ("launch --config_file strategy.yaml train.py", "expected FULL_SHARD (1), SHARD_GRAD_OP (2)"),
    ("launch --config_file xla.yaml train.py", "The XLA engine needs torch 2.9.0 with torch_xla 2.9.0"),
    ("launch --config_file words.yaml train.py", "expected keys with values"),
    ("launch --config_file . train.py", "is a directory; name the configuration file in it"),
    ("launch", "no script given; expected fullshard launch [flags] script.py"),
    ("launch trian.py", "the script trian.py does not exist"),
    ("launch -m no_such_module", "the module no_such_module was not found"),
    ("launch --num_process 2 train.py", "unknown flag --num_process; did you mean num_processes?"),
    ("launch --num_processes two train.py", "--num_processes: expected a whole number, got 'two'"),
    ("launch --num_processes 0 train.py", "num_processes: expected 1 or more, got 0"),
    ("launch --num_processes 3 train.py", "3 processes on this machine, but only 2 GPU(s)"),
    ("launch --gpu_ids 0,5 train.py", "gpu_ids: 0,5: this machine has 2 GPU(s)"),
    ("launch --num_machines 2 train.py", "requires main_process_ip"),
    ("launch --main_process_port 99999 train.py", "main_process_port: expected 0 to 65535"),
    ("launch --fsdp full_shart train.py", "unknown word 'full_shart'; did you mean full_shard?"),
    ("launch --fsdp_config none.json train.py", "none.json does not exist"),
    ("launch --mixed_precision int8 train.py", "expected no, fp16, bf16, fp8, got 'int8'"),
    ("launch --log_dir train.py/logs train.py", "is not a writable directory"),
    ("launch --fsdp_sharding_strategy 4 --parallelism_config_dp_replicate_size 5 train.py", "but there are 2"),
    ("launch --fsdp_min_num_params -3 train.py", "fsdp_min_num_params: expected 1 or more, got -3"),
    ("launch --grace -1 train.py", "--grace: expected 0 or more seconds"),
    ("test --config_file none.yaml", "the configuration file none.yaml does not exist"),
    ("config --default --config_file good.yaml", "good.yaml exists; --force replaces it"),
    ("config --default --config_file new.txt", "expected a name that ends in .yaml, .yml, .json"),
    ("config --default --config_file train.py/c.yaml", "train.py/c.yaml cannot be written"),
    ("config --update --config_file typo.yaml", "did you mean fsdp_sharding_strategy?"),
    ("config --update", "there is no file to update"),
    ("config sometimes", "expected ask, default or update"),
]


@pytest.mark.parametrize(("words", "said"), CASES, ids=[words for words, _ in CASES])
def test_one_line_and_exit_code_2(place, monkeypatch, capsys, words, said):
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert run_here(monkeypatch, *words.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fullshard: ") and said in shown.err and shown.err.count("\n") == 1
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_mistakes_are_found_before_torch_is_imported(place):
    run = python(
        "-c",
        "import sys; from fullshard import cli; sys.argv = ['fullshard', 'launch', '--cpu', '-n', '2', 'none.py']\n"
        "try: cli.main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)",
    )
    assert run.stdout == "2 False\n", run.stderr
    run = python(
        "-c",
        "import sys; from fullshard import cli; sys.argv = ['fullshard', 'launch', '--cpu', '-n', '2', '--dry_run']\n"
        "try: cli.main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)",
    )
    assert run.stdout == "0 False\n" and "FULL_SHARD" in run.stderr


def test_help_names_every_flag(monkeypatch, capsys):
    from fullshard.launch.config import launch_options

    monkeypatch.setenv("COLUMNS", "200")
    assert run_here(monkeypatch, "launch", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert not [one.key for one in launch_options() if f"--{one.key}" not in shown]
    assert "Ignored: parameters always keep their names" in shown
