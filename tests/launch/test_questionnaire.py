"""The questionnaire at a real terminal; its file read by Accelerate's own loader; launch uses what was answered."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import yaml
from rich.console import Console

from fullshard.config.configfile import nest, write_file
from fullshard.launch import command
from fullshard.launch.config import file_options
from fullshard.launch.machine import Machine
from fullshard.launch.questionnaire import Asker, ask_all
from fullshard.launch.resolve import resolve, settle
from tests.pool import ROOT
from tests.test_cli import command as run_here

OWN_TERMINAL = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from fullshard.cli import main; sys.exit(main())"
)
"""The command with the terminal as its own, so that Ctrl-C typed there reaches it."""


class Terminal:
    """`fullshard …` on a pseudo-terminal."""

    def __init__(self, *words: str, home: str):
        self.main, side = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": home, "HF_HOME": home, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *words], stdin=side, stdout=side, stderr=side, env=environment,
            start_new_session=True, close_fds=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells let background jobs ignore it
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
                if not (part := os.read(self.main, 4096)):
                    break
                self.seen += part.decode()
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
    ("Check at run time", "yes"), ("Compile the model", "no"), ("Shard the model", "maybe"),
    ("please answer yes or no", "yes"), ("Which version", "1"), ("Free gathered", "no"), ("Keep sharded", "y"),
    ("Which wrap policy", "1"), ("Parameters per wrapped", "1e3"),
    ("Which state dict type", "FULL_STATE_DICT"), ("RAM-efficient", ""), ("Use activation checkpointing", "yes"),
    ("Replicate the model", "yes"), ("How many replicas", "2"), ("How many ranks per", "1"),
    ("Split each layer", "yes"), ("Over how many ranks", "2"),
    ("Divide the experts", "yes"), ("Among how many ranks", "2"),
    ("How many processes", "many"),
    ("expected a whole number", "4"), ("Which mixed precision", "9"), ("please answer 0 to 2", "bf16"),
]  # fmt: skip
VERSION_1 = [
    ("Where do you run", "0"), ("Which machines", "2"), ("How many machines", "2"), ("Which of them", "1"),
    ("Address of machine 0", "10.0.0.1"), ("Port on machine 0", "29511"), ("one local network", "no"),
    ("Rendezvous backend", "c10d"), ("Check at run time", ""), ("Compile the model", "yes"), ("Which backend", ""),
    ("Which mode", "reduce-overhead"), ("Shard the model", ""), ("Which version", "FSDP version 1"),
    ("Which sharding strategy", "HYBRID_SHARD"), ("Keep sharded", ""), ("Which wrap policy", ""),
    ("Wrap the model's own", "no"), ("Layer classes", "BertLayer, BertPooler"), ("Which backward prefetch", "1"),
    ("Which state dict type", "2"), ("Prefetch the next layer", "yes"), ("use_orig_params", "no"),
    ("RAM-efficient", "no"), ("Broadcast rank 0", "no"), ("Use activation checkpointing", ""),
    ("How many GPUs", "8"), ("Which mixed precision", ""),
]  # fmt: skip


def test_questions_of_version_2_at_a_terminal(tmp_path, monkeypatch):
    path = tmp_path / "answers.yaml"
    interview(tmp_path, path, VERSION_2)
    made = settle(resolve(["--config_file", str(path), "--dry_run"], {}), 0)
    engine = made.engine
    assert (engine.strategy, made.describe()["mesh"]) == ("HYBRID_SHARD_ZERO2", "replica=2, fsdp=1, tp=2")
    assert engine.ep_size == 2 and made.describe()["experts"] == "divided among 2 ranks"
    assert (engine.offload_params, engine.min_num_params, engine.saved_as) == (True, 1000, "FULL_STATE_DICT")
    assert (engine.activation_checkpointing, engine.debug, engine.mixed_precision) == (True, True, "bf16")
    assert (made.device, made.world_size, made.notes) == ("cpu", 4, ())

    loaded = accelerates(path)
    assert loaded.distributed_type.value == "FSDP" and loaded.use_cpu and loaded.num_processes == 4
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


H200, T4 = "NVIDIA H200", "Tesla T4"
OFFERS = {
    "no GPU": (Machine(), "no GPU.", {"Which machines": "1", "How many processes": "2", "mixed precision": "0"}, {
        "use_cpu": True, "num_processes": 2, "mixed_precision": "no", "distributed_type": "FSDP",
    }),
    "one GPU": (Machine((H200,)), "1 × NVIDIA H200.", {"Which machines": "0", "on the CPU even": "no"}, {
        "use_cpu": False, "num_processes": 1, "mixed_precision": "bf16", "distributed_type": "NO",
    }),
    "GPUs": (Machine((H200,) * 4), "4 × NVIDIA H200.", {"Which machines": "2", "How many GPUs": "4"}, {
        "use_cpu": False, "num_processes": 4, "mixed_precision": "bf16", "distributed_type": "FSDP",
    }),
    "old GPUs": (Machine((T4,) * 2, bf16=False), "cannot compute in bf16.", {"mixed precision": "0"}, {
        "num_processes": 2, "mixed_precision": "no",
    }),
    "a login node": (Machine(slurm=True), "no GPU.", {"Where do you run": "1", "Which machines": "2"}, {
        "use_cpu": False, "num_processes": 1, "mixed_precision": "no",
    }),
}  # fmt: skip


def answer_all(monkeypatch, machine, replies=None):
    """The questionnaire answered by its defaults, but for some `replies`; values, what was shown, and the defaults."""
    out, left, offered = Console(file=io.StringIO(), width=200), dict(replies or {}), {}

    def reply(self, shown):
        print(shown, file=out.file)
        last = out.file.getvalue()[len(offered.get("", "")) :]
        offered[""] = out.file.getvalue()
        question = next((q for q in left if q in last), None)
        offered[last] = shown.rpartition("[")[2].partition("]")[0]
        return left.pop(question) if question else ""

    monkeypatch.setattr(Asker, "_line", reply)
    values = ask_all(out, machine)
    assert not left, "questions that were not asked"
    return values, out.file.getvalue(), offered


@pytest.mark.parametrize("case", OFFERS)
def test_the_questionnaire_offers_what_the_machine_has(case, tmp_path, monkeypatch):
    machine, said, defaults, expected = OFFERS[case]
    values, shown, offered = answer_all(monkeypatch, machine)
    assert said in shown.splitlines()[0]
    for question, default in defaults.items():
        (found,) = [reply for text, reply in offered.items() if question in text and text]
        assert found == default, question
    assert {name: values[name] for name in expected} == expected
    assert ("bf16" in shown.partition("Which mixed precision")[2]) == (case != "old GPUs")
    write_file(tmp_path / "c.yaml", nest({**command.ALWAYS, **values}, file_options()))
    made = settle(resolve(["--config_file", str(tmp_path / "c.yaml"), "--dry_run"], {}), len(machine.gpus))
    assert made.world_size == expected["num_processes"], "and launch does it here"


def test_more_processes_than_gpus_are_asked_for_again(monkeypatch):
    machine = Machine((H200,) * 4)
    values, shown, _ = answer_all(monkeypatch, machine, {"How many GPUs": "8", "each process needs one": "3"})
    assert values["num_processes"] == 3 and "this machine has 4 GPU(s)" in shown
    values, _, _ = answer_all(monkeypatch, machine, {"How many machines": "2", "Address of machine 0": "10.0.0.1"})
    assert values["num_processes"] == 8, "the GPUs of both"


def accelerates(path):
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(path))


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [(b"\x04", 2, "fullshard: the input ended before the last"), (b"\x03", 130, "fullshard: interrupted")],
    ids=["Ctrl-D", "Ctrl-C"],
)
def test_an_interview_that_is_broken_off_writes_nothing(key, code, said, tmp_path):
    terminal = Terminal("config", "--config_file", str(tmp_path / "c.yaml"), home=str(tmp_path))
    terminal.answer("Where do you run", "")
    terminal.expect("Which machines")
    terminal.expect(": ")
    os.write(terminal.main, key)
    terminal.expect(said)
    assert terminal.end() == code
    assert "\r\n" in terminal.seen and "Traceback" not in terminal.seen
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
