"""Every byte of the weight files counts: at resume, merge and export, and the same on any number of ranks."""

import json
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard import FSDPv2, load_pretrained, load_state, save_state
from fullshard.checkpoint.consolidate import merge_weights
from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import CheckpointError, WeightsError
from fullshard.distributed import runtime
from fullshard.weights import block_checksums, safetensors_files, slice_reader
from fullshard.weights.adapter_base import RECORD, check_base, write_record
from fullshard.weights.fill import fill
from fullshard.weights.locate import open_source
from fullshard.weights.merge_adapter import merge_adapter
from fullshard.weights.source_files import base_of, config_differences, difference, fingerprint_of, identity_of
from tests.pairwise import crossed
from tests.pool import ranks
from tests.weights.models import mesh_for, save, split_for_tensors, tensor_mesh

CONFIG = LlamaConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def _model(folder: Path) -> Path:
    """A model of 2.6 MB."""
    if runtime.is_main():
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(folder)
    runtime.barrier()
    return folder


def _lora(base: Path):
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    return load_pretrained(base, adapt=lambda plain: get_peft_model(plain, lora), progress=False)


def _flip(file: Path, bit: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def _unsampled_byte(folder: Path) -> int:
    """A byte of the one file of a model that its fingerprint does not see."""
    file, before = folder / "model.safetensors", fingerprint_of(folder)
    for place in range(200_000, file.stat().st_size, 1013):
        _flip(file, 8 * place)
        same = fingerprint_of(folder) == before
        _flip(file, 8 * place)
        if same:
            return place
    raise AssertionError("the fingerprint samples all of the file")


def _resume_after_flips(folder, count):
    base = _model(folder / "base")
    model = _lora(base)
    save_state(folder / "step-1", model=model)
    load_state(folder / "step-1", model=_lora(base))
    file, rng = base / "model.safetensors", random.Random(0)
    for _ in range(count):
        bit = rng.randrange(8 * file.stat().st_size)
        _flip(file, bit)
        with pytest.raises((CheckpointError, WeightsError)):
            load_state(folder / "step-1", model=_lora(base))
        _flip(file, bit)
    load_state(folder / "step-1", model=_lora(base))


@ranks(1)
def test_a_flipped_bit_is_seen_at_resume(tmp_path):
    _resume_after_flips(tmp_path, 10)


@pytest.mark.slow
@ranks(1, timeout=300)
def test_two_hundred_flipped_bits_are_seen_at_resume(tmp_path):
    _resume_after_flips(tmp_path, 200)


def test_noise_in_the_middle_of_a_large_file_is_seen(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2**26, dtype=torch.uint8), "b": torch.arange(7)}, file)
    before = identity_of(tmp_path)
    with open(file, "r+b") as stream:
        stream.seek(2**25)
        stream.write(random.Random(0).randbytes(2**17))
    after = identity_of(tmp_path)
    assert after["fingerprint"] == before["fingerprint"]  # between two samples
    assert "model.safetensors is" in difference(before, after)
    swapped = load_file(file)
    swapped["a"] = swapped["a"].flip(0)  # the same bytes in another order
    save_file(swapped, file)
    assert difference(after, identity_of(tmp_path))


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    ("name", "block"), crossed(("llama", "llama-tied", "mixtral"), (128, 4096, block_checksums.BLOCK), pairs=False)
)
def test_the_same_checksums_on_any_number_of_ranks(tmp_path, name, block):
    if runtime.is_main():
        save(name, tmp_path / "m", max_shard_size="60KB")
    runtime.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_checksums, "BLOCK", block)
        patch.setattr(slice_reader, "JOB_BYTES", 2048)
        patch.setattr(safetensors_files, "PART", 1024)
        with open_source(tmp_path / "m") as source:
            expected = source.checksums()  # one process, block after block
        assert len(expected) > 1
        assert base_of(load_pretrained(tmp_path / "m", progress=False)).checksums == expected
        if runtime.world_size() > 1:
            by_columns = load_pretrained(tmp_path / "m", tensor_mesh(), annotate=split_for_tensors, progress=False)
            assert base_of(by_columns).checksums == expected


@ranks(1)
def test_one_rank_reads_every_byte_once(tmp_path):
    if runtime.is_main():
        save("llama", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_checksums, "BLOCK", 512)
        patch.setattr(slice_reader, "JOB_BYTES", 6000)  # where a job ends, a block ends
        patch.setattr(safetensors_files, "PART", 1024)
        with torch.device("meta"):
            empty = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path))
        with open_source(tmp_path) as source:
            fill(FSDPv2(empty, mesh_for("FULL_SHARD")), source, progress=False)
            assert source.bytes_read == sum(entry.bytes for entry in source.entries.values())


@ranks(2)
def test_copies_that_differ_between_ranks_are_refused(tmp_path):
    if runtime.is_main():
        for rank in (0, 1):
            save("llama", tmp_path / f"m{rank}")
        _flip(tmp_path / "m1" / "model.safetensors", 8 * 20_000)
    runtime.barrier()
    with pytest.raises(WeightsError, match=r"model.safetensors does not have the same bytes on all ranks"):
        load_pretrained(tmp_path / f"m{runtime.rank()}", strategy="NO_SHARD", progress=False)
    runtime.barrier()
    if runtime.rank() == 1:
        values = load_file(tmp_path / "m1" / "model.safetensors")
        save_file(
            {**values, "model.norm.weight": values["model.norm.weight"].double()}, tmp_path / "m1/model.safetensors"
        )
    with pytest.raises(WeightsError, match="has other files on rank 1 than on rank 0"):
        load_pretrained(tmp_path / f"m{runtime.rank()}", progress=False)


@ranks(2)
def test_a_checkpoint_with_a_fingerprint_alone_resumes(tmp_path):
    base = _model(tmp_path / "base")
    save_state(tmp_path / "step-1", model=_lora(base))
    if runtime.is_main():
        manifest = read_manifest(tmp_path / "step-1")
        assert manifest.states["model"]["base"].pop("checksums").keys() == {"model.safetensors"}
        (tmp_path / "step-1" / "manifest.json").write_text(manifest.dumps())
    runtime.barrier()
    load_state(tmp_path / "step-1", model=_lora(base))
    if runtime.is_main():
        _flip(base / "model.safetensors", 8 * 5)  # in the header: the fingerprint sees it
    runtime.barrier()
    with pytest.raises((CheckpointError, WeightsError)):
        load_state(tmp_path / "step-1", model=_lora(base))


@ranks(1)
def _frozen(folder):
    """A checkpoint that leaves frozen values to its base."""
    base = _model(folder / "base")
    frozen = load_pretrained(base, adapt=lambda plain: plain.model.requires_grad_(False) and None, progress=False)
    save_state(folder / "step-1", model=frozen)


def test_merging_and_exporting_read_the_files_that_were_trained_on(tmp_path):
    """A byte that the fingerprint does not sample is seen once all of the base is read; nothing is published."""
    _frozen(tmp_path)
    base = tmp_path / "base"
    plain = LlamaForCausalLM.from_pretrained(base)
    adapter = tmp_path / "adapter"
    get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    write_record(adapter, base, (str(base), identity_of(base)))
    merge_weights(tmp_path / "step-1", tmp_path / "good-weights")
    merge_adapter(adapter, tmp_path / "good-adapter", progress=False)
    _flip(base / "model.safetensors", 8 * _unsampled_byte(base))
    check_base(adapter, base)  # the quick look before anything is read
    with pytest.raises(CheckpointError, match=r"whose files have changed since \(model.safetensors is "):
        merge_weights(tmp_path / "step-1", tmp_path / "weights")
    with pytest.raises(WeightsError, match=r"different model or has changed since \(model.safetensors is "):
        merge_adapter(adapter, tmp_path / "merged", progress=False)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "step-1", "adapter", "good-weights", "good-adapter"}
    record = json.loads((adapter / RECORD).read_text())
    (adapter / RECORD).write_text(json.dumps({**record, "checksums": 5}))
    merge_adapter(adapter, tmp_path / "old", progress=False)  # without checksums: by the fingerprint


@ranks(2)
def test_an_adapter_is_loaded_onto_the_files_that_it_was_trained_on(tmp_path):
    base, adapter = _model(tmp_path / "base"), tmp_path / "adapter"
    if runtime.is_main():
        plain = LlamaForCausalLM.from_pretrained(base)
        get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
        write_record(adapter, base, (str(base), identity_of(base)))
    runtime.barrier()
    load_pretrained(base, adapter=adapter, progress=False)
    runtime.barrier()
    if runtime.is_main():
        _flip(base / "model.safetensors", 8 * _unsampled_byte(base))
    runtime.barrier()
    with pytest.raises(WeightsError, match=r"different model or has changed since \(model.safetensors is "):
        load_pretrained(base, adapter=adapter, progress=False)


def test_an_unchanged_file_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(block_checksums, "CLOCK", -(10**12))
    save_file({"a": torch.arange(50)}, tmp_path / "model.safetensors")
    first = identity_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files.SafetensorsFiles, "read_blocks", None)
        assert identity_of(tmp_path) == first
    save_file({"a": torch.arange(51)}, tmp_path / "model.safetensors")
    assert identity_of(tmp_path) != first


# --- config.json ----------------------------------------------------------------------------------------------------


def _edit(base: Path, **changes) -> None:
    file = base / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 0.5}, "config.json: rms_norm_eps is 0.5, expected 1e-06"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
            "config.json: rope_parameters.rope_theta is 77.0, exp",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            'config.json: .*rope_parameters.rope_type is "linear", expected "def',
        ),
        ({"hidden_act": "gelu"}, 'config.json: hidden_act is "gelu", expected "silu"'),
    ],
)
def test_another_configuration_is_another_model(changes, message, tmp_path):
    """The weights are the same, and would compute something else: refused at resume, merge and export."""
    _frozen(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    write_record(adapter, base, (str(base), identity_of(base)))
    _edit(base, **changes)
    with pytest.raises(CheckpointError, match=rf"whose files have changed since \({message}"):
        merge_weights(tmp_path / "step-1", tmp_path / "weights")
    with pytest.raises(WeightsError, match=rf"different model or has changed since \({message}"):
        merge_adapter(adapter, tmp_path / "merged", progress=False)
    with pytest.raises(WeightsError, match=rf"different model or has changed since \({message}"):
        check_base(adapter, base)


@ranks(2)
def test_a_run_resumes_with_the_configuration_of_its_base(tmp_path):
    base = _model(tmp_path / "base")
    save_state(tmp_path / "step-1", model=_lora(base))
    if runtime.is_main():
        config = LlamaConfig.from_pretrained(base)
        config.save_pretrained(base)  # defaults written out, or left out, are the same
        kept = {name: value for name, value in config.to_dict().items() if name not in ("rms_norm_eps", "hidden_act")}
        (base / "config.json").write_text(
            json.dumps({**kept, "use_cache": False, "eos_token_id": 7, "dtype": "float16"})
        )
    runtime.barrier()
    load_state(tmp_path / "step-1", model=_lora(base))
    if runtime.is_main():
        _edit(base, rms_norm_eps=0.1)
    runtime.barrier()
    with pytest.raises(CheckpointError, match=r"the files differ \(config.json: rms_norm_eps is 0.1, expected 1e-06"):
        load_state(tmp_path / "step-1", model=_lora(base))


def test_configurations_that_transformers_does_not_know_are_compared_as_they_are():
    assert not config_differences({"model_type": "own", "a": 1, "b": {"c": 2}}, {"model_type": "own", "b": {"c": 2}})
    assert config_differences({"a": {"b": 1}}, {"a": {"b": 2}}) == ["a.b is 2, expected 1"]
    assert not config_differences({"limit": float("nan")}, {"limit": float("nan")})
    assert not config_differences({}, {"a": 1}), "nothing was recorded"


@ranks(1)
def test_a_model_that_trains_whole_is_compared_too_and_only_warned_of(tmp_path):
    base, lines = _model(tmp_path / "base"), []
    save_state(tmp_path / "step-1", model=load_pretrained(base, progress=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "warn_once", lambda key, line: lines.append(line))
        _edit(base, use_cache=False, pad_token_id=3)
        load_state(tmp_path / "step-1", model=load_pretrained(base, progress=False))
        assert not lines
        _edit(base, rms_norm_eps=0.25)
        load_state(tmp_path / "step-1", model=load_pretrained(base, progress=False))
    (line,) = lines
    assert line.startswith(
        "model is configured differently than in the checkpoint: rms_norm_eps is 0.25, expected 1e-06."
    )
