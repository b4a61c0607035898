"""`fullshard plan`: what it accepts, what it prints, and what a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from peft import LoraConfig

from fullshard.config.errors import CapacityError
from fullshard.launch import agent
from fullshard.launch.plan_command import read_request
from fullshard.planner import estimate as estimates
from tests.sft.tiny import make_folder
from tests.test_cli import command

SIZES: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 416, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(agent, "launch", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "unknown.json").write_text(json.dumps({**SIZES, "model_type": "llemma"}))
    (tmp_path / "sizes.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 416}))
    (tmp_path / "run.yaml").write_text("model_name_or_path: model\nuse_peft_lora: true\nmax_length: 64\nbf16: true\n")
    (tmp_path / "launch.yaml").write_text("num_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `fullshard plan --json` prints."""
    command(monkeypatch, "plan", *words, "--json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_folder_a_config_and_a_run_are_planned_alike(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process, no GPU, no weights, no files: the same numbers from all three."""
    before, joined = sorted(place.rglob("*")), dist.is_initialized()
    words = ("--machine", "h100-80gb", "--config_file", "launch.yaml")
    run = planned(monkeypatch, capsys, "run.yaml", *words)
    flags = ("--use_peft_lora", "--max_length", "64", "--bf16")
    folder = planned(monkeypatch, capsys, "model", *flags, *words)
    config = planned(monkeypatch, capsys, "model/config.json", *flags, *words)
    assert run["memory"] == folder["memory"] == config["memory"] and run["time"] == folder["time"] == config["time"]
    assert (run["machine"]["num_processes"], run["strategy"], run["mesh"]) == (4, "SHARD_GRAD_OP", {"fsdp": 4})
    assert run["verdict"]["fits"] and run["batch"]["tokens_per_step"] == 8 * 64 * 4
    assert len(run["levels"]) == len(run["layers"]) == 4 and len(run["units"]) == 5
    assert sum(run["memory"]["moments"]["backward"].values()) <= run["memory"]["peak"] < run["memory"]["device"]
    assert "every row has 64 tokens (max_length): no data was named" in run["assumptions"]
    assert sorted(place.rglob("*")) == before and dist.is_initialized() == joined


@pytest.mark.parametrize("width", [60, 100])
def test_the_verdict_comes_first_and_nothing_is_wider_than_the_window(
    width: int, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert command(monkeypatch, "plan", "run.yaml", "--machine", "h200", "--num_processes", "16") == 0
    out = capsys.readouterr().out
    assert out.startswith("Fits: each device needs") and max(map(len, out.splitlines())) <= width and "\x1b" not in out
    text = " ".join(out.split())
    for part in ("backward", "optimizer step", "allocated", "Host memory per node", "to other nodes", "Time of a step",
                 "tokens per second", "FLOPs", "Assumed", "Planned in"):  # fmt: skip
        assert part in text, part


def test_what_does_not_fit_exits_with_1_and_says_what_would_help(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model", "--machine", "h100", "--device_memory", "1200MiB", "--max_length", "4096")
    found = planned(monkeypatch, capsys, *words, "--per_device_train_batch_size", "64")
    assert found["verdict"]["fits"] is False
    (change, *_) = found["verdict"]["changes"]
    flags = [word for name, value in change["settings"].items() for word in (f"--{name}", str(value))]
    again = planned(monkeypatch, capsys, *words, "--per_device_train_batch_size", "64", *flags)
    assert again["verdict"]["fits"] and again["verdict"]["needs"] == change["needs"]
    assert command(monkeypatch, "plan", *words, "--per_device_train_batch_size", "64") == 1
    assert capsys.readouterr().out.startswith("Does not fit: each device needs")


def test_what_is_unknown_has_an_exit_code_of_its_own(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def untraceable(*_: Any) -> None:
        raise CapacityError("LlamaForCausalLM cannot be traced without values")

    monkeypatch.setattr(estimates, "trace_step", untraceable)
    auto = ("--gradient_checkpointing", "auto")
    assert command(monkeypatch, "plan", "model", "--machine", "h200", *auto) == 3
    out = capsys.readouterr().out
    assert out.startswith("Unknown: the activations of this model cannot be traced") and "keep all" not in out
    assert "Memory of one device" not in out and "Time of a step" not in out
    assert command(monkeypatch, "plan", "model", "--machine", "h200", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] is found["time"] is found["flops_per_token"] is found["verdict"]["needs"] is None
    assert command(monkeypatch, "plan", "model", "--machine", "h200", "--search") == 3
    assert "cannot be planned" in capsys.readouterr().out
    assert command(monkeypatch, "plan", "model", "--machine", "h200", "--longest") == 3
    assert capsys.readouterr().out.startswith("Unknown")
    assert command(monkeypatch, "plan", "model", "--machine", "h200", "--device_memory", "1MiB") == 1
    assert command(monkeypatch, "plan", "model", "--machine", "h200", "--num_processes", "0") == 2


def test_rows_of_the_length_that_is_found_fit_and_longer_ones_do_not(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "model", "--machine", "h100", "--device_memory", "1200MiB")
    assert command(monkeypatch, *words, "--longest", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    first, *others = found["longest"]
    assert first["settings"] == {} and [one["length"] for one in others] == sorted({one["length"] for one in others})
    assert command(monkeypatch, *words, "--max_length", str(first["length"])) == 0
    assert command(monkeypatch, *words, "--max_length", str(int(first["length"] * 1.04) + 128)) == 1
    capsys.readouterr()
    assert command(monkeypatch, "plan", "model", "--machine", "h100", "--device_memory", "1MiB", "--longest") == 1
    assert capsys.readouterr().out.startswith("No rows fit with these settings.")


@pytest.mark.slow
def test_rows_of_data_that_has_been_tokenized_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ("--model_name_or_path", "model", "--dataset_name", "data", "--cache_dir", "cache", "--max_length", "200")
    first = planned(monkeypatch, capsys, *flags, "--machine", "t4")
    assert first["batch"]["length"] == 200 and any("has not been tokenized" in line for line in first["assumptions"])
    assert command(monkeypatch, "sft", *flags, "--preview") == 0
    capsys.readouterr()
    second = planned(monkeypatch, capsys, *flags, "--machine", "t4")
    assert second["batch"]["length"] < 64 and any("they are those of data" in line for line in second["assumptions"])
    assert second["memory"]["peak"] < first["memory"]["peak"]


def test_an_adapter_to_resume_is_planned_with_its_base(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path=str(place / "model")).save_pretrained("adapter")
    (place / "adapter" / "adapter_model.safetensors").touch()
    found = planned(monkeypatch, capsys, "adapter", "--machine", "t4")
    assert found["model"] == str(place / "model")
    assert found["parameters"]["trained"] == SIZES["num_hidden_layers"] * 4 * (32 + 32)


def test_machines_of_several_nodes(place: Path) -> None:
    request, _ = read_request(["model", "--machine", "h100", "--num_machines", "4", "--gpus_per_node", "8"])
    assert (request.machine.num_processes, request.machine.nodes) == (32, 4)
    request, _ = read_request(["model", "--machine", "h100", "--num_machines", "2", "--num_processes", "4"])
    assert (request.machine.gpus_per_node, request.machine.nodes) == (2, 2)
    request, _ = read_request(["model", "--use_cpu", "--num_processes", "2"])
    assert request.machine.kind == "cpu" and request.engine.use_cpu


def test_a_machine_that_is_named_wins_over_the_variable_for_devices(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_DEVICE", "cpu")
    request, _ = read_request(["model", "--machine", "rtx4090"])
    assert request.machine.name == "rtx4090" and not request.engine.use_cpu
    request, _ = read_request(["model"])
    assert request.machine.kind == "cpu" and request.engine.use_cpu


@pytest.mark.parametrize(
    ("imbalance", "experts", "expected"),
    [
        ("2", 0, "routing_imbalance has no effect: the model has no experts"),
        ("2", 4, "the busiest of 4 experts gets 2 times the mean of tokens"),
        ("1e9", 4, "routing is as uneven as can be: one of 4 experts gets all tokens"),
    ],
)
def test_what_uneven_routing_means_is_printed(
    imbalance: str, experts: int, expected: str, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    about = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts}
    (place / "model" / "config.json").write_text(json.dumps({**SIZES, **(about if experts else {})}))
    words = ("model", "--machine", "h100", "--max_length", "64", "--routing_imbalance", imbalance)
    assert expected in " ".join(planned(monkeypatch, capsys, *words)["assumptions"])


CASES = [
    ("unknown.json", "knows no model of type 'llemma'"),
    ("sizes.json", "says model_type 'llama', but not the model's width"),
    ("empty", "empty has no config.json"),
    ("./nowhere", "nowhere does not exist"),
    ("--bf16", "there is no model; expected fullshard plan MODEL"),
    ("none.yaml", "none.yaml does not exist"),
    ("model --machine h1000", "machine is 'h1000'; did you mean h100?"),
    ("model --machine h100 --num_processes 0", "num_processes: expected 1 or more, got 0"),
    ("model --machine h100 --num_processes -8", "num_processes: expected 1 or more, got -8"),
    ("model --machine h100 --gpus_per_node 0", "gpus_per_node is 0; expected 1 or more"),
    ("model --machine h100 --num_processes 12 --gpus_per_node 8", "is no multiple of 8 devices in a node"),
    ("model --machine h100 --device_memory 0GiB", "device_memory is '0GiB'; expected a size with its unit"),
    ("model --machine h100 --device_memory -1GiB", "device_memory is '-1GiB'; expected a size with its unit"),
    ("model --machine h100 --host_memory 512", "host_memory is '512'; expected a size with its unit"),
    ("model --machine h100 --num_machines 2", "give num_processes or gpus_per_node"),
    ("model --machine h100 --num_machines 2 --num_processes 8 --gpus_per_node 8", "leave one of them out"),
    ("model --machine h100 --use_cpu", "use_cpu is on, but --machine h100 has GPUs"),
    ("model --machine h100 --routing_imbalance 0.5", "routing_imbalance is 0.5; expected 1 (balanced) or more"),
    ("model --machine h100 --search --longest", "search and longest are two questions"),
    ("model --machine h100 --search --allow lra", "allow names 'lra'; did you mean lora?"),
    ("model --machine h100 --bf16 --fp16", "bf16 and fp16 are both on"),
    ("model --machine h100 --per_device_train_batch_size 0", "per_device_train_batch_size is 0; expected 1 or more"),
    ("model --machnie h100", "plan: unknown flag --machnie; did you mean machine"),
    ("model run.yaml", "'run.yaml' is not a flag"),
]


@pytest.mark.parametrize(("words", "message"), CASES)
def test_a_mistake_is_one_clear_line(
    words: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.rglob("*"))
    assert command(monkeypatch, "plan", *words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("fullshard: ") and err.count("\n") == 1
    assert sorted(place.rglob("*")) == before
