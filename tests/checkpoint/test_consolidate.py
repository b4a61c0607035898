"""Sharded checkpoints as whole weights, and looking inside them, from the command line."""

import json
import os
import subprocess
import sys
import tracemalloc

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fullshard import FSDPv2, save_state
from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.checkpoint.consolidate import merge_weights
from fullshard.cli import app
from fullshard.config.errors import CheckpointError, ConfigError
from fullshard.distributed import runtime
from fullshard.weights.source_files import SourceFiles, fingerprint_of
from tests.checkpoint.resume_programs import Case, Training
from tests.fsdp.programs import HUGGING_FACE, build, mesh_for
from tests.pool import ranks


@ranks(2, 4)
def _save(name, folder, strategy, world_size):
    model = build(name, torch.float32)
    whole = {n: t.clone() for n, t in model.state_dict().items()}
    model = FSDPv2(model, mesh_for(strategy), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_state(folder / "step-5", model=model, optimizer=optimizer, epoch=3)
    if runtime.is_main():
        torch.save(whole, folder / "whole.pt")


@pytest.mark.parametrize(
    ("name", "strategy", "world"),
    [
        ("llama-tied", "HYBRID_SHARD", 2),
        ("mixtral", "FULL_SHARD", 2),
        pytest.param("llama", "FULL_SHARD", 4, marks=pytest.mark.slow),
        pytest.param("gpt2", "NO_SHARD", 2, marks=pytest.mark.slow),
    ],
)
def test_from_pretrained_reads_merged_weights_bit_for_bit(tmp_path, name, strategy, world):
    _save(name, tmp_path, strategy, world_size=world)
    files = merge_weights(tmp_path / "step-5", tmp_path / "out", max_shard_size="30KB")
    assert len([f for f in files if f.suffix == ".safetensors"]) > 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = torch.load(tmp_path / "whole.pt")
    got = model.state_dict()
    assert type(model) is type(HUGGING_FACE[name]()) and got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key
    one = merge_weights(tmp_path / "step-5", tmp_path / "half", dtype="bfloat16")
    assert [f.name for f in one if f.suffix == ".safetensors"] == ["model.safetensors"]
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    assert all(torch.equal(half[k], v.bfloat16()) for k, v in expected.items() if v.is_floating_point())


@ranks(2)
def _save_on_base(folder):
    base = folder / "base"
    model = build("llama", torch.float32)
    if runtime.is_main():
        model.save_pretrained(base)
        (base / "tokenizer.json").write_text("{}")
    torch.distributed.barrier()
    model.model.layers.requires_grad_(False)
    model = FSDPv2(model, mesh_for("FULL_SHARD"))
    model._fullshard_base = SourceFiles(str(base), fingerprint_of(base))
    for name, p in model.named_parameters():
        model._fullshard_base.record([name], p)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.model.layers[0].mlp.up_proj.weight.mul_(3)  # frozen, and yet no longer what the base has
    whole = model.full_state_dict()
    save_state(folder / "step-5", model=model)
    if runtime.is_main():
        torch.save(whole, folder / "whole.pt")


def test_frozen_values_come_from_the_base(tmp_path):
    _save_on_base(tmp_path)
    merge_weights(tmp_path / "step-5", tmp_path / "out")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, value in torch.load(tmp_path / "whole.pt").items():
        assert torch.equal(got[key], value), key
    assert (tmp_path / "out/tokenizer.json").exists()
    with open(tmp_path / "base/model.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match="whose files have changed since"):
        merge_weights(tmp_path / "step-5", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@ranks(2)
def _save_adapter(folder):
    training = Training(Case(model="lora"))
    training.run(1)
    save_state(folder / "step-1", model=training.model)
    training.model.save_pretrained(folder / "adapter")
    whole = training.model.full_state_dict()
    if runtime.is_main():
        torch.save({n: v for n, v in whole.items() if "lora_" in n}, folder / "trained.pt")


def test_an_adapter_is_refused_with_what_to_do(tmp_path):
    _save_adapter(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint of an adapter \(default\)") as caught:
        merge_weights(tmp_path / "step-1", tmp_path / "out")
    assert f"fullshard export {tmp_path / 'step-1'} OUT --merge" in str(caught.value)
    from safetensors.torch import load_file

    (tmp_path / "made").mkdir()
    write_adapter(tmp_path / "step-1", tmp_path / "made")  # what the advice leads to
    trained = torch.load(tmp_path / "trained.pt")
    for folder in ("adapter", "made"):
        written = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert len(written) == len(trained) > 0
        for name, value in written.items():
            assert torch.equal(value, trained[name.replace(".weight", ".default.weight")]), name


@ranks(2)
def _save_large(folder):
    runtime.seed(0)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(20)]
    save_state(folder / "step-1", model=FSDPv2(torch.nn.Sequential(*layers), mesh_for("FULL_SHARD")))


def test_memory_holds_one_tensor(tmp_path):
    """Of 20 MB of weights in 1 MB tensors, a few are alive at a time (counted where tensors are made)."""
    _save_large(tmp_path)
    alive, peak = set(), 0
    make = torch.empty

    def counted(*args, **kwargs):
        import weakref

        nonlocal peak
        made = make(*args, **kwargs)
        size = made.numel() * made.element_size() if made.device.type == "cpu" else 0
        token = (id(made), size)
        alive.add(token)
        weakref.finalize(made, alive.discard, token)
        peak = max(peak, sum(n for _, n in alive))
        return made

    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        merge_weights(tmp_path / "step-1", tmp_path / "out", verify=False)
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2**20 <= peak <= 2 * 2**20
    assert python_peak < 5 * 2**20
    assert (tmp_path / "out/model.safetensors").stat().st_size > 20 * 2**20


# --- the command line -------------------------------------------------------------------------------------------------


def _run(*words):
    return subprocess.run(
        [sys.executable, "-m", "fullshard", *map(str, words)], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_commands_and_their_mistakes(tmp_path):
    _save("llama", tmp_path / "run/checkpoints", "FULL_SHARD", world_size=2)
    here = tmp_path / "run/checkpoints"
    (here / ".step-9.0123abcd.tmp").mkdir()
    command = CliRunner()
    shown = command.invoke(app, ["inspect", str(here / "step-5"), "--json", "--verify"])
    facts = json.loads(shown.output)
    assert shown.exit_code == 0 and facts["health"] == "whole (checksums compared)"
    assert facts["states"]["model"]["strategy"] == "FULL_SHARD" and facts["states"]["model"]["mesh"] == {"fsdp": 2}
    assert facts["states"]["epoch"]["value"] == 3 and facts["versions"]["torch"] == torch.__version__
    listed = command.invoke(app, ["inspect", str(here)])
    assert listed.exit_code == 0 and "LlamaForCausalLM" in listed.output and ".step-9.0123abcd.tmp" in listed.output
    assert command.invoke(app, ["merge-weights", str(here / "step-5"), str(tmp_path / "out")]).exit_code == 0
    for wrong, words in (
        (here, "step-5"), (tmp_path / "run", "step-5"), (tmp_path / "nowhere", "does not exist"),
        (here / "step-6", "step-5"), (tmp_path / "out", "holds model weights"),
        (here / ".step-9.0123abcd.tmp", "an unfinished save"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            merge_weights(wrong, tmp_path / "other")
    accelerate = tmp_path / "accelerate"
    (accelerate / "pytorch_model_fsdp_0").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="written by another tool"):
        merge_weights(accelerate, tmp_path / "other")
    for options in ({"dtype": "int4"}, {"max_shard_size": "many"}, {"model": "other"}):
        with pytest.raises(CheckpointError):
            merge_weights(here / "step-5", tmp_path / "other", **options)
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        merge_weights(here / "step-5", tmp_path / "out")
    assert not (tmp_path / "other").exists()
    victim = next((here / "step-5").glob("*.safetensors"))
    with open(victim, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert command.invoke(app, ["inspect", str(here / "step-5")]).exit_code == 0  # sizes are right
    damaged = command.invoke(app, ["inspect", str(here / "step-5"), "--verify", "--json"])
    assert damaged.exit_code == 1 and "sha256" in json.loads(damaged.output)["problems"][0]
    with pytest.raises(CheckpointError, match="is damaged"):
        merge_weights(here / "step-5", tmp_path / "other")


def test_mistakes_are_found_before_torch_is_imported(tmp_path):
    program = (
        "import sys; from fullshard.checkpoint.inspect import inspect_checkpoint\n"
        "from fullshard.checkpoint.consolidate import merge_weights\n"
        "from fullshard.config.errors import CheckpointError\n"
        "for job in (inspect_checkpoint, lambda p: merge_weights(p, p + '/out')):\n"
        f"    try: job({str(tmp_path)!r})\n"
        "    except CheckpointError as error: assert 'manifest' in str(error)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    done = _run("merge-weights", tmp_path / "nothing", tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "does not exist" in done.stderr
