"""Values of compressed-tensors' formats, against what its own library unpacks (`record_compressed_tensors.py`)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fullshard.quant import stored_files
from fullshard.quant.shipped import Shipped, Tensor
from fullshard.quant.stored_format import StoredWeight
from fullshard.quant.stored_values import decoded, encode
from tests.quant.record_compressed_tensors import CASES, DTYPES, FILE, REORDERED, weight
from tests.quant.shipped_models import compressed

RECORDED = load_file(FILE)
ACTORDER = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}


def parts_of(name: str, dtype: str) -> tuple[StoredWeight, dict[str, torch.Tensor], torch.Tensor]:
    stored_as, settings = CASES.get(name, ("pack-quantized", ACTORDER))
    start = f"{name}/{dtype}/"
    files = {f"q.{key.removeprefix(start)}": t for key, t in RECORDED.items() if key.startswith(start)}
    expected = files.pop("q.unpacked")
    tensors = {key: Tensor(tuple(t.shape), t.dtype) for key, t in files.items()}
    shipped = Shipped.of(compressed(stored_as, **settings)).with_scales_of(tensors)
    form = shipped.format_of("model.q", ["Linear"])
    assert form is not None
    stored = StoredWeight(form, *expected.shape)
    parts = {}
    for part, key in stored_files.file_names(stored, "q.weight").items():
        assert stored_files.check_reader(stored, part, files[key]) is None
        parts[part] = files[key].view(-1).view(torch.uint8).view(stored.part_shapes()[part])
    return stored, parts, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, REORDERED])
def test_unpacked_bit_for_bit(name: str, dtype: str) -> None:
    stored, parts, expected = parts_of(name, dtype)
    for out in (expected.dtype, torch.float32, torch.bfloat16):
        assert torch.equal(decoded(stored.format.coding, parts, expected.shape, out), expected.to(out))


@pytest.mark.parametrize("name", CASES)
def test_packed_again(name: str) -> None:
    """A weight that has not changed keeps its values; one that has changed costs no more than in the library."""
    stored, parts, expected = parts_of(name, "float32")
    coding = stored.format.coding
    same = encode(coding, expected, parts)
    assert torch.equal(decoded(coding, same, expected.shape), expected.float())
    dense = weight(expected.shape[1], torch.float32)
    ours, theirs = (
        (values - dense).square().mean()
        for values in (decoded(coding, encode(coding, dense, parts), expected.shape), expected.float())
    )
    assert 0 < ours <= 1.0001 * theirs
