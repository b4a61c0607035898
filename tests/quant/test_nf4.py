"""4-bit tensors equal bitsandbytes' CPU backend bit for bit, in both directions and through files."""

import itertools
import math

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.backends.default import ops as bnb_default
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.config.errors import QuantizationError, UserError
from fullshard.quant import blocks, codebooks, nf4
from fullshard.quant import bnb_format as files
from fullshard.quant.sharded_groups import Scheme, dense, from_state, quantize_shard, shard_range, to_state
from tests.quant.unpacked import unpacked, unpacked_by_bnb

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, NaNs included."""
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def dequantized_by_bnb(packed, state):
    """bitsandbytes' plain version. Its kernel agrees where rows are whole blocks (others it unpacks with the scales of
    other blocks), but for the sign of FP4's second zero, which without AVX512 is negative."""
    scales = state.absmax
    if state.nested:
        scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    plain = bnb_default._dequantize_4bit_compute.__wrapped__
    held = packed.reshape(-1).view(torch.uint8)
    values = plain(held, scales, state.code, state.blocksize, state.shape, state.dtype)
    if state.shape[-1] % state.blocksize == 0 and state.blocksize < 2048:
        assert torch.equal(bnb.dequantize_4bit(packed, state).view(values.shape), values)
    return values


def assert_same_state(ours, theirs):
    assert same(ours.absmax, theirs.absmax)
    assert (ours.shape, ours.dtype, ours.blocksize, ours.quant_type) == (
        theirs.shape, theirs.dtype, theirs.blocksize, theirs.quant_type,
    )  # fmt: skip
    assert (ours.nested is not None) == theirs.nested
    if ours.nested is not None:
        assert same(ours.offset, theirs.offset)
        assert same(ours.nested.absmax, theirs.state2.absmax)
        assert same(ours.nested.code, theirs.state2.code)
        assert ours.nested.blocksize == theirs.state2.blocksize


@st.composite
def tensors(draw):
    """Odd shapes, blocks of zeros, constants, huge and tiny magnitudes, three dtypes."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 400)),
            st.tuples(st.integers(1, 70), st.integers(1, 150)),
            st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 70)),
            st.sampled_from([(64, 64), (256, 64), (3, 4096), (257, 128), (1, 16385), (301, 701)]),
        )
    )
    dtype = draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 0.02, 1e-6, 300.0]))
    filled = draw(st.sampled_from(["", "zeros", "ones", "start", "end"]))
    flat = w.view(-1)
    if filled in ("zeros", "ones"):
        flat.fill_(float(filled == "ones"))
    elif filled == "start":
        flat[: flat.numel() // 2] = 0
    elif filled == "end":
        flat[flat.numel() // 2 :] = 0
    return w.to(dtype)


@given(
    tensors(),
    st.sampled_from(["nf4", "fp4"]),
    st.sampled_from([32, 64, 128, 256, 512, 1024, 2048, 4096]),
    st.booleans(),
)
@settings(max_examples=150)
def test_bits_equal_bitsandbytes(w, quant_type, blocksize, double):
    options = {"blocksize": blocksize, "compress_statistics": double, "quant_type": quant_type}
    theirs, their_state = bnb.quantize_4bit(w, **options)
    ours, state = nf4.quantize_4bit(w, **options)
    assert same(ours, theirs) and ours.shape == theirs.shape
    assert_same_state(state, their_state)
    expected = dequantized_by_bnb(theirs, their_state).view(w.shape)
    assert same(nf4.dequantize_4bit(ours, state), expected)
    # The form that is sharded, and back.
    scheme = Scheme(quant_type, blocksize, double)
    parts = quantize_shard(w.reshape(-1), w.numel(), scheme)
    assert {name: tuple(p.shape) for name, p in parts.items()} == scheme.shapes(w.numel())
    assert same(dense(parts, tuple(w.shape), scheme, w.dtype), expected)
    back, back_state = to_state(parts, tuple(w.shape), scheme, w.dtype)
    assert same(back, theirs)
    assert_same_state(back_state, their_state)
    again, found = from_state(back, back_state)
    assert found == scheme and all(same(again[name], part) for name, part in parts.items())


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_blocks_go_over_rows(columns, quant_type, double):
    """Rows of half a block, and of one and a half; each row has a magnitude of its own, which tells scales apart."""
    torch.manual_seed(0)
    w = torch.randn(64, columns) * torch.logspace(-2, 2, 64)[:, None]
    theirs, their_state = bnb.quantize_4bit(w, quant_type=quant_type, compress_statistics=double)
    ours, state = nf4.quantize_4bit(w, quant_type=quant_type, compress_statistics=double)
    expected = unpacked(theirs, their_state)
    assert same(ours, theirs) and torch.equal(nf4.dequantize_4bit(ours, state), expected)
    if columns % 64 == 0:
        assert torch.equal(unpacked_by_bnb(theirs, their_state), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("double", [False, True])
def test_large_tensors_equal_bitsandbytes(dtype, double):
    """Several slices, and sums long enough for their order to show."""
    torch.manual_seed(0)
    for shape in [(1024, 3072), (1500, 3001), (4096, 4096)]:
        w = (torch.randn(shape) * 0.02).to(dtype)
        theirs, their_state = bnb.quantize_4bit(w, compress_statistics=double, quant_type="nf4")
        ours, state = nf4.quantize_4bit(w, compress_statistics=double)
        assert same(ours, theirs)
        assert_same_state(state, their_state)
        assert same(nf4.dequantize_4bit(ours, state), dequantized_by_bnb(theirs, their_state))


class Threads(TorchDispatchMode):
    """Records with how many threads each mean is taken."""

    def __init__(self):
        super().__init__()
        self.used = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mean.default:
            self.used.append(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def test_the_mean_is_summed_by_one_thread():
    torch.manual_seed(0)
    many = [torch.rand(200_000 + 1001 * i) for i in range(8)]
    expected = [absmax.mean() for absmax in many]
    torch.set_num_threads(2)
    with Threads() as threads:
        assert all(same(blocks.mean_of(absmax), mean) for absmax, mean in zip(many, expected, strict=True))
    assert threads.used == [1] * len(many)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("double", [False, True])
def test_values_that_are_no_numbers(double):
    w = torch.randn(8, 64)
    w[0, 3], w[2, 5], w[4, 6] = math.nan, math.inf, -math.inf
    theirs, their_state = bnb.quantize_4bit(w, compress_statistics=double, quant_type="nf4")
    ours, state = nf4.quantize_4bit(w, compress_statistics=double)
    assert same(ours, theirs)
    assert_same_state(state, their_state)


def test_tables():
    assert same(codebooks.nested_values(CPU), bnb.create_dynamic_map())
    for kind in codebooks.QUANT_TYPES:
        assert same(codebooks.values(kind, CPU), bnb.get_4bit_type(kind, device="cpu"))


@pytest.mark.parametrize("storage", nf4.STORAGE)
def test_storage_dtypes_hold_the_same_bytes(storage):
    w = torch.randn(96, 64)
    theirs, _ = bnb.quantize_4bit(w, quant_type="nf4", quant_storage=storage)
    ours, state = nf4.quantize_4bit(w, quant_storage=storage)
    assert ours.dtype == storage and same(ours, theirs) and ours.shape == theirs.shape
    assert same(nf4.dequantize_4bit(ours, state), nf4.dequantize_4bit(ours.view(torch.uint8), state))


@given(tensors(), st.sampled_from(["nf4", "fp4"]), st.booleans(), st.sampled_from(nf4.STORAGE))
@settings(max_examples=30)
def test_through_files(tmp_path_factory, w, quant_type, double, storage):
    if -(-w.numel() // 2) % storage.itemsize:
        with pytest.raises(QuantizationError, match="use uint8"):
            nf4.quantize_4bit(w, quant_storage=storage)
        return
    path = tmp_path_factory.mktemp("files") / "one.safetensors"
    options = {"compress_statistics": double, "quant_type": quant_type, "quant_storage": storage}
    theirs, their_state = bnb.quantize_4bit(w, **options)
    ours, state = nf4.quantize_4bit(w, **options)
    tensors = files.to_tensors(ours, state, "layer.weight")
    expected = {f"layer.weight.{k}": v for k, v in their_state.as_dict(packed=True).items()} | {"layer.weight": theirs}
    assert tensors.keys() == expected.keys() == set(files.keys_of("layer.weight", quant_type, double))
    assert all(same(tensors[k], expected[k]) for k in expected)
    # bitsandbytes reads ours.
    save_file(tensors, path)
    read = load_file(path)
    packed = read.pop("layer.weight")
    loaded = bnb.QuantState.from_dict({k.removeprefix("layer.weight."): v for k, v in read.items()}, CPU)
    assert same(packed, theirs)
    assert_same_state(state, loaded)
    # We read theirs.
    save_file(expected, path)
    assert files.is_quantized(load_file(path), "layer.weight")
    packed, found = files.from_tensors(load_file(path), "layer.weight")
    assert same(packed, theirs)
    assert_same_state(found, their_state)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_shards_are_a_cut_of_the_whole(count):
    torch.manual_seed(0)
    w = torch.randn(333, 257).bfloat16()
    flat, scheme = w.view(-1), Scheme()
    ranges = [shard_range(w.numel(), scheme, i, count) for i in range(count)]
    assert ranges[0][0] == 0 and ranges[-1][1] == w.numel()
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    whole = quantize_shard(flat, w.numel(), scheme)
    pieces = [quantize_shard(flat[a:b], w.numel(), scheme) for a, b in ranges]
    for name, part in whole.items():
        assert same(torch.cat([p[name] for p in pieces]), part)


def test_what_is_refused():
    w = torch.randn(64, 64)
    for wrong, word in [
        ({"quant_type": "int4"}, "int4"), ({"blocksize": 48}, "48"), ({"quant_storage": torch.int8}, "int8"),
    ]:  # fmt: skip
        with pytest.raises(QuantizationError, match=word):
            nf4.quantize_4bit(w, **wrong)
    with pytest.raises(QuantizationError, match="float64"):
        nf4.quantize_4bit(w.double())
    with pytest.raises(QuantizationError, match="empty"):
        nf4.quantize_4bit(w[:0])
    packed, state = nf4.quantize_4bit(w, compress_statistics=True)
    with pytest.raises(QuantizationError, match="2048"):
        nf4.dequantize_4bit(packed[:-1], state)
    tensors = files.to_tensors(packed, state)
    with pytest.raises(QuantizationError, match=r"weight.nested_absmax"):
        files.from_tensors({k: v for k, v in tensors.items() if k != "weight.nested_absmax"})
    with pytest.raises(QuantizationError, match="no 4-bit weight 'other'"):
        files.from_tensors(tensors, "other")
    broken = {**tensors, "weight.quant_state.bitsandbytes__nf4": torch.tensor([1, 2], dtype=torch.uint8)}
    with pytest.raises(UserError, match="cannot be read"):
        files.from_tensors(broken)
    with pytest.raises(QuantizationError, match="quant_map"):
        files.from_tensors({**tensors, "weight.quant_map": tensors["weight.quant_map"] * 2})
    state.nested.code[0] = -1
    with pytest.raises(QuantizationError, match="a custom table"):
        from_state(packed, state)
