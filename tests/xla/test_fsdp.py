"""`FSDPv2` on XLA against one device: the scenarios of PyTorch/XLA's FSDPv2, and what is better here.

Values are drawn on the host; the oracle is the same module in host memory.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla")

import torch
from torch import nn

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.config.errors import FSDPError, MeshError, UnsupportedError
from fullshard.fsdp import (
    FSDPv2,
    MixedPrecision,
    ShardingStrategy,
    SpmdFullyShardedDataParallel,
    always_wrap_policy,
    checkpoint_module,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

LINEARS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})


class Corners(nn.Module):
    """Tied, uneven, scalar and frozen parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 6, bias=False)
        self.tied = nn.Linear(10, 6)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("offset", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h) * self.scale + self.tied(h) + self.frozen.sum() + self.offset


class Two(nn.Module):
    """The module of PyTorch/XLA's own tests."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(128, 64)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def made(kind: Callable[[], nn.Module] = Corners) -> Any:
    torch.manual_seed(0)
    return kind()


@pytest.fixture(scope="module")
def mesh() -> xs.Mesh:
    xr.use_spmd()
    n = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(n), (n, 1), ("fsdp", "model"))


@pytest.fixture(scope="module")
def square(mesh: xs.Mesh) -> xs.Mesh:
    n = mesh.size()
    return xs.Mesh(np.arange(n), (2, n // 2), ("data", "fsdp"))


def rows(mesh: xs.Mesh, axes: Any = "fsdp", size: tuple[int, int] = (8, 6)) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch in host memory and on the devices."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return x, xs.mark_sharding(x.clone().to(xr.device()), mesh, (axes, None))


def train(model: Any, x: torch.Tensor, steps: int = 3, lr: float = 1e-2, clip: float | None = None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    numbers = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        if clip is not None:
            own = isinstance(model, FSDPv2)
            numbers.append(model.clip_grad_norm_(clip) if own else nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(loss.detach())
        xr.sync()  # before anything is read: reading alone would compile a program of its own
    return [number.item() for number in numbers]


def assert_same(model: Any, oracle: nn.Module, losses: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-7)
    values = model.full_state_dict()
    assert list(values) == list(oracle.state_dict())
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=3e-7)


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_equals_one_device(mesh):
    oracle, model = made(), made()
    assert FSDPv2(model, mesh, auto_wrap_policy={nn.Linear}) is model
    assert isinstance(model, Corners) and isinstance(model, FSDPv2) and isinstance(model.first, FSDPv2)
    assert model.second.weight is model.tied.weight
    host, x = rows(mesh)
    assert_same(model, oracle, train(model, x, clip=0.5), train(oracle, host, clip=0.5))
    assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)
    assert xs.sharding_of(model.scale).spec == ()
    assert model.plan.parameters["second.weight"].names == ("second.weight", "tied.weight")


def test_hybrid_training_equals_one_device(square):
    oracle, model = made(), made()
    FSDPv2(model, square, extra_data_axis="data", strategy="HYBRID_SHARD", auto_wrap_policy={nn.Linear})
    host, x = rows(square, ("data", "fsdp"))
    assert_same(model, oracle, train(model, x), train(oracle, host))
    # Every unit knows the axis: its own output is split over both.
    assert xs.sharding_of(model.first(x)).spec == (("data", "fsdp"), None)
    assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)


def test_an_axis_called_replica_is_the_extra_data_axis(mesh):
    hybrid = xs.Mesh(np.arange(mesh.size()), (2, mesh.size() // 2), ("replica", "fsdp"))
    model = FSDPv2(made(), hybrid, strategy=ShardingStrategy.HYBRID_SHARD)
    assert xs.sharding_of(model(rows(hybrid)[1])).spec == (("replica", "fsdp"), None)


def test_no_shard_equals_one_device(mesh):
    oracle, model = made(), made()
    FSDPv2(model, mesh, strategy="NO_SHARD")
    host, x = rows(mesh)
    assert_same(model, oracle, train(model, x), train(oracle, host))
    assert not any(any(xs.sharding_of(p).dims) for p in model.parameters())


def test_layouts_preset_for_tensor_parallelism_are_kept(mesh):
    n = mesh.size()
    both = xs.Mesh(np.arange(n), (2, n // 2), ("fsdp", "model"))
    oracle, model = made(), made()
    xs.mark_sharding(model.first.weight, both, ("model", None))
    xs.mark_sharding(model.second.weight, both, (None, "model"))
    FSDPv2(model, both)
    assert "model" in str(xs.sharding_of(model.first.weight).spec)
    assert xs.sharding_of(model.second.weight).spec == ("fsdp", "model")
    host, x = rows(both)
    assert_same(model, oracle, train(model, x), train(oracle, host))


def test_nested_by_hand_equals_by_policy(mesh):
    by_policy = FSDPv2(made(Two), mesh, auto_wrap_policy=LINEARS)
    model = made(Two)
    model.fc1 = FSDPv2(model.fc1, mesh)
    model.fc2 = FSDPv2(model.fc2, mesh=mesh)
    FSDPv2(model, mesh=mesh)
    assert model.plan == by_policy.plan
    assert model.fc1.plan == model.plan
    host, x = rows(mesh, size=(16, 128))
    torch.testing.assert_close(model(x).cpu(), made(Two)(host))


def test_a_tied_parameter_of_a_part_that_was_wrapped_before_stays_tied(mesh):
    oracle, model = made(), made()
    FSDPv2(model.second, mesh)
    FSDPv2(model, mesh)
    assert model.second.weight is model.tied.weight
    host, x = rows(mesh)
    assert_same(model, oracle, train(model, x), train(oracle, host))


def test_gradient_accumulation_with_and_without_no_sync(mesh):
    oracle, model = made(), made()
    FSDPv2(model, mesh)
    host, x = rows(mesh)
    for factor in (1.0, 2.0):
        with model.no_sync():
            (model(x * factor).square().mean()).backward()
        (oracle(host * factor).square().mean()).backward()
        xr.sync()
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        if q.grad is not None:
            assert xs.sharding_of(p.grad) == xs.sharding_of(p), name
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"foreach": True}, {"capturable": True}, {"amsgrad": True}])
def test_optimizers_of_torch(mesh, options):
    oracle, model = made(), FSDPv2(made(), mesh)
    host, x = rows(mesh)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    own = torch.optim.AdamW(oracle.parameters(), lr=1e-2, amsgrad=options.get("amsgrad", False))
    for _ in range(2):
        for m, batch, optimizer in ((model, x, ours), (oracle, host, own)):
            optimizer.zero_grad()
            m(batch).square().mean().backward()
            optimizer.step()
        xr.sync()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, oracle.state_dict()[name], rtol=1e-5, atol=1e-6)
    state = ours.state[model.first.weight]["exp_avg"]
    assert xs.sharding_of(state) == xs.sharding_of(model.first.weight)
    assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_optimizers_that_need_whole_parameters_work(mesh, kind):
    oracle, model = made(), FSDPv2(made(), mesh)
    host, x = rows(mesh)
    for m, batch in ((model, x), (oracle, host)):
        optimizer = kind(m.parameters(), lr=1e-2)
        m(batch).square().mean().backward()
        optimizer.step()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, oracle.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_fused_optimizer_is_refused_by_torch(mesh):
    model = FSDPv2(made(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(rows(mesh)[1]).sum().backward()
    with pytest.raises(RuntimeError, match=r"fused=True.*xla"):
        optimizer.step()


def test_an_optimizer_built_before_wrapping_is_refused(mesh):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    FSDPv2(model, mesh)
    model(rows(mesh)[1]).sum().backward()
    with pytest.raises(FSDPError, match="built before the module was wrapped"):
        optimizer.step()


def test_ignored_modules_stay_whole(mesh):
    oracle, model = made(Two), made(Two)
    model.fc2.to(xr.device())
    FSDPv2(model, mesh, ignored_modules=[model.fc2])
    assert "fc2.weight" not in model.plan.parameters and xs.sharding_of(model.fc1.weight).spec == ("fsdp", None)
    host, x = rows(mesh, size=(16, 128))
    for m, batch in ((model, x), (oracle, host)):
        m(batch).square().mean().backward()
    xr.sync()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_mixed_precision_casts_as_on_one_device(mesh, recompute):
    """Parameters and inputs in bf16, fp32 masters, the output in fp32: the same casts by hand."""
    oracle, model = made(), made()
    if recompute:
        checkpoint_module(model.first)  # inside a unit that casts
    FSDPv2(model, mesh, mixed_precision=MixedPrecision(torch.bfloat16, output_dtype=torch.float32))
    host, x = rows(mesh)
    half = {k: v.to(torch.bfloat16) for k, v in oracle.named_parameters()} | {"offset": oracle.offset}
    half["tied.weight"] = half["second.weight"]
    expected = torch.func.functional_call(oracle, half, (host.to(torch.bfloat16),)).float()
    output = model(x)
    assert output.dtype == torch.float32 and model.first.weight.dtype == torch.float32
    output.square().mean().backward()
    xr.sync()
    torch.testing.assert_close(output.cpu(), expected, rtol=2e-2, atol=2e-2)
    expected.square().mean().backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=5e-2, atol=5e-2)
    assert model.plan.parameters["first.weight"].compute_dtype == "bfloat16"


def test_a_reduce_dtype_is_reported(mesh, caplog):
    xr.forget_warnings()
    FSDPv2(made(), mesh, mixed_precision="bf16")
    assert "reduce_dtype" in caplog.text


# --- values and changes -----------------------------------------------------------------------------------------------


def test_state_dicts(mesh):
    model = FSDPv2(made(), mesh)
    plain = made().state_dict()
    assert list(model.state_dict()) == list(plain)
    assert xs.sharding_of(model.state_dict()["first.weight"]).spec == ("fsdp", None)
    other = {name: torch.randn_like(value) for name, value in plain.items()}
    other["tied.weight"] = other["second.weight"]
    for values in (other, {name: value.to(xr.device()) for name, value in plain.items()}):
        model.load_state_dict(values)
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, values[name].cpu(), rtol=0, atol=0)
        assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)
    whole = model.full_state_dict()
    assert whole["second.weight"] is whole["tied.weight"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**plain, "first.weight": torch.zeros(3, 3)})


@pytest.mark.parametrize("offload", [False, True])
def test_summon_full_params(mesh, offload):
    model = FSDPv2(made(), mesh)
    before = model.full_state_dict()
    with model.summon_full_params(offload_to_cpu=offload), torch.no_grad():
        assert model.first.weight.device.type == ("cpu" if offload else "xla")
        model.first.weight.fill_(3.0)
    assert torch.equal(model.full_state_dict()["first.weight"], torch.full((10, 6), 3.0))
    assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)
    with model.summon_full_params(writeback=False, offload_to_cpu=offload), torch.no_grad():
        model.scale.fill_(7.0)
        if not offload:  # the model can be called, and parameters stay whole
            model(rows(mesh)[1])
            layout = xs.sharding_of(model.first.weight)
            assert layout is None or not any(layout.dims)
    assert torch.equal(model.full_state_dict()["scale"], before["scale"])


def test_apply_draws_the_values_of_the_host(mesh):
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    oracle, model = made(), FSDPv2(made(), mesh)
    for m in (oracle, model):
        torch.manual_seed(3)
        m.apply(init)
    assert torch.equal(model.full_state_dict()["first.weight"], oracle.first.weight)


def test_meta_modules_are_initialized_by_param_init_fn(mesh):
    def init(module: Any) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        model[1].weight = nn.Parameter(torch.empty(6, 8))
    oracle = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    torch.manual_seed(5)
    for layer in oracle:
        layer.reset_parameters()
    torch.manual_seed(5)
    FSDPv2(model, mesh, param_init_fn=init)
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, oracle.state_dict()[name])
    assert xs.sharding_of(model[0].weight).spec == ("fsdp", None)


def test_meta_modules_get_their_values_from_a_state_dict(mesh):
    oracle = nn.Linear(6, 8)
    with torch.device("meta"):
        model = nn.Linear(6, 8)
    FSDPv2(model, mesh)
    assert model.weight.is_meta
    model.load_state_dict(oracle.state_dict())
    assert torch.equal(model.full_state_dict()["weight"], oracle.weight)
    assert xs.sharding_of(model.weight).spec == ("fsdp", None)


def test_layouts_survive_changes_from_outside(mesh):
    model = FSDPv2(made(), mesh)
    host, x = rows(mesh)
    oracle = made()
    for m in (model, oracle):
        m.first.weight.data = torch.full((10, 6), 0.25).to(m.first.weight.device)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters())
    torch.testing.assert_close(model(x).cpu(), oracle(host))
    assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)
    model.frozen.requires_grad_(True)
    model.double()
    oracle.double()
    torch.testing.assert_close(model(x.double()).cpu(), oracle(host.double()))
    assert model.plan.parameters["frozen"].trainable and model.plan.parameters["scale"].dtype == "float64"
    assert xs.sharding_of(model.first.weight).spec == ("fsdp", None)


def test_hooks_of_parameters_stay(mesh):
    model, seen = made(), []
    model.scale.register_hook(lambda grad: seen.append("hook"))
    model.scale.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model.scale.note = "kept"
    FSDPv2(model, mesh)
    model.first.weight.register_hook(lambda grad: seen.append("later"))
    model(rows(mesh)[1]).sum().backward()
    assert sorted(seen) == ["accumulated", "hook", "later"] and model.scale.note == "kept"


def test_writing_to_the_output_of_a_unit(mesh):
    class InPlace(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x)
                x += 1
            return x

    oracle = made(lambda: InPlace(nn.Linear(6, 6), nn.Linear(6, 6)))
    model = FSDPv2(copy.deepcopy(oracle), mesh, auto_wrap_policy=LINEARS)
    host, x = rows(mesh)
    model(x).square().mean().backward()
    xr.sync()
    oracle(host).square().mean().backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)


def test_the_backward_of_a_unit_ends_in_a_barrier(mesh):
    import torch_xla

    model = FSDPv2(made(Two), mesh, auto_wrap_policy=LINEARS)
    model(rows(mesh, size=(16, 128))[1]).sum().backward()
    program = torch_xla._XLAC._get_xla_tensors_hlo([model.fc1.weight.grad])
    assert "opt-barrier(" in program


# --- outputs ----------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, shape: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.inner, self.shape = nn.Linear(6, 4), shape

    def forward(self, x: torch.Tensor) -> Any:
        return self.shape(self.inner(x))


def test_outputs_are_split_over_the_batch(mesh):
    x = rows(mesh)[1]
    split = ("fsdp", None)
    assert xs.sharding_of(FSDPv2(Returns(lambda y: y), mesh)(x)).spec == split
    first, second = FSDPv2(Returns(lambda y: (y, y + 1)), mesh)(x)
    assert xs.sharding_of(first).spec == split and xs.sharding_of(second) is None
    found = FSDPv2(Returns(lambda y: {"loss": y.sum(), "logits": y}), mesh)(x)
    assert xs.sharding_of(found["logits"]).spec == split
    assert FSDPv2(Returns(lambda y: y.sum()), mesh)(x).ndim == 0


def test_shard_output(mesh):
    x = rows(mesh)[1]
    calls = []

    def rule(output: Any, given: xs.Mesh) -> None:
        calls.append(given)
        xs.mark_sharding(output[0], given, (None, "fsdp"))

    found = FSDPv2(Returns(lambda y: [y]), mesh, rule)(x)
    assert calls == [mesh] and xs.sharding_of(found[0]).spec == (None, "fsdp")
    replaced = FSDPv2(Returns(lambda y: [y]), mesh, shard_output=lambda output, given: output[0] * 0)(x)
    assert torch.equal(replaced.cpu(), torch.zeros(8, 4))


@pytest.mark.parametrize("shape", [lambda y: [y], lambda y: ([y], y), lambda y: None, lambda y: {"a": [y]}])
def test_other_outputs_need_shard_output(mesh, shape):
    with pytest.raises(FSDPError, match="Pass shard_output="):
        FSDPv2(Returns(shape), mesh)(rows(mesh)[1])


# --- policies ---------------------------------------------------------------------------------------------------------


def test_policies(mesh):
    assert isinstance(FSDPv2(made(Two), mesh, auto_wrap_policy=LINEARS).fc1, FSDPv2)
    assert isinstance(FSDPv2(made(Two), mesh, auto_wrap_policy=always_wrap_policy).fc2, FSDPv2)
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDPv2(made(Two), mesh, auto_wrap_policy=by_size)
    assert isinstance(model.fc1, FSDPv2) and not isinstance(model.fc2, FSDPv2)
    by_name = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "out_features", 0) == 1)
    model = FSDPv2(made(Two), mesh, auto_wrap_policy=by_name)
    assert isinstance(model.fc2, FSDPv2) and not isinstance(model.fc1, FSDPv2)


def test_a_callable_that_does_nothing_leaves_children_bare(mesh):
    model = FSDPv2(made(Two), mesh, auto_wrap_policy=LINEARS, auto_wrapper_callable=lambda m, *args, **kwargs: m)
    assert not isinstance(model.fc1, FSDPv2) and not isinstance(model.fc2, FSDPv2)
    assert xs.sharding_of(model.fc1.weight).spec == ("fsdp", None)


def test_a_callable_gets_the_options_of_the_root(square):
    given = []

    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given.append(kwargs)
        return FSDPv2(checkpoint_module(module), *args, **kwargs)

    oracle, model = made(), made()
    FSDPv2(model, square, auto_wrap_policy=LINEARS, auto_wrapper_callable=wrapper, extra_data_axis="data")
    assert all(options["extra_data_axis"] == "data" for options in given) and len(given) == 3
    host, x = rows(square, ("data", "fsdp"))
    assert_same(model, oracle, train(model, x), train(oracle, host))
    assert model.second.weight is model.tied.weight  # each wrapped alone
    assert xs.sharding_of(model.first(x)).spec == (("data", "fsdp"), None)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_the_global_mesh_is_used(mesh):
    xs.set_global_mesh(mesh)
    try:
        assert FSDPv2(made()).mesh is mesh
    finally:
        xs.set_global_mesh(None)
    with pytest.raises(MeshError, match="no mesh"):
        FSDPv2(made())
    assert SpmdFullyShardedDataParallel is FSDPv2


def test_what_cannot_be_wrapped(mesh, square):
    with pytest.raises(FSDPError, match="already wrapped"):
        FSDPv2(FSDPv2(made(), mesh), mesh)
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(FSDPError, match="has no forward"):
            FSDPv2(container, mesh)
    with pytest.raises(MeshError, match="no axis named 'fsdp'"):
        FSDPv2(made(), xs.Mesh(np.arange(mesh.size()), (mesh.size(),), ("data",)))
    with pytest.raises(MeshError, match="'ddp' is not an axis"):
        FSDPv2(made(), square, extra_data_axis="ddp")
    model = made(Two)
    FSDPv2(model.fc1, mesh)
    with pytest.raises(FSDPError, match="by policy or by hand"):
        FSDPv2(model, mesh, auto_wrap_policy=LINEARS)
    with pytest.raises(MeshError, match="use one mesh for both"):
        FSDPv2(model, square)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "SHARD_GRAD_OP"}, r"SHARD_GRAD_OP .* Use FULL_SHARD"),
        ({"strategy": "HYBRID_SHARD_ZERO2", "extra_data_axis": "data"}, "Use HYBRID_SHARD"),
        ({"cpu_offload": True}, "cpu_offload=True"),
    ],
)
def test_options_of_the_torch_engine_are_refused_by_name(square, options, message):
    with pytest.raises(UnsupportedError, match=message):
        FSDPv2(made(), square, **options)


def test_options_without_effect_are_reported(mesh, caplog):
    xr.forget_warnings()
    FSDPv2(made(), mesh, forward_prefetch=False, backward_prefetch=None, gathers_in_flight=2, timeout=60.0)
    for name in ("forward_prefetch", "backward_prefetch", "gathers_in_flight", "timeout"):
        assert f"{name} has no effect on XLA" in caplog.text


def test_what_a_wrapped_module_refuses(mesh):
    model = FSDPv2(made(), mesh)
    with pytest.raises(FSDPError, match="cannot be deep-copied"):
        copy.deepcopy(model)
    with pytest.raises(FSDPError, match="cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(UnsupportedError, match="compile_units"):
        model.compile_units()
    with pytest.raises(UnsupportedError, match="meter"):
        _ = model.meter
    with pytest.raises(FSDPError, match="norm_type=0"):
        model.clip_grad_norm_(1.0, norm_type=0)
    with pytest.raises(AttributeError, match="generate"):
        model.generate()
    model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(FSDPError, match="extra was added after"):
        model(rows(mesh)[1])


def test_a_norm_that_is_not_finite(mesh):
    model = FSDPv2(made(), mesh)
    (model(rows(mesh)[1]) * float("inf")).sum().backward()
    xr.sync()
    with pytest.raises(FSDPError, match="not finite"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
