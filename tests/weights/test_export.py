"""Exported files are what transformers would have written, and `from_pretrained` reads them bit for bit."""

import errno
import json
import os
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open

from fullshard import FSDPv2, load_pretrained, save_pretrained
from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.fsdp import transformer_auto_wrap_policy
from fullshard.weights import safetensors_files
from tests.pool import ranks
from tests.weights.models import (
    CLASSES,
    FAMILIES,
    mesh_for,
    reference,
    save,
    split_for_tensors,
    tensor_mesh,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def _tensors(directory):
    """Every tensor of a directory's files, as others read them."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def _assert_same_files(got, expected):
    mine, theirs = _tensors(got), _tensors(expected)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype and torch.equal(mine[name], value), name


def _assert_reads_back(name, got, expected):
    mine, theirs = reference(name, got), reference(name, expected)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert mine.state_dict()[key].dtype == value.dtype and torch.equal(mine.state_dict()[key], value), key
    assert mine.config.to_dict() == theirs.config.to_dict() | {"_name_or_path": str(got)}


def _check(files, name, strategy, tmp_path):
    model = load_pretrained(files[name], mesh_for(strategy), model_class=CLASSES.get(name), strategy=strategy)
    save_pretrained(model, tmp_path / "out")
    _assert_same_files(tmp_path / "out", files[name])
    _assert_reads_back(name, tmp_path / "out", files[name])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@ranks(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(files, name, tmp_path):
    _check(files, name, "FULL_SHARD", tmp_path)


@pytest.mark.slow
@ranks(1, 2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_everywhere(files, name, strategy, tmp_path):
    _check(files, name, strategy, tmp_path)


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_on_replicas(files, name, tmp_path):
    _check(files, name, "HYBRID_SHARD", tmp_path)


@ranks(4)
def test_tensor_parallel_layouts_and_shards(files, tmp_path):
    """In several files; conversions of one parameter may end in different ones."""
    model = load_pretrained(files["mixtral"], tensor_mesh(), annotate=split_for_tensors)
    save_pretrained(model, tmp_path / "out", max_shard_size="15KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert set(index["weight_map"]) == set(_tensors(tmp_path / "out"))
    sizes = [p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in _tensors(tmp_path / "out").values())
    assert max(sizes) < 17_000
    _assert_same_files(tmp_path / "out", files["mixtral"])
    _assert_reads_back("mixtral", tmp_path / "out", files["mixtral"])


@ranks(2)
def test_dtype_is_the_one_asked_for(files, tmp_path):
    model = load_pretrained(files["llama"], mixed_precision="bf16")
    plain = reference("llama", files["llama"])
    for dtype in (torch.bfloat16, None):
        out = tmp_path / str(dtype)
        save_pretrained(model, out, dtype=dtype)
        expected = plain.to(dtype) if dtype else reference("llama", files["llama"])
        assert json.loads((out / "config.json").read_text())["dtype"] == ("bfloat16" if dtype else "float32")
        loaded = reference("llama", out)
        for name, value in expected.state_dict().items():
            got = loaded.state_dict()[name]
            assert got.dtype == value.dtype and torch.equal(got, value), name
    t5 = load_pretrained(files["t5"])
    save_pretrained(t5, tmp_path / "t5", dtype="float16")
    kept = {v.dtype for k, v in _tensors(tmp_path / "t5").items() if k.endswith("wo.weight")}
    assert kept == {torch.float32}  # T5 overflows otherwise, and asks for it


@ranks(2)
def test_the_models_own_method_streams_and_adapters_keep_theirs(files, tmp_path):
    model = load_pretrained(files["llama-tied"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.fsdp.state_dict.full_state_dict", None)  # nothing gathers the whole
        model.save_pretrained(tmp_path / "own")
    _assert_same_files(tmp_path / "own", files["llama-tied"])
    config = LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)
    adapted = load_pretrained(files["llama"], adapt=lambda model: get_peft_model(model, config))
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(reference("llama", files["llama"]), tmp_path / "adapter")
    full = adapted.full_state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, full[name]), name
    with pytest.raises(WeightsError, match="Save an adapter with its own"):
        save_pretrained(adapted, tmp_path / "whole")


@ranks(2)
def test_a_model_that_was_never_a_file(tmp_path):
    """Made in memory, trained a little, wrapped by hand; Mixtral's files have their usual form all the same."""
    torch.manual_seed(2)
    plain = FAMILIES["mixtral"]()
    if runtime.is_main():
        plain.save_pretrained(tmp_path / "plain")
    model = FSDPv2(plain, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    save_pretrained(model, tmp_path / "out")
    _assert_same_files(tmp_path / "out", tmp_path / "plain")


@ranks(2)
def test_tokenizer_files_come_along_and_old_weights_go(files, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    if runtime.is_main():
        save("llama", base)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
            (base / name).write_text(f"{{}} {name}")
        (base / "optimizer.bin").write_text("not this")
        save("llama", out, max_shard_size="20KB")  # an older model, in several files
        (out / "notes.md").write_text("mine")
    runtime.barrier()
    save_pretrained(load_pretrained(base), out)
    names = {p.name for p in out.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "notes.md",
                     "config.json", "generation_config.json", "model.safetensors"}  # fmt: skip
    assert (out / "merges.txt").read_text() == "{} merges.txt"
    _assert_same_files(out, base)


# --- when it goes wrong -----------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(files, tmp_path, existing):
    out = tmp_path / "out"
    if existing and runtime.is_main():
        save("llama-tied", out)
    runtime.barrier()
    before = {p.name: p.read_bytes() for p in out.iterdir()} if existing else None
    runtime.barrier()
    written = safetensors_files._write
    calls = []

    def fill_up(file, data, offset):
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(file, data, offset)

    model = load_pretrained(files["llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files, "_write", fill_up)
        with pytest.raises(WeightsError, match=r"could not be written .*No space left"):
            save_pretrained(model, out)
    runtime.barrier()
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if existing else [])
    if existing:
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    runtime.barrier()
    save_pretrained(model, out)  # the model is as it was
    _assert_same_files(out, files["llama"])


@ranks(2)
def test_refusals(files, tmp_path):
    model = load_pretrained(files["llama"])
    (tmp_path / f"file{runtime.rank()}").write_text("x")
    runtime.barrier()
    with pytest.raises(WeightsError, match="is a file; expected a directory"):
        save_pretrained(model, tmp_path / "file0")
    with pytest.raises(WeightsError, match="needs a wrapped model"):
        save_pretrained(reference("llama", files["llama"]), tmp_path / "out")
    with torch.device("meta"):
        empty = FAMILIES["llama"]()
    with pytest.raises(WeightsError, match="no values yet"):
        save_pretrained(FSDPv2(empty, mesh_for("FULL_SHARD")), tmp_path / "out")
    message = r"needs \d+\.\d kB and its disk has \d+ B free"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(WeightsError, match=message):
            save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@ranks(1)
def test_the_model_s_own_base_and_the_files_of_others_stay(files, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(files["llama"], base)
    model = load_pretrained(base)
    before = {p.name: p.read_bytes() for p in base.iterdir()}
    (tmp_path / "link").symlink_to(base)
    for target in (base, tmp_path / "link", tmp_path):
        with pytest.raises(WeightsError, match=r"save_pretrained: .* (is also|contains) .*the model's base"):
            save_pretrained(model, target)
    assert {p.name: p.read_bytes() for p in base.iterdir()} == before
    out = tmp_path / "out"
    out.mkdir()
    names = ("model.fp16.safetensors", "model-00001-of-00002.safetensors", "notes.txt")
    for name in names:
        (out / name).write_text("x")
    save_pretrained(model, out)
    assert [name for name in names if (out / name).exists()] == [names[0], names[2]], (
        "an earlier model's parts are gone"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "named").symlink_to(tmp_path / "empty")
    save_pretrained(model, tmp_path / "named")
    assert (tmp_path / "empty" / "model.safetensors").exists()


@ranks(2)
def test_a_directory_that_cannot_be_written(files, tmp_path):
    if os.geteuid() == 0:
        target = tmp_path / "model" / "out"  # root may write anywhere: a file where a directory should be
        if runtime.is_main():
            (tmp_path / "model").write_text("")
    else:
        target = tmp_path / "locked" / "out"
        if runtime.is_main():
            (tmp_path / "locked").mkdir()
            (tmp_path / "locked").chmod(stat.S_IRUSR | stat.S_IXUSR)
    runtime.barrier()
    with pytest.raises(WeightsError, match="could not be written"):
        save_pretrained(load_pretrained(files["llama"]), target)


def test_what_does_not_read_back_is_noticed(tmp_path):
    values = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.tensor(True)}
    file = safetensors_files.FileWriter(tmp_path / "model.safetensors", {n: v.to("meta") for n, v in values.items()})
    for name in reversed(values):  # any order
        file.write(name, values[name])
    with open(tmp_path / "model.safetensors", "r+b") as damaged:
        damaged.seek(-3, os.SEEK_END)
        byte = damaged.read(1)
        damaged.seek(-3, os.SEEK_END)
        damaged.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsError, match="on disk differs from what was written"):
        file.finish(verify=True)
    file.close()
