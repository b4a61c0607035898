"""What goes wrong while loading is told once, completely, and on every rank."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from fullshard import FSDPv2, load_pretrained
from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.weights import safetensors_files as weight_files
from fullshard.weights.fill import fill
from fullshard.weights.locate import open_source
from fullshard.weights.source_files import base_of
from tests.pool import ranks
from tests.weights.models import mesh_for, save


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("models") / "llama-small")


def _copy(llama, to, change):
    """The model with other tensors; written by the first rank."""
    if runtime.is_main():
        to.mkdir(exist_ok=True)
        save_file(change(load_file(llama / "model.safetensors")), to / "model.safetensors")
        (to / "config.json").write_text((llama / "config.json").read_text())
    runtime.barrier()
    return to


@ranks(2)
def test_everything_that_does_not_fit_in_one_report(llama, tmp_path):
    def change(values):
        values["model.layers.0.mlp.up.weight"] = values.pop("model.layers.0.mlp.up_proj.weight")
        del values["model.norm.weight"]
        values["lm_head.weight"] = torch.zeros(60, 32)
        values |= {f"extra.{i}": torch.zeros(1) for i in range(20)}
        return values

    directory = _copy(llama, tmp_path / "m", change)
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.SafetensorsFiles, "read", lambda *args: reads.append(args))
        with pytest.raises(WeightsError) as caught:
            load_pretrained(directory)
    text = str(caught.value)
    assert "2 tensor(s) missing in the files" in text and "model.norm.weight" in text
    assert "model.layers.0.mlp.up_proj.weight (the files have model.layers.0.mlp.up.weight)" in text
    assert "21 tensor(s) in the files but not in the model" in text and "and 13 more" in text
    assert "lm_head.weight: (60, 32) in the files, (67, 32) in the model" in text
    assert "resize_vocab" in text and "rank" not in text
    assert not reads  # from headers alone


@ranks(2)
def test_a_disk_that_fails_on_one_rank_is_an_error_on_all(llama):
    read = os.preadv

    def fail(file, buffers, offset):
        if runtime.rank() == 1 and offset > 20_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, buffers, offset)

    message = r"rank 1: .*model.safetensors cannot be read at byte .*Input/output error"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(WeightsError, match=message):
            load_pretrained(llama)
    load_pretrained(llama)


@ranks(2)
def test_a_module_that_fails_to_read_on_one_rank(llama):
    class Reads(nn.Linear):
        def file_tensors(self):
            return {"weight": tuple(self.weight.shape)}

        def made_parameters(self):
            return ("weight",)

        def read_files(self, readers, pieces):
            if runtime.rank() == 0:
                raise WeightsError("no, thank you")

        def finish_reading(self, read, pieces):
            torch.distributed.barrier()

    def adapt(model):
        model.lm_head = Reads(32, 67, bias=False)

    with pytest.raises(WeightsError, match="rank 0: no, thank you"):
        load_pretrained(llama, adapt=adapt)


@ranks(2)
def test_damaged_files(llama, tmp_path):
    whole = (llama / "model.safetensors").read_bytes()
    bad = {
        "cut": whole[: len(whole) // 2],
        "header": whole[:20] + b"\xff\xfe" + whole[22:],
        "length": (1 << 40).to_bytes(8, "little") + whole[8:],
        "empty": b"",
        "longer": whole + b"\0" * 9,
    }
    for name, data in bad.items():
        directory = tmp_path / name
        if runtime.is_main():
            directory.mkdir()
            (directory / "model.safetensors").write_bytes(data)
            (directory / "config.json").write_text((llama / "config.json").read_text())
        runtime.barrier()
        with pytest.raises(WeightsError, match=rf"{name}/model.safetensors is not a valid safetensors file"):
            load_pretrained(directory)


@ranks(2)
def test_a_file_that_is_cut_while_it_is_read(llama, tmp_path):
    directory = _copy(llama, tmp_path / "m", lambda values: values)
    config = AutoConfig.from_pretrained(llama)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    model = FSDPv2(empty, mesh_for("FULL_SHARD"))
    with open_source(directory) as source:
        runtime.barrier()
        if runtime.is_main():
            os.truncate(directory / "model.safetensors", 30_000)
        runtime.barrier()
        with pytest.raises(WeightsError, match="is truncated"):
            fill(model, source)


# --- the wrong place --------------------------------------------------------------------------------------------------


@ranks(2)
def test_wrong_paths(llama, tmp_path):
    with pytest.raises(WeightsError, match=rf"does not exist. Directories with weights nearby: {llama}"):
        load_pretrained(llama.parent / "lama-small")
    with pytest.raises(WeightsError, match=rf"no safetensors files. Directories with weights nearby: {llama}"):
        load_pretrained(llama.parent)
    with pytest.raises(WeightsError, match="is neither a local directory nor a model that can be downloaded"):
        load_pretrained("no-such-organisation/no-such-model")
    if runtime.is_main():
        (tmp_path / "run" / "step-5").mkdir(parents=True)
        (tmp_path / "run" / "step-5" / "manifest.json").write_text("{}")
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "base/model"}')
        (tmp_path / "sharded").mkdir()
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({"a": torch.zeros(1)}, tmp_path / "sharded" / "model-00001-of-00002.safetensors")
        (tmp_path / "bare").mkdir()
        save_file({"a": torch.zeros(1)}, tmp_path / "bare" / "model.safetensors")
    runtime.barrier()
    with pytest.raises(WeightsError, match=r"is a training checkpoint, not a model.*merge-weights"):
        load_pretrained(tmp_path / "run" / "step-5")
    with pytest.raises(WeightsError, match=r"Training checkpoints nearby: .*step-5"):
        load_pretrained(tmp_path / "run")
    with pytest.raises(WeightsError, match=r"contains an adapter, not a model. Load its base model \(base/model\)"):
        load_pretrained(tmp_path / "adapter")
    with pytest.raises(WeightsError, match=r"but 1 are missing: model-00002-of-00002.safetensors"):
        load_pretrained(tmp_path / "sharded")
    with pytest.raises(WeightsError, match=r"bare has no usable config.json"):
        load_pretrained(tmp_path / "bare")
    with pytest.raises(WeightsError, match="transformers has no class of that name"):
        load_pretrained(llama, model_class="LamaForCausalLM")
    with pytest.raises(WeightsError, match="needs the outermost wrapped model"):
        fill(nn.Linear(2, 2), llama)


@ranks(2)
def test_a_name_on_the_hub(llama, tmp_path):
    """From the cache, as it would be after a download; fetching itself is the Hub client's."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123abc"
    if runtime.is_main():
        shutil.copytree(llama, snapshot)
        (tmp_path / "models--some--model" / "refs").mkdir()
        (tmp_path / "models--some--model" / "refs" / "main").write_text("0123abc")
    runtime.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        model = load_pretrained("some/model", cache_dir=tmp_path)
        with pytest.raises(WeightsError, match="'some/other' is neither a local directory nor a model"):
            load_pretrained("some/other", cache_dir=tmp_path)
    assert model.config.name_or_path == "some/model" and base_of(model).path == str(snapshot)


@ranks(2)
def test_new_parameters_without_an_initializer(llama):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.open = nn.Parameter(torch.empty(3))

    def adapt(model):
        model.model.gate = Gate()

    with pytest.raises(WeightsError, match=r"1 new parameter.* have no initializer: model.gate.open"):
        load_pretrained(llama, adapt=adapt)


# --- pickles ----------------------------------------------------------------------------------------------------------


def _pickled(llama, directory, with_config):
    directory.mkdir()
    values = load_file(llama / "model.safetensors")
    torch.save(values, directory / ("pytorch_model.bin" if with_config else "weights.pt"))
    if with_config:
        (directory / "config.json").write_text((llama / "config.json").read_text())
    return directory


def _refusal(path):
    with pytest.raises(WeightsError, match=r"contains pickle files .*only safetensors") as caught:
        open_source(path)
    return str(caught.value)


def test_pickles_are_refused(llama, tmp_path):
    for ending in (".bin", ".pt", ".pth", ".ckpt"):
        file = tmp_path / f"weights{ending}"
        file.write_bytes(b"\x80\x04cos\nsystem\n")
        assert f"weights{ending}" in _refusal(file)
    assert "python -c" in _refusal(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("with_config", [True, False])
def test_the_command_that_converts_pickles_works(llama, tmp_path, with_config):
    directory = _pickled(llama, tmp_path / "old", with_config)
    command = shlex.split(re.search(r"^  (python .*)$", _refusal(directory), re.M)[1])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120, cwd=tmp_path)
    converted = tmp_path / "old-safetensors" if with_config else directory / "weights.safetensors"
    with open_source(converted) as source:
        assert set(source.entries) == set(load_file(llama / "model.safetensors"))
