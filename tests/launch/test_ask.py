"""The questionnaire at a real terminal; its file read by Accelerate's own loader; launch uses what was answered."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import yaml

from fullshard.launch import command
from fullshard.launch.resolve import resolve, settle
from tests.pool import ROOT
from tests.test_cli import command as run_here


class Terminal:
    """`fullshard …` on a pseudo-terminal."""

    def __init__(self, *words: str, home: str):
        self.main, side = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": home, "HF_HOME": home, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fullshard", *words], stdin=side, stdout=side, stderr=side, env=environment,
            start_new_session=True, close_fds=True,
        )  # fmt: skip
        os.close(side)
        self.seen = ""

    def expect(self, text: str) -> None:
        """Wait until this was shown; what came before it is forgotten."""
        end = time.monotonic() + 30
        while text not in self.seen:
            if not select.select([self.main], [], [], 0.1)[0]:
                assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
                continue
            try:
                self.seen += os.read(self.main, 4096).decode()
            except OSError:
                pytest.fail(f"ended without {text!r}: {self.seen!r}")
        self.seen = self.seen.split(text, 1)[1]

    def answer(self, question: str, reply: str) -> None:
        self.expect(question)
        self.expect(": ")
        os.write(self.main, reply.encode() + b"\n")

    def end(self) -> int:
        while True:
            try:
                if not os.read(self.main, 4096):
                    break
            except OSError:
                break
        os.close(self.main)
        return self.process.wait(30)


def interview(home, path, answers):
    terminal = Terminal("config", "--config_file", str(path), home=str(home))
    for question, reply in answers:
        terminal.answer(question, reply)
    terminal.expect("written to")
    assert terminal.end() == 0


VERSION_2 = [
    ("Where do you run", ""), ("Which machines", "multi-CPU"), ("How many machines", "1"),
    ("Check while running", "yes"), ("Compile the model", "no"), ("Shard the model", "maybe"),
    ("please answer yes or no", "yes"), ("Whose options", "1"), ("Drop gathered layers", "no"), ("Keep shards", "y"),
    ("Which modules are gathered", "1"), ("Parameters that make", "1e3"),
    ("What do checkpoints hold", "FULL_STATE_DICT"), ("RAM-efficient", ""), ("Compute activations again", "yes"),
    ("Keep copies", "yes"), ("How many copies", "2"), ("How many ranks hold", "1"), ("How many processes", "many"),
    ("expected a whole number", "2"), ("Which mixed precision", "9"), ("please answer 0 to 2", "bf16"),
]  # fmt: skip
VERSION_1 = [
    ("Where do you run", "0"), ("Which machines", "2"), ("How many machines", "2"), ("Which of them", "1"),
    ("Address of machine 0", "10.0.0.1"), ("Port on machine 0", "29511"), ("one local network", "no"),
    ("Rendezvous backend", "c10d"), ("Check while running", ""), ("Compile the model", "yes"), ("Which backend", ""),
    ("Which mode", "reduce-overhead"), ("Shard the model", ""), ("Whose options", "FSDP version 1"),
    ("Which sharding strategy", "HYBRID_SHARD"), ("Keep shards", ""), ("Which modules are gathered", ""),
    ("Use the layers that", "no"), ("Layer classes", "BertLayer, BertPooler"), ("next layer gathered in backward", "1"),
    ("What do checkpoints hold", "2"), ("Gather the next layer ahead", "yes"), ("use_orig_params", "no"),
    ("RAM-efficient", "no"), ("Start all ranks", "no"), ("Compute activations again", ""),
    ("How many GPUs", "8"), ("Which mixed precision", ""),
]  # fmt: skip


def test_questions_of_version_2_at_a_terminal(tmp_path, monkeypatch):
    path = tmp_path / "answers.yaml"
    interview(tmp_path, path, VERSION_2)
    made = settle(resolve(["--config_file", str(path), "--dry_run"], {}), 0)
    engine = made.engine
    assert (engine.strategy, made.describe()["mesh"]) == ("HYBRID_SHARD_ZERO2", "replica=2, fsdp=1")
    assert (engine.offload_params, engine.min_num_params, engine.saved_as) == (True, 1000, "FULL_STATE_DICT")
    assert (engine.activation_checkpointing, engine.debug, engine.mixed_precision) == (True, True, "bf16")
    assert (made.device, made.world_size, made.notes) == ("cpu", 2, ())

    loaded = accelerates(path)
    assert loaded.distributed_type.value == "FSDP" and loaded.use_cpu and loaded.num_processes == 2
    assert loaded.fsdp_config["fsdp_reshard_after_forward"] is False and loaded.mixed_precision == "bf16"
    assert loaded.fsdp_config["fsdp_min_num_params"] == 1000 and loaded.debug
    assert loaded.parallelism_config["parallelism_config_dp_replicate_size"] == 2


def test_questions_of_version_1_at_a_terminal(tmp_path):
    path = tmp_path / "answers.json"
    interview(tmp_path, path, VERSION_1)
    made = settle(resolve(["--config_file", str(path), "--dry_run"], {}), 4)
    engine = made.engine
    assert (engine.strategy, made.describe()["mesh"]) == ("HYBRID_SHARD", "replica=2, fsdp=4")
    assert engine.transformer_layer_cls_to_wrap == ("BertLayer", "BertPooler")
    assert (engine.backward_prefetch, engine.forward_prefetch) == ("BACKWARD_POST", True)
    assert (engine.saved_as, engine.sync_module_states, engine.backend) == ("SHARDED_STATE_DICT", False, "inductor")
    assert engine.mode == "reduce-overhead" and made.processes.rdzv_backend == "c10d"
    assert (made.endpoint, made.processes.machine_rank, made.local_processes) == ("10.0.0.1:29511", 1, 4)

    loaded = accelerates(path)
    assert loaded.fsdp_config["fsdp_sharding_strategy"] == "HYBRID_SHARD" and loaded.num_machines == 2
    assert loaded.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer,BertPooler"
    assert loaded.dynamo_config["dynamo_mode"] == "reduce-overhead" and loaded.rdzv_backend == "c10d"


def accelerates(path):
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(path))


def test_an_interview_that_is_broken_off_writes_nothing(tmp_path, monkeypatch, capsys):
    terminal = Terminal("config", "--config_file", str(tmp_path / "c.yaml"), home=str(tmp_path))
    terminal.answer("Where do you run", "")
    terminal.expect("Which machines")
    terminal.expect(": ")
    os.write(terminal.main, b"\x04")  # Ctrl-D
    assert terminal.end() == 2
    assert list(tmp_path.iterdir()) == []


def test_default_and_update(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(command, "count_gpus", lambda: 0)
    assert run_here(monkeypatch, "config", "--default", "--mixed_precision", "bf16") == 0
    ours = tmp_path / "fullshard" / "config.yaml"
    assert accelerates(ours).mixed_precision == "bf16" and not (tmp_path / "hf").exists()
    assert run_here(monkeypatch, "config", "--default") == 2
    assert re.search(r"config.yaml exists; --force replaces it", capsys.readouterr().err)
    assert run_here(monkeypatch, "config", "--default", "--force") == 0
    assert yaml.safe_load(ours.read_text())["mixed_precision"] == "no"

    old = tmp_path / "old.yaml"
    old.write_text("fp16: true\nfsdp_config:\nsharding_strategy: 2\nfsdp_cpu_offload: true\n".replace("\nsh", "\n  sh"))
    assert run_here(monkeypatch, "config", "update", "--config_file", str(old)) == 0
    new = yaml.safe_load(old.read_text())
    assert new["fsdp_config"] == {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}
    assert new["mixed_precision"] == "fp16" and accelerates(old).fsdp_config["fsdp_offload_params"] is True


def test_accelerates_default_file_is_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    theirs = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}\n")
    before = theirs.read_text()
    assert run_here(monkeypatch, "config", "--update") == 0
    assert theirs.read_text() == before
    ours = yaml.safe_load((tmp_path / "fullshard" / "config.yaml").read_text())
    assert ours["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"
