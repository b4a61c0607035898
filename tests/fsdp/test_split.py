"""Which dim is split: bounded padding at any number of ranks, and the same training whichever way was chosen.

The models here are so small that their padding would never matter; `forced` makes it matter.
"""

import contextlib
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard import load_state, save_state
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, ShardingPlan, plan_layout
from fullshard.fsdp.plan import UnitPlan
from fullshard.fsdp.plan_layout import PlanInputs, plan_parameter, plan_unit
from fullshard.fsdp.strategy import MixedPrecision, ShardingStrategy
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout
from tests.fsdp.programs import STRATEGIES, assert_same_training, build, mesh_for, sharded, step, train_alone
from tests.pairwise import thinned
from tests.pool import ranks

RANKS = [2, 4, 8, 16, 64, 256, 1024, 4096]
WIDTHS = {"8B": (4096, 14336, 1024), "70B": (8192, 28672, 1024)}
VOCABULARY = 128_256


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    with mock.patch.object(runtime, "global_runtime_device_count", return_value=math.prod(shape)):
        return Mesh(range(math.prod(shape)), shape, names)


def _terms(count: int, precision: str | None = None) -> PlanInputs:
    return PlanInputs(_mesh((count,), ("fsdp",)), ShardingStrategy.FULL_SHARD, MixedPrecision.of(precision))


def _unit(
    shapes: dict[str, tuple[int, ...]], terms: PlanInputs, dtype: torch.dtype, trainable: bool = True
) -> UnitPlan:
    plans = [plan_parameter([name], shape, dtype, trainable, None, terms) for name, shape in shapes.items()]
    return plan_unit("unit", "Unit", plans)


def _linears(hidden: int, inner: int, key: int) -> dict[str, tuple[int, int]]:
    return {
        "q": (hidden, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, hidden),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip


def _ratio(traffic: tuple[int, int]) -> float:
    return traffic[0] / traffic[1] if traffic[1] else 1.0


# --- the plan alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("size", WIDTHS)
def test_a_llama_moves_little_more_than_its_own_bytes(size, count):
    hidden = WIDTHS[size][0]
    linears = _linears(*WIDTHS[size])
    layer = {**linears, "first": (hidden,), "second": (hidden,)}
    root = {"embedding": (VOCABULARY, hidden), "norm": (hidden,), "head": (VOCABULARY, hidden)}
    adapters = {f"{name}.A": (8, n) for name, (_, n) in linears.items()}
    adapters |= {f"{name}.B": (m, 8) for name, (m, _) in linears.items()}
    for precision in (None, "bf16"):
        terms = _terms(count, precision)
        units = [_unit(layer, terms, torch.bfloat16), _unit(root, terms, torch.bfloat16)]
        for dtype in (torch.float32, torch.bfloat16):
            alone = _unit(adapters, terms, dtype)
            frozen = _unit(layer, terms, torch.bfloat16, trainable=False)
            units += [alone, plan_unit("both", "Unit", [*frozen.parameters, *alone.parameters])]
        for unit in units:
            assert _ratio(unit.gather_traffic) <= 1.1, unit
            assert _ratio(unit.reduce_traffic) <= 1.1, unit


def test_ordinary_shapes_are_split_by_rows():
    for count in (2, 4, 8):
        for shape in [(32, 44), (67, 32), (44,), (3, 10), (1,), (50257, 768), (768, 2304), (8, 4096), (64, 3, 7, 7)]:
            assert plan_parameter(["p"], shape, torch.float32, True, None, _terms(count)).dim == 0, (shape, count)


def test_packed_bytes_are_rows_of_groups():
    for shape in [(256, 8192), (3, 1024), (1, 8)]:
        assert plan_parameter(["p"], shape, torch.uint8, False, None, _terms(4096)).dim == 0


def test_annotations_stay():
    mesh = _mesh((1024, 4), ("fsdp", "model"))
    terms = PlanInputs(mesh, ShardingStrategy.FULL_SHARD, MixedPrecision.of(None))

    def spec(shape, given):
        return plan_parameter(["p"], shape, torch.float32, True, Layout.of(mesh, given, shape), terms).spec

    assert spec((8, 4096), ("fsdp", None)) == ("fsdp", None)
    assert spec((8, 4096), (None, "model")) == (None, "model")  # 8 rows are left to split, 32 KiB a rank: not worth it
    assert spec((8, 4096), ("model", None)) == ("model", "fsdp")
    assert spec((4096, 8192), ("model", None)) == (("model", "fsdp"), None)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 64, 100, 257, 1024, 4096, 14336]), min_size=1, max_size=3)


@given(SHAPES, st.sampled_from([1, 3, *RANKS]), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_any_shape_on_any_number_of_ranks(shape, count, dtype):
    terms = _terms(count)
    plan = plan_parameter(["p"], shape, dtype, True, None, terms)
    own = math.prod(shape)
    least = min(plan_layout.padded(shape, dim, count) for dim in range(len(shape)))
    if plan.dim is None:
        assert plan.parts == 1 and plan.piece == tuple(shape)
        assert own * dtype.itemsize <= plan_layout.WHOLE_BYTES and least > plan_layout.WHOLE_RATIO * own
    else:
        travels = math.prod(plan.piece) * plan.parts
        assert travels == plan_layout.padded(shape, plan.dim, count)
        free = own + plan_layout.FREE_PADDING / dtype.itemsize
        twice = own + 2 * (least - own)  # another dim is taken only when it saves half of the padding
        assert travels <= max(plan_layout.DIM0_RATIO * own, free, twice)
        # The largest that stays mostly padding is too large to be held whole.
        assert travels <= max(plan_layout.WHOLE_RATIO * own, free) or own * dtype.itemsize > plan_layout.WHOLE_BYTES
    layout = Layout.of(terms.mesh, plan.spec, plan.shape)
    if own:
        pieces = [layout.slices(plan.shape, r) for r in range(count)]
        sizes = [math.prod(cut.stop - cut.start for cut in cuts) for cuts in pieces]
        assert sum(sizes) == own * (count if plan.dim is None else 1) and max(sizes) <= math.prod(plan.piece)
    unit = plan_unit("", "Unit", [plan])
    sharding = ShardingPlan((("fsdp", count),), "FULL_SHARD", (), (unit,))
    assert ShardingPlan.from_json(sharding.to_json()) == sharding


@given(st.lists(st.tuples(SHAPES, st.sampled_from([torch.bfloat16, torch.float32, torch.float64])), max_size=6))
def test_pieces_in_a_bucket_neither_meet_nor_stand_askew(parameters):
    terms = _terms(4)
    plans = [plan_parameter([f"p{i}"], s, d, True, None, terms) for i, (s, d) in enumerate(parameters)]
    bucket = plan_unit("", "Unit", plans).gather_bucket
    end = 0
    for slot in bucket.slots if bucket else ():
        item = parameters[int(slot.name[1:])][1].itemsize
        assert slot.offset >= end and slot.offset % item == 0 and slot.size % item == 0
        end = slot.offset + slot.size
    assert bucket is None or end <= bucket.length and bucket.length % 16 == 0


# --- trained ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forced():
    """No padding is too little to matter."""
    with mock.patch.object(plan_layout, "FREE_PADDING", 0):
        yield


def _thin(strategy: str = "FULL_SHARD", small: int = 0, **options) -> FSDPv2:
    with forced():
        return sharded("thin", torch.float64, strategy, small_parameter_bytes=small, **options)


@ranks(4)
@pytest.mark.parametrize("strategy", thinned(STRATEGIES))
def test_thin_and_tiny_parameters_train_as_on_one_device(strategy):
    for small, offload in ((0, False), (2048, False), (2048, True)):
        with forced():
            model = assert_same_training(
                "thin", mesh=mesh_for(strategy), strategy=strategy, small_parameter_bytes=small, cpu_offload=offload
            )
        dims = {name: p.dim for name, p in model.plan.parameters.items()}
        if strategy == "NO_SHARD":
            assert set(dims.values()) == {None}
            continue
        assert dims["stem.weight"] == dims["up.weight"] == 0 and dims["down.weight"] == dims["frozen"] == 1
        assert dims["head.weight"] == 1 and dims["shift"] is None
        if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            assert dims["mix"] == 1 and model.plan.parameters["mix"].padding == 2 and dims["gate"] is None


@ranks(4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_clipping_counts_every_value_once(strategy):
    reference, model = build("thin", torch.float64), _thin(strategy)
    _, gradients, _ = train_alone("thin", 1, torch.float64)
    for name, p in reference.named_parameters():
        p.grad = gradients.get(name)
    step(model, "thin", torch.float64)
    for norm_type in (2.0, float("inf")):
        expected = nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.grad is not None], 0.01, norm_type)
        assert abs(model.clip_grad_norm_(0.01, norm_type).item() - expected.item()) < 1e-9
    for name, p in reference.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad, rtol=0, atol=1e-9)


@ranks(4)
def test_values_come_out_and_go_in_whole_and_sharded():
    reference, model = build("thin", torch.float64), _thin()
    whole = model.full_state_dict()
    assert all(torch.equal(whole[name], value) for name, value in reference.state_dict().items())
    changed = {name: value + 1 for name, value in whole.items()}
    model.load_state_dict(changed)
    other = sharded("thin", torch.float64)  # by rows throughout
    assert {p.dim for p in other.plan.parameters.values()} == {0}
    other.load_state_dict(model.state_dict())
    for name, value in other.full_state_dict().items():
        assert torch.equal(value, changed[name]), name
    with model.summon_full_params():
        assert torch.equal(model.mix, changed["mix"])
        with torch.no_grad():
            model.mix.mul_(2)
            model.gate.zero_()
    assert torch.equal(model.mix.full_tensor(), 2 * changed["mix"]) and not model.gate.full_tensor().any()


def _trained(model: FSDPv2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, "thin", torch.float64)
    optimizer.step()
    return optimizer


def _moments(model: FSDPv2, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state
    return {n: state[p]["exp_avg"].full_tensor() for n, p in model.named_parameters() if p in state}


@ranks(4)
def _save_thin(folder):
    model = _thin()
    optimizer = _trained(model)
    save_state(folder / "checkpoint", model=model, optimizer=optimizer)
    torch.save((model.full_state_dict(), _moments(model, optimizer)), folder / f"expected-{runtime.rank()}.pt")


@ranks(2)
def _restore_thin(folder, as_rows):
    values, moments = torch.load(folder / "expected-0.pt")
    with contextlib.nullcontext() if as_rows else forced():
        model = sharded("thin", torch.float64)
    assert {p.dim for p in model.plan.parameters.values()} == ({0} if as_rows else {0, 1, None})
    optimizer = _trained(model)
    load_state(folder / "checkpoint", model=model, optimizer=optimizer)
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, values[name]), name
    got = _moments(model, optimizer)
    assert got.keys() == moments.keys() and all(torch.equal(got[name], moments[name]) for name in moments)


def test_a_checkpoint_fits_another_plan_on_other_ranks(tmp_path):
    _save_thin(tmp_path)
    for as_rows in (True, False):
        _restore_thin(tmp_path, as_rows)
