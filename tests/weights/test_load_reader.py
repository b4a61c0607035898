"""Slices that are read equal slices of what was written, whatever the tensor is put together from."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from fullshard.weights import key_mapping, slice_reader
from fullshard.weights.safetensors_files import DTYPES, SafetensorsFiles
from fullshard.weights.slice_reader import Joined, Stacked, Stored, Transposed, lengths


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Tensors, and their readers."""
    torch.manual_seed(0)
    values = {
        "cube": torch.randn(7, 5, 3),
        "half": torch.randn(7, 5, 3).bfloat16(),
        "wide": torch.randn(6, 2048),
        "line": torch.arange(11),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        **{f"d{i}": torch.zeros(3, dtype=dtype) for i, dtype in enumerate(DTYPES.values())},
    }
    path = tmp_path_factory.mktemp("reader") / "model.safetensors"
    save_file(values, path)
    source = SafetensorsFiles(path, [path])
    return values, {name: Stored(source, entry) for name, entry in source.entries.items()}, source


def _forms(values, readers):
    """Every kind of reader with the tensor it stands for."""
    yield from ((readers[name], values[name]) for name in values)
    a, b = "cube", "cube"
    for dim in (0, 1, 2):
        yield Joined([readers[a], readers[b]], dim), torch.cat([values[a], values[b]], dim)
        yield Stacked([readers[a], readers[b]], dim), torch.stack([values[a], values[b]], dim)
        yield Transposed(readers["half"], 0, dim), values["half"].transpose(0, dim)
    experts = [Stacked([readers["half"]] * 3, 0)] * 2
    yield Joined(experts, 1), torch.cat([torch.stack([values["half"]] * 3)] * 2, 1)


@given(data=st.data(), short=st.sampled_from([1, 64, 4096]), small=st.booleans(), as_double=st.booleans())
def test_any_slice(stored, data, short, small, as_double):
    values, readers, _ = stored
    forms = list(_forms(values, readers))
    read, whole = forms[data.draw(st.integers(0, len(forms) - 1))]
    assert read.shape == tuple(whole.shape) and read.dtype == whole.dtype
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in whole.shape]
    cuts = tuple(slice(*pair) for pair in bounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_reader, "SHORT_RUN", short)
        if small:  # many jobs per tensor
            patch.setattr(slice_reader, "JOB_BYTES", 512)
            patch.setattr(slice_reader, "LONG_ROW", 512)
        out = torch.empty(lengths(cuts), dtype=torch.float64 if as_double and not whole.is_complex() else whole.dtype)
        read.read_into(out, cuts)
        assert torch.equal(out, whole[cuts].to(out.dtype))
        if whole.ndim and whole.numel():
            start, stop = sorted(data.draw(st.integers(0, whole.numel())) for _ in range(2))
            assert torch.equal(read.flat(start, stop), whole.reshape(-1)[start:stop])


def test_no_more_is_read_than_asked_for(stored):
    values, readers, source = stored
    for cuts, factor in (((slice(2, 4), slice(0, 2048)), 1), ((slice(0, 6), slice(1024, 2048)), 1)):
        before = source.bytes_read
        readers["wide"][cuts]
        assert source.bytes_read - before == factor * values["wide"][cuts].numel() * 4
    before = source.bytes_read
    readers["wide"][0:6, 0:512]  # runs shorter than a page: rows are read whole
    assert source.bytes_read - before == values["wide"].numel() * 4


CONVERTERS = {
    "experts": (["e.*.w1.weight", "e.*.w3.weight"], ["e.gate_up"], [MergeModulelist(dim=0), Concatenate(dim=1)]),
    "transposed": (["e.w1.weight"], ["e.gate_up"], [Transpose(0, 1)]),
    "halves": (["e.qkv"], ["e.q", "e.k", "e.v"], [Chunk(dim=0)]),
    "rope": (["e.q"], ["e.query"], [PermuteForRope()]),
}


@pytest.mark.parametrize("kind", CONVERTERS)
def test_conversions_are_those_of_transformers(kind, tmp_path):
    """Known operations run on slices, others on whole tensors; both give what transformers gives."""
    sources, targets, operations = CONVERTERS[kind]
    converter = WeightConverter(sources, targets, operations)
    torch.manual_seed(1)
    parts = {p: [torch.randn(12, 8) for _ in range(3 if "*" in p else 1)] for p in converter.source_patterns}
    names = {f"{p}-{i}": value for p, values in parts.items() for i, value in enumerate(values)}
    save_file(names, tmp_path / "model.safetensors")
    source = SafetensorsFiles(tmp_path, [tmp_path / "model.safetensors"])
    readers = {p: [Stored(source, source.entries[f"{p}-{i}"]) for i in range(len(v))] for p, v in parts.items()}
    config = LlamaConfig(num_attention_heads=2)
    name = f"layer.{converter.target_patterns[0]}"
    theirs = copy.deepcopy(converter)
    for pattern, values in parts.items():
        for value in values:
            theirs.add_tensor(name, name, pattern, value)
    expected = theirs.convert(name, config=config)
    shown = key_mapping._PlainShapes(type("Model", (), {"config": config})(), {})
    made = key_mapping._convert(converter, name, readers, shown)
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        assert made[key].shape == tuple(value.shape)
        cuts = tuple(slice(n // 3, n) for n in value.shape)
        assert torch.equal(made[key][cuts], value[cuts])
    assert any(isinstance(r, slice_reader.Computed) for r in made.values()) == (kind in ("halves", "rope"))
