"""Every private part of torch that fullshard uses still is what fullshard takes it for."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from fullshard.config.errors import RuntimeSetupError
from fullshard.device import torch_private
from fullshard.distributed import runtime
from fullshard.spmd import Mesh

CHECKS: dict[str, Callable[[], None]] = {}
aten = torch.ops.aten
VERSION = torch.__version__
PACKAGE = Path(torch_private.__file__).parent


def check(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the check of the given entries."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def require(name: str) -> None:
    """Run an entry's check; a failure names the entry and the torch version."""
    try:
        CHECKS[name]()
    except Exception as error:
        raise AssertionError(
            f"fullshard.device.torch_private.{name} does not fit torch {VERSION}: {type(error).__name__}: {error}"
        ) from error


def accepts(function: Any, *names: str) -> None:
    given = inspect.signature(function).parameters
    assert set(names) <= set(given), f"{function.__qualname__} takes {list(given)}, expected {list(names)}"


def on_one_device() -> Any:
    runtime.use_spmd()
    return Mesh(np.arange(1), (1,), ("data",)).device_mesh


def dtensor() -> DTensor:
    t = torch.arange(4.0)
    meta = torch_private.TensorMeta(t.shape, t.stride(), t.dtype)
    return DTensor(t, torch_private.DTensorSpec(on_one_device(), (Shard(0),), tensor_meta=meta), requires_grad=False)


# --- sharded tensors --------------------------------------------------------------------------------------------------


@check("DTensorSpec", "TensorMeta")
def specs() -> None:
    spec = torch_private.spec_of(dtensor())
    assert type(spec) is torch_private.DTensorSpec
    assert spec.placements == (Shard(0),) and spec.mesh is not None
    assert spec.shape == (4,) and spec.stride == (1,) and spec.tensor_meta.dtype == torch.float32


@check("redistribute_local_tensor")
def redistribution() -> None:
    accepts(torch_private.redistribute_local_tensor, "local_tensor", "current_spec", "target_spec")
    t = dtensor()
    whole = torch_private.DTensorSpec(t.device_mesh, (Replicate(),), tensor_meta=torch_private.spec_of(t).tensor_meta)
    moved = torch_private.redistribute_local_tensor(torch_private.local_of(t), torch_private.spec_of(t), whole)
    assert torch.equal(moved, torch.arange(4.0))


@check("AsyncCollectiveTensor")
def unfinished_collectives() -> None:
    assert issubclass(torch_private.AsyncCollectiveTensor, torch.Tensor)
    accepts(torch_private.AsyncCollectiveTensor.wait, "self")


@check("dtensor_new")
def constructor() -> None:
    t = dtensor()
    made = torch_private.dtensor_new(DTensor, torch_private.local_of(t), torch_private.spec_of(t), requires_grad=False)
    assert torch_private.local_of(made) is torch_private.local_of(t) and made.shape == (4,)
    assert torch_private.spec_of(made) is torch_private.spec_of(t)


@check("local_of", "spec_of")
def shards() -> None:
    t = dtensor()
    assert torch.equal(torch_private.local_of(t), torch.arange(4.0))
    assert torch_private.spec_of(t).mesh == t.device_mesh


@check("set_local", "set_spec", "take_shard")
def replaced_shards() -> None:
    t, other = dtensor(), dtensor()
    torch_private.set_local(t, torch.ones(4))
    assert torch.equal(t.to_local(), torch.ones(4))
    spec = copy.copy(torch_private.spec_of(t))
    torch_private.set_spec(t, spec)
    assert torch_private.spec_of(t) is spec
    torch_private.take_shard(t, other)
    assert torch_private.local_of(t) is torch_private.local_of(other)
    assert torch_private.spec_of(t) is torch_private.spec_of(other)


@check("root_mesh")
def parts_of_meshes() -> None:
    mesh = dtensor().device_mesh
    assert torch_private.root_mesh(mesh) is mesh
    both = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert torch_private.root_mesh(both["b"]) == both


@check("is_in_mesh")
def membership() -> None:
    assert torch_private.is_in_mesh(on_one_device()) is True


@check("root_mesh")
def whole_mesh() -> None:
    assert torch_private.root_mesh(on_one_device()) is on_one_device()


@check("torch_sharding")
def torch_rules() -> None:
    found = torch_private.torch_sharding(aten.add.Tensor, (dtensor(), dtensor()), {})
    assert found.output_spec.placements == (Shard(0),) and found.needs_redistribute is False
    assert hasattr(found, "redistribute_schema")


@check("custom_op_handlers")
def handlers() -> None:
    table = torch_private.custom_op_handlers()
    own = aten._amp_foreach_non_finite_check_and_unscale_.default
    assert own in table, f"torch no longer has a handler for {own}"
    called: list[Any] = []
    table[aten.erfinv.default] = lambda op, args, kwargs: called.append((op, args, kwargs)) or args[0]
    try:
        aten.erfinv.default(dtensor())
    finally:
        del table[aten.erfinv.default]
    (op, args, kwargs) = called[0]
    assert op is aten.erfinv.default and type(args[0]) is DTensor and kwargs == {}


@check("layout_chooser", "replace_layout_chooser", "run_in_layouts")
def layouts_of_operators() -> None:
    plain, scale = torch_private.layout_chooser(), torch.ones(())
    value, calls = dtensor(), []

    def run(op: Any, args: Any, kwargs: Any, info: Any, *rest: Any) -> Any:
        return torch_private.run_in_layouts(op, args, kwargs, info, plain(op, args, kwargs, info, *rest))

    def choose(op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        calls.append((op, args[1], kwargs))
        return scale

    torch_private.replace_layout_chooser(choose)
    try:
        results = [torch.mul(value, scale) for _ in range(2)]
        torch_private.replace_layout_chooser(run)
        product = torch.logaddexp2(value, value)
        assert type(product) is DTensor and product.placements == value.placements
        assert torch.equal(torch_private.local_of(product), torch.arange(4.0) + 1)
    finally:
        torch_private.replace_layout_chooser(plain)
    assert all(result is scale for result in results)
    assert calls == [(aten.mul.Tensor, scale, {})] * 2  # nothing is remembered


@check("random_ops")
def random_operators() -> None:
    assert aten.uniform_.default in torch_private.random_ops()


# --- tensors ----------------------------------------------------------------------------------------------------------


@check("make_wrapper_subclass", "no_torch_function", "NoTorchFunction")
def subclasses() -> None:
    class Empty(torch.Tensor):
        __torch_function__ = torch_private.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError("called")

    made = torch_private.make_wrapper_subclass(
        Empty, (2, 3), strides=(3, 1), dtype=torch.float16, device=torch.device("cpu"), requires_grad=False
    )
    assert type(made) is Empty and made.shape == (2, 3) and made.dtype == torch.float16

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise AssertionError("called")

    t = torch.ones(1).as_subclass(Refuses)
    with torch_private.NoTorchFunction():
        assert t.dim() == 1


@check("foreach_norm", "foreach_mul_")
def many_norms() -> None:
    tensors = [torch.ones(4, dtype=torch.bfloat16), torch.full((2,), 2.0)]
    norms = torch_private.foreach_norm(tensors, 2.0, torch.float32)
    assert torch.equal(torch.stack(norms), torch.tensor([2.0, 8**0.5]))
    torch_private.foreach_mul_(tensors[1:], torch.tensor(0.5))
    assert tensors[1].tolist() == [1, 1]


@check("skips_on_device")
def skipped_updates() -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), torch.nan)
        optimizer: Any = kind([weight], lr=1.0, fused=True)
        assert torch_private.skips_on_device(optimizer)
        assert not torch_private.skips_on_device(kind([weight], lr=1.0))
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        assert weight.tolist() == [1, 1] and float(optimizer.state[weight].get("step", 0)) == 0
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        assert weight.isnan().all()


@check("foreach_copy_")
def copies() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    torch_private.foreach_copy_(targets, [torch.ones(2), torch.ones(3)])
    assert all(bool(t.all()) for t in targets)


@check("version_of")
def versions() -> None:
    t = torch.zeros(1)
    before = torch_private.version_of(t)
    t.add_(1)
    assert torch_private.version_of(t) == before + 1


@check("versions_of")
def versions_of_sharded_tensors() -> None:
    t = dtensor()
    ((of, own, piece),) = torch_private.versions_of([t])
    torch.autograd.graph.increment_version([t])
    torch_private.local_of(t).add_(1)
    assert torch_private.versions_of([t]) == [(of, own + 1, piece + 1)]


@check("storage_id")
def storages() -> None:
    t = torch.zeros(4)
    assert torch_private.storage_id(t) == torch_private.storage_id(t[1:]) != torch_private.storage_id(torch.zeros(4))


@check("become_ordinary")
def ordinary_tensors() -> None:
    class Other(torch.Tensor):
        pass

    tensor = torch.zeros(2).as_subclass(Other)
    parameter = nn.Parameter(torch.zeros(2).as_subclass(Other), requires_grad=False)
    assert type(parameter) is Other and isinstance(parameter, nn.Parameter)
    for one, expected in ((tensor, torch.Tensor), (parameter, nn.Parameter)):
        torch_private.become_ordinary(one)
        assert type(one) is expected and vars(one) == {} and not one.requires_grad


@check("backward_hooks", "post_accumulate_hooks", "share_hooks", "hook_attributes")
def hooks() -> None:
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    assert not torch_private.backward_hooks(one) and not torch_private.post_accumulate_hooks(one)
    handles = [one.register_hook(abs), one.register_post_accumulate_grad_hook(id)]
    torch_private.share_hooks(one, other)
    for t in (one, other):
        assert list((torch_private.backward_hooks(t) or {}).values()) == [abs]
        assert list((torch_private.post_accumulate_hooks(t) or {}).values()) == [id]
    for handle in handles:
        handle.remove()
    assert not torch_private.backward_hooks(other) and not torch_private.post_accumulate_hooks(other)


# --- operators --------------------------------------------------------------------------------------------------------


@check("tree_flatten", "tree_leaves", "tree_map", "tree_unflatten")
def trees() -> None:
    tree = ((1, [2, 3]), {"a": 4})
    flat, structure = torch_private.tree_flatten(tree)
    assert flat == [1, 2, 3, 4] == torch_private.tree_leaves(tree)
    assert torch_private.tree_unflatten(flat, structure) == tree and hash(structure) is not None
    assert torch_private.tree_map(lambda x: x + 1, tree) == ((2, [3, 4]), {"a": 5})
    assert torch_private.tree_map(len, [[1, 2]], is_leaf=lambda x: x == [1, 2]) == [2]


@check("no_dispatch")
def outer_tensors() -> None:
    t = dtensor()
    with torch_private.no_dispatch():
        t.unsqueeze_(0)
    assert t.shape == (1, 4) and torch_private.local_of(t).shape == (4,)


@check("decomposition_table")
def decompositions() -> None:
    for name in ("native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward"):
        assert getattr(aten, name).default in torch_private.decomposition_table, f"no decomposition of {name}"


@check("DispatchMode")
def dispatch_mode() -> None:
    seen = []

    class Watch(torch_private.DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(2, device="meta") + 1
    assert seen == [aten.ones.default, aten.add.Tensor]


@check("compiling_flag")
def flag_of_the_compiler() -> None:
    with torch_private.compiling_flag():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


@check("min_cut_partition", "recomputed_node_meta")
def partitioner() -> None:
    def saved(meta: dict[str, Any]) -> int:
        graph = torch.fx.Graph()
        x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
        product = graph.call_function(aten.mm.default, (x, x))
        y = graph.call_function(aten.cos.default, (product,))
        slope = graph.call_function(aten.sin.default, (product,))
        gradient = graph.call_function(aten.mul.Tensor, (slope, tangent))
        graph.output([y, gradient])
        for node in (x, tangent, product, y, slope, gradient):
            node.meta["val"] = torch.empty(4, 4, device="meta")
        product.meta.update(meta)
        forward, backward = torch_private.min_cut_partition(graph, 1)
        assert backward.output_node().args[0]
        results = forward.output_node().args[0]
        assert isinstance(results, tuple | list) and len(results) == 2
        return results[1].op == "placeholder"

    assert not saved({}) and saved(torch_private.recomputed_node_meta())


@check("fusible_operators")
def operators_that_are_fused() -> None:
    found = torch_private.fusible_operators()
    assert {aten.mul, aten.silu, aten.sum} <= found and aten.mm not in found


@check("implementation_of")
def functions_behind_operators() -> None:
    from fullshard.quant import ops

    assert torch_private.implementation_of(torch.ops.fullshard.linear_4bit.default).__module__ == ops.__name__
    assert torch_private.implementation_of(aten.mm.default) is None


@check("schema_of", "overload_name", "is_composite", "operator_packet")
def schemas() -> None:
    assert torch_private.operator_packet(aten.add_.Tensor) is aten.add_
    schema = torch_private.schema_of(aten.add_.Tensor)
    first = schema.arguments[0]
    assert schema.name == "aten::add_" and first.name == "self" and first.alias_info.is_write
    assert schema.arguments[2].default_value == 1
    assert torch_private.overload_name(aten.transpose.int) == "int"
    assert torch_private.is_composite(aten.matmul.default) and not torch_private.is_composite(aten.mm.default)


@check("ATEN_OPERATORS")
def operators() -> None:
    for name in torch_private.ATEN_OPERATORS:
        packet, _, overload = name.partition(".")
        assert hasattr(getattr(aten, packet, None), overload), f"torch.ops.aten.{name} is gone"


# --- autograd ---------------------------------------------------------------------------------------------------------


@check("engine_run_backward", "replace_engine_run_backward")
def start_of_backward() -> None:
    plain, calls = torch_private.engine_run_backward(), []

    def run(outputs: Any, grads: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        calls.append((len(outputs), len(grads), keep, create, inputs, kwargs.get("accumulate_grad", False)))
        return plain(outputs, grads, keep, create, inputs, *rest, **kwargs)

    x = torch.ones(1, requires_grad=True)
    torch_private.replace_engine_run_backward(run)
    try:
        (x * 2).backward()
        torch.autograd.grad(x * 3, x)
    finally:
        torch_private.replace_engine_run_backward(plain)
    assert x.grad == 2, "the replaced function changed the result"
    assert calls == [(1, 1, False, False, (), True), (1, 1, False, False, (x,), False)], f"called with {calls}"


@check("muon_function", "replace_muon_function", "orthogonalized", "muon_learning_rate")
def steps_of_muon() -> None:
    plain, calls = torch_private.muon_function(), []

    def update(params: Any, grads: Any, buffers: Any, **options: Any) -> None:
        calls.append((len(params), len(grads), len(buffers), options))
        plain(params, grads, buffers, **options)

    start = torch.arange(6.0).view(3, 2) - 2
    p = nn.Parameter(start.clone())
    p.grad = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 1.0]])
    torch_private.replace_muon_function(update)
    try:
        torch.optim.Muon([p], lr=0.1, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    finally:
        torch_private.replace_muon_function(plain)
    assert [call[:3] for call in calls] == [(1, 1, 1)], f"called with {calls}"
    options = calls[0][3]
    assert {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn"} <= {
        *options
    }, f"options {sorted(options)}"
    update_of = torch_private.orthogonalized(
        p.grad.bfloat16(), options["ns_coefficients"], options["ns_steps"], options["eps"]
    )
    rate = torch_private.muon_learning_rate(0.1, options["adjust_lr_fn"], p.shape)
    assert torch.equal(p.detach(), start.add(update_of, alpha=-rate)), "the parts are not the whole"


@check("current_graph_task_id", "at_end_of_backward")
def running_backward() -> None:
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        seen.append(torch_private.current_graph_task_id())
        torch_private.at_end_of_backward(lambda: seen.append("end"))

    x.register_hook(hook)
    assert torch_private.current_graph_task_id() == -1
    (x * 2).sum().backward()
    assert len(seen) == 2 and seen[0] >= 0 and seen[1] == "end", f"saw {seen}"


@check("next_sequence_nr", "sequence_nr")
def node_numbers() -> None:
    x = torch.ones(1, requires_grad=True)
    before = torch_private.next_sequence_nr()
    y = x * 2
    z = y + 1
    after = torch_private.next_sequence_nr()
    assert before <= torch_private.sequence_nr(y.grad_fn) < torch_private.sequence_nr(z.grad_fn) < after


@check("saved_tensors_are_mutable")
def saved_tensors() -> None:
    assert not torch_private.saved_tensors_are_mutable()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert torch_private.saved_tensors_are_mutable()


@check("saved_tensors_are_packed")
def packing_hooks() -> None:
    seen: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.saved_tensors_are_packed())
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.saved_tensors_are_packed())
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: Looks.apply(x).sin(), x, use_reentrant=False)
    del seen[:]
    y.sum().backward()
    assert seen == [True, False], "only while it is recomputed"


@check("in_functorch")
def transforms() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(torch_private.in_functorch()) or x)(torch.ones(2))
    assert seen == [True] and not torch_private.in_functorch()


# --- modules and data loaders -----------------------------------------------------------------------------------------


@check("is_compiled", "compiled_call", "replace_compiled_call", "plain_call")
def compiled_modules() -> None:
    module, calls = nn.Linear(1, 1), []
    assert not torch_private.is_compiled(module) and torch_private.is_compiled(torch.compile(module))
    assert torch_private.compiled_call(module) is None
    module.compile()
    assert torch_private.is_compiled(module) and callable(torch_private.compiled_call(module))
    torch_private.replace_compiled_call(module, lambda x: calls.append(x))
    module(1)
    assert calls == [1] and torch_private.plain_call(module)(torch.ones(1)).shape == (1,)


@check("has_hooks")
def _() -> None:
    def hooked(register: str) -> bool:
        module = nn.Linear(2, 2)
        getattr(module, register)(lambda *_: None)
        return torch_private.has_hooks(module)

    assert not torch_private.has_hooks(nn.Linear(2, 2))
    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    assert all(hooked(f"register_{kind}") for kind in kinds)


@check("parameters_of", "set_parameters", "replace_parameters", "buffers_of", "submodules_of", "non_persistent_buffers")
def modules() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    assert set(torch_private.submodules_of(module)) == {"0"}
    assert set(torch_private.buffers_of(module)) == {"kept", "left_out"}
    assert torch_private.non_persistent_buffers(module) == {"left_out"}
    inner, plain = module[0], torch.ones(1, 1)
    assert torch_private.parameters_of(inner) == {"weight": inner.weight, "bias": None}
    torch_private.parameters_of(inner)["weight"] = plain
    assert inner.weight is plain
    torch_private.set_parameters([(inner, "weight", other := plain + 1)])
    assert inner.weight is other
    torch_private.replace_parameters(inner, {"weight": nn.Parameter(plain * 2)})
    assert inner.weight == 2


@check("forget_iterator")
def loaders() -> None:
    loader = DataLoader([1, 2], num_workers=0)
    assert "_iterator" in vars(loader), "DataLoader keeps its iterator elsewhere"
    torch_private.forget_iterator(loader)
    assert loader._iterator is None


# --- torch.distributed ------------------------------------------------------------------------------------------------


@check("scaled_mm")
def scaled_mm() -> None:
    a, b = (torch.eye(16).mul(n).to(torch.float8_e4m3fn) for n in (2, 3))
    scales = torch.full((16, 1), 0.5), torch.full((1, 16), 0.25)
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    torch_private.scaled_mm(
        a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=True, out=out
    )
    assert torch.equal(out, torch.eye(16, dtype=torch.bfloat16) * 0.75)


@check("coalescing_manager")
def coalescing() -> None:
    accepts(torch_private.coalescing_manager, "group", "async_ops")


@check(
    "device_types", "backend_for", "backend_timeout", "set_group_timeout", "all_groups", "group_named", "default_store"
)  # fmt: skip
def process_groups() -> None:
    on_one_device()
    world = dist.group.WORLD
    assert world is not None and world in torch_private.all_groups()
    assert torch_private.group_named(world.group_name) is world
    assert "cpu" in torch_private.device_types(world)
    backend = torch_private.backend_for(world, "cpu")
    assert backend.name().lower() == "gloo"
    before = torch_private.backend_timeout(backend)
    torch_private.set_group_timeout(world, timedelta(seconds=77))
    try:
        assert torch_private.backend_timeout(torch_private.backend_for(world, "cpu")) == 77
    finally:
        torch_private.set_group_timeout(world, timedelta(seconds=before))
    store = torch_private.default_store()
    store.set("contract", "kept")
    assert store.get("contract") == b"kept"


@check("sign_objects")
def objects() -> None:
    on_one_device()
    modules, found = dist.distributed_c10d, list[Any]([None])
    before = modules._pickler, modules._unpickler

    class Upper:
        def __init__(self, file: Any) -> None:
            self.file = file

        def dump(self, value: str) -> None:
            self.file.write(value.encode())

        def load(self) -> str:
            return str(self.file.read().decode()).upper()

    try:
        torch_private.sign_objects(Upper)
        dist.all_gather_object(found, "text")
    finally:
        modules._pickler, modules._unpickler = before
    assert found == ["TEXT"]


@check("mesh_without_groups")
def meshes() -> None:
    on_one_device()
    mesh = torch_private.mesh_without_groups("cpu", torch.tensor([0]), ("data",))
    assert mesh.mesh_dim_names == ("data",) and mesh.size() == 1


@check("group_name")
def names_of_groups() -> None:
    on_one_device()
    with torch_private.group_name("fullshard/contract"):
        group = dist.new_group([0], use_local_synchronization=True)
    assert group.group_name == "fullshard/contract", f"the group is named {group.group_name}"


# --- torch.compile ----------------------------------------------------------------------------------------------------


@check("set_eval_frame")
def compiler() -> None:
    before = torch_private.set_eval_frame(None)
    assert before is None and torch_private.set_eval_frame(before) is None


@check("maybe_mark_dynamic", "compiler_settings", "compiler_errors")
def sizes_and_errors_of_the_compiler() -> None:
    sizes: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes.append([type(one) for one in inputs])
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    first, second = torch.ones(3, 4), torch.ones(5, 4)
    torch_private.maybe_mark_dynamic(first, [0])
    double(first), double(second)
    assert len(sizes) == 1, "compiled for any size"
    limit = torch_private.compiler_settings.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    with limit, pytest.raises(torch_private.compiler_errors()):
        double(torch.ones(5, 4, dtype=torch.int8))

    def broken(graph: Any, inputs: list[Any]) -> Any:
        raise ValueError("no compiler")

    with pytest.raises(torch_private.compiler_errors()):
        torch.compile(lambda x: x + 1, backend=broken)(first)


# --- the tests --------------------------------------------------------------------------------------------------------


def entries() -> list[str]:
    """Everything that the module offers."""
    functions = [
        name
        for name, value in vars(torch_private).items()
        if isinstance(value, FunctionType) and value.__module__ == torch_private.__name__ and not name.startswith("_")
    ]
    return sorted({*functions, *torch_private.NAMES, "ATEN_OPERATORS"})


@pytest.mark.parametrize("name", entries())
def test_entry(name: str) -> None:
    require(name)


@pytest.mark.parametrize(
    ("owner", "attribute", "entry"),
    [
        (torch.autograd, "_engine_run_backward", "engine_run_backward"),
        (dist.distributed_c10d, "_get_default_store", "default_store"),
        (torch.utils._pytree, "tree_leaves", "tree_leaves"),
    ],
)
def test_a_removed_entry_is_named_with_the_torch_version(
    owner: Any, attribute: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, attribute)
    vars(torch_private).pop(entry) if entry in torch_private.NAMES else None  # it is looked up again
    with pytest.raises(AssertionError, match=rf"torch_private\.{entry} does not fit torch {re.escape(VERSION)}"):
        require(entry)


def test_a_missing_name_is_an_error_that_names_the_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.NAMES, "gone", "torch:Tensor._gone")
    with pytest.raises(RuntimeSetupError, match=rf"torch {re.escape(VERSION)} has no torch.Tensor._gone"):
        torch_private.gone  # noqa: B018


PRIVATE = {
    "_local_tensor", "_spec", "_is_current_rank_part_of_mesh", "_op_dispatcher",
    "_get_root_mesh", "_custom_op_handlers", "_random_ops",
    "_try_replicate_spec_for_scalar_tensor",
    "_version", "_cdata", "_backward_hooks", "_post_accumulate_grad_hooks", "_schema", "_overloadname",
    "_sequence_nr", "_execution_engine", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_iterator", "_device_types", "_get_backend", "_timeout", "_world", "_orig_mod", "_compiled_call_impl",
    "_call_impl",
}  # fmt: skip
"""Private attributes of torch's objects."""


def private_uses(source: str) -> list[str]:
    """The private parts of torch that a file names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: {node.module}"] if any(part.startswith("_") for part in parts) else []
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            of_torch = path.startswith(("torch.", "dist.")) and node.attr.startswith("_") and node.attr[1] != "_"
            if of_torch or node.attr in PRIVATE:
                found.append(f"{node.lineno}: {path}")
        elif isinstance(node, ast.keyword) and node.arg == "_init_backend":
            found.append(f"{node.value.lineno}: {node.arg}")
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.append(f"{node.lineno}: {node.value!r}")
    return found


def test_no_other_file_names_a_private_part_of_torch() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "torch_private.py"]
    found = {str(path.relative_to(PACKAGE)): uses for path in files if (uses := private_uses(path.read_text()))}
    assert found == {}
    assert private_uses("from torch._C import x\ny._local_tensor\ntorch.autograd._f()\nself._parameters['a']")
