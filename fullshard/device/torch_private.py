"""Private parts of torch that fullshard uses. No other file of the package may name one.

Each entry has a comment or docstring: why it is needed, the torch versions it was seen in, and what breaks without it.
`tests/test_torch_private.py` checks every entry against the installed torch.

Nothing is imported from `torch.distributed.tensor` before its first use: that takes longer than the rest of fullshard,
and the launcher and the watchdog do without it.

Subclassing DTensor
-------------------
`spmd.tensor.ShardedTensor` is a subclass of `DTensor` (torch 2.12 and later) or of `Tensor` (torch 2.11, where the C++
dispatcher handles every DTensor subclass without calling its `__torch_dispatch__`). It depends on these members:

| member | ShardedTensor | why |
|---|---|---|
| `_local_tensor`, `_spec` | reads and sets, through the functions below | the shard and its layout |
| `__new__` | `Tensor._dtensor__new__` | sets both members in C++; `DTensor.__new__` sets the same |
| `__init__` | overrides | takes the arguments of `__new__` and ignores them |
| `__torch_function__` | disabled | `DTensor` disables it too; torch 2.11's base class does not |
| `__torch_dispatch__` | overrides | our own rules, and a replicated fallback |
| `device_mesh`, `placements` | overrides | torch 2.11's base class has neither |
| `redistribute`, `full_tensor`, `to_local` | overrides | exact for uneven shards and for several meshes |
| `data` | overrides | an assignment changes the shard, not only the outer tensor |
| `__repr__` | overrides | prints the partition spec |
| `__tensor_unflatten__` | overrides | `torch.compile` rebuilds the subclass, not a `DTensor` |
| `__tensor_flatten__` | inherits | `torch.compile` |
| `__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__` | inherits | distributed checkpoints |

Patches
-------
Attributes of other libraries that fullshard replaces, and why nothing else does the job:

- `torch.autograd._engine_run_backward`, by `fsdp.backward_entry`: torch has no hook at the start of a backward pass.
- `distributed_c10d._process_group_name`, by `groups.new_group` during one call: `new_group` has no argument for the
  name, and torch's own name depends on how many groups this rank has already made.
- `distributed_c10d._pickler` and `_unpickler`, by `runtime.use_spmd` where the job has a secret: torch unpickles what
  arrives on its sockets without knowing who sent it.
- `DTensor.data`, by `spmd.dtensor_fixes`: parameters of FSDPv2 are plain DTensors, and `Tensor.data` calls no hook.
- `DTensor._op_dispatcher._custom_op_handlers` (entries are added), by `spmd.dtensor_fixes`: torch has no public
  way to register a function for an operator on DTensors.
- `DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path`, by `spmd.dtensor_fixes`: torch takes a rank's loss
  for a value that all ranks have, and asks nothing where it remembers the layouts.
- `__add__`, `__sub__`, `__mul__`, `__truediv__` of `DTensor` and their reflected forms, by `spmd.dtensor_fixes`: a
  sharded penalty joins a rank's loss there, above autograd.
- `torch.optim._muon.muon`, by `optim.sharded`: `torch.optim.Muon` has no hook between momentum and orthogonalization,
  which needs the whole matrix.
- `peft.tuners.lora.layer.ParamWrapper.forward`, by `quant.expert_adapters`: PEFT adds the adapters of all experts to
  their dense weights there. Wrappers around anything else run PEFT's forward.
- `torch.nn.functional.scaled_dot_product_attention`, `dropout`, `grouped_mm` and `torch.bincount`, by
  `models.kernels_on_meta` while a step is traced on the meta device: torch has other kernels there than on the device
  that it stands for, or none.
- `datasets.config.HF_HUB_OFFLINE`, by `data.find_dataset` during one call: `load_dataset` has no argument for it.

On single modules of the user's model (never on a class): `forward` (activation checkpointing, chunked loss, packing,
generation), and `forward_adapters` of PEFT's trainable-token layers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.errors import RuntimeSetupError
from fullshard.version import TORCH_NEEDED, version_numbers

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta

NAMES = {
    # The layout of a DTensor and its global shape, to build one from a shard. 2.11, 2.13. All sharded tensors break.
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    # Its constructor `(cls, local_tensor, spec, *, requires_grad)` in C++. 2.11, 2.13. All sharded tensors break.
    "dtensor_new": "torch:Tensor._dtensor__new__",
    # Moves a shard between layouts; the public `redistribute` returns torch's class. 2.11, 2.13. The same.
    "redistribute_local_tensor": "torch.distributed.tensor._redistribute:redistribute_local_tensor",
    # The unfinished result of a functional collective, to wait for it. 2.11, 2.13. Data is read before it arrived.
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives:AsyncCollectiveTensor",
    # A tensor with a shape and no memory. 2.11, 2.13. Deferred logits, gradients under `no_sync`, 4-bit weights break.
    "make_wrapper_subclass": "torch:Tensor._make_wrapper_subclass",
    # Switches `__torch_function__` off for a class, and for a block. 2.11, 2.13. Subclasses call themselves endlessly.
    "no_torch_function": "torch._C:_disabled_torch_function_impl",
    "NoTorchFunction": "torch._C:DisableTorchFunctionSubclass",
    # Many copies in one kernel launch. 2.11, 2.13. Gathers of small parameters break.
    "foreach_copy_": "torch:_foreach_copy_",
    # Products of fp8 matrices with scales; the public one has no `out`. 2.11, 2.13. fp8 weights break.
    "scaled_mm": "torch:_scaled_mm",
    # Norms of many tensors, and their product with a number, in few launches. 2.11, 2.13. Gradient clipping breaks.
    "foreach_norm": "torch:_foreach_norm",
    "foreach_mul_": "torch:_foreach_mul_",
    # Nested arguments as a flat list; neither version has a public module for it. 2.11, 2.13. Dispatch breaks.
    "tree_flatten": "torch.utils._pytree:tree_flatten",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_unflatten": "torch.utils._pytree:tree_unflatten",
    # Runs an operator on the outer tensor of a subclass. 2.11, 2.13. `squeeze_`, `t_` and the like break.
    "no_dispatch": "torch.utils._mode_utils:no_dispatch",
    # A mode that sees every operator. 2.11, 2.13. `fullshard plan` cannot trace a step.
    "DispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    # Operators written in simpler ones: batch and group norms. 2.11, 2.13. Norms of a sharded batch are replicated.
    "decomposition_table": "torch._decomp:decomposition_table",
    # The number of the running backward pass, -1 outside of one. 2.11, 2.13. FSDPv2's backward breaks.
    "current_graph_task_id": "torch._C:_current_graph_task_id",
    # The number that autograd's next node gets (see `sequence_nr`). 2.11, 2.13. As `engine_run_backward`.
    "next_sequence_nr": "torch.autograd:_get_sequence_nr",
    # One launch for several collectives. 2.11, 2.13. FSDPv2's gathers and reductions break.
    "coalescing_manager": "torch.distributed:_coalescing_manager",
    # Takes the compiler out of force for this thread and puts it back. 2.11, 2.13. A compiled model traces the engine.
    "set_eval_frame": "torch._C._dynamo.eval_frame:set_eval_frame",
    # Asks the compiler to compile for any size of a dimension. 2.11, 2.13. Each new size compiles again.
    "maybe_mark_dynamic": "torch._dynamo:maybe_mark_dynamic",
    # The compiler's settings, to change them for a block. 2.11, 2.13. Layers fall back to eager without a word.
    "compiler_settings": "torch._dynamo:config",
}
"""Names that are used as they are: where each comes from, as module:attribute."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, path = NAMES[name].partition(":")
    try:
        value = globals()[name] = functools.reduce(getattr, path.split("."), importlib.import_module(home))
    except (ImportError, AttributeError) as error:
        problem = RuntimeSetupError(
            f"torch {torch.__version__} has no {home}.{path}, which fullshard needs; install torch 2.11, 2.12 or 2.13"
        )
        if version_numbers(torch.__version__) < TORCH_NEEDED:
            return functools.partial(_raise, problem)  # the package can be imported, not used
        raise problem from error
    return value


def _raise(problem: RuntimeSetupError, *args: Any, **kwargs: Any) -> NoReturn:
    raise problem


# --- sharded tensors --------------------------------------------------------------------------------------------------


def local_of(t: Any) -> torch.Tensor:
    """This rank's shard, without autograd (`to_local` is an autograd operation). 2.11, 2.13. All sharded tensors
    break."""
    local: torch.Tensor = t._local_tensor
    return local


def set_local(t: Any, local: torch.Tensor) -> None:
    """Replaces the shard of a tensor, as in-place operators do. 2.11, 2.13. In-place operators break."""
    t._local_tensor = local


def spec_of(t: Any) -> DTensorSpec:
    """Mesh, placements and global shape in one value. 2.11, 2.13. All sharded tensors break."""
    spec: DTensorSpec = t._spec
    return spec


def set_spec(t: Any, spec: DTensorSpec) -> None:
    """Changes the layout of a tensor, as in-place operators do. 2.11, 2.13. In-place operators break."""
    t._spec = spec


def is_in_mesh(mesh: Any) -> bool:
    """Whether this rank is in the mesh (`get_coordinate` is slower). 2.11, 2.13. Meshes of some of the ranks break."""
    return bool(mesh._is_current_rank_part_of_mesh())


def root_mesh(mesh: Any) -> Any:
    """The mesh that a mesh such as `mesh["dp"]` is a part of, or itself. 2.11, 2.13. `FSDPv2(model, mesh["dp"])` of
    a model that is also split over `mesh["tp"]` breaks."""
    return mesh._get_root_mesh()


def take_shard(t: Any, source: Any) -> None:
    """Makes a tensor hold the shard and the layout of another one. 2.11, 2.13. In-place operators break."""
    t._local_tensor, t._spec = source._local_tensor, source._spec


def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def torch_sharding(op: Any, args: Any, kwargs: Any) -> Any:
    """What torch's sharding rule wants for an operator, without running it. 2.11, 2.13. Every operator is
    replicated."""
    dispatcher = _dispatcher()
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    return dispatcher.sharding_propagator.propagate_op_sharding(info.schema)


def custom_op_handlers() -> dict[Any, Callable[..., Any]]:
    """torch's table of operators with a function of their own, `(op, args, kwargs)`. 2.11, 2.13. DTensors on CPU
    draw the same random numbers for each shard, and `GradScaler` refuses plain gradients among sharded ones."""
    handlers: dict[Any, Callable[..., Any]] = _dispatcher()._custom_op_handlers
    return handlers


def layout_chooser() -> Callable[..., Any]:
    """Where torch chooses the layouts of an operator on DTensors, `(op, args, kwargs, info, …)`, unless it remembers
    them. What it returns instead of layouts is the result, and nothing is remembered. 2.11, 2.13. torch takes a rank's
    loss beside a DTensor for a value that all ranks have, without a message."""
    # None where torch is too old for sharded tensors: there the package can be imported, not used.
    choose: Any = getattr(_dispatcher(), "_propagate_op_sharding_dispatch_slow_path", None)
    return choose


def replace_layout_chooser(choose: Callable[..., Any]) -> None:
    """Sets what `layout_chooser` returns."""
    _dispatcher()._propagate_op_sharding_dispatch_slow_path = choose


def run_in_layouts(op: Any, args: Any, kwargs: Any, info: Any, layouts: Any) -> Any:
    """Runs an operator on several DTensors in the layouts that torch has chosen, as torch does then. 2.11, 2.13. As
    `layout_chooser`."""
    if not hasattr(layouts, "output_spec"):
        return layouts  # torch has run it
    info.output_sharding, mesh, dispatcher = layouts, info.compute_mesh, _dispatcher()
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    writes, to_out = schema_of(op).name.endswith("_"), "out" in overload_name(op)
    if not (writes or to_out or op is torch.ops.aten.equal.default):
        return dispatcher.wrap(results, layouts.output_spec)
    return dispatcher._dispatch_fast_path_python_tail(
        op, args, kwargs, mesh, layouts, results, is_in_mesh(mesh), writes, to_out and not writes
    )


def random_ops() -> Any:
    """The random operators that torch can run shard by shard on a GPU. 2.11, 2.13. They are drawn whole on every
    rank."""
    return _dispatcher()._random_ops


# --- tensors ----------------------------------------------------------------------------------------------------------


def skips_on_device(optimizer: Any) -> bool:
    """Whether an optimizer of torch skips its update on the device where its attribute `found_inf`, a tensor, is 1;
    the fused ones do. 2.11, 2.13. The host waits for the values of each step."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and type(optimizer).__module__ in (
        "torch.optim.adam",
        "torch.optim.adamw",
        "torch.optim.sgd",
    )


def version_of(t: torch.Tensor) -> int:
    """How often a tensor was written in place. 2.11, 2.13. Stale gathered parameters are not noticed."""
    return t._version


def versions_of(tensors: Iterable[Any]) -> list[tuple[int, int, int]]:
    """The same of many sharded tensors and of their shards, with the tensors' identities. 2.11, 2.13. The same."""
    return [(id(t), t._version, t._local_tensor._version) for t in tensors]


def storage_id(t: torch.Tensor) -> int:
    """Whether two tensors share memory: the address of the storage object. 2.11, 2.13. An output may alias freed
    memory."""
    return t.untyped_storage()._cdata


def become_ordinary(t: torch.Tensor) -> None:
    """Makes an ordinary tensor or parameter of an instance of a subclass of Tensor; `nn.Parameter` marks such
    instances. 2.11, 2.13. Weights that were left in their files break when they are used."""
    t.__class__ = nn.Parameter if t.__dict__.pop("_is_param", False) else torch.Tensor


def backward_hooks(t: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    """The hooks of `register_hook` by handle; None without any. 2.11, 2.13. Hooks on parameters are lost at
    sharding."""
    return t._backward_hooks


def post_accumulate_hooks(t: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    """Those of `register_post_accumulate_grad_hook`. 2.11, 2.13. The same."""
    hooks: dict[int, Callable[..., Any]] | None = t._post_accumulate_grad_hooks
    return hooks


def hook_attributes() -> tuple[str, str]:
    """The attributes with both. 2.11, 2.13. The same."""
    return "_backward_hooks", "_post_accumulate_grad_hooks"


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Both dicts themselves, so that handles still remove hooks. 2.11, 2.13. The same."""
    for name in hook_attributes():
        if registered := getattr(source, name):
            setattr(target, name, registered)


# --- operators --------------------------------------------------------------------------------------------------------


def schema_of(op: Any) -> Any:
    """An operator's arguments, and which it writes to. 2.11, 2.13. Dispatch breaks."""
    return op._schema


def overload_name(op: Any) -> str:
    """`int` in `aten.transpose.int`. 2.11, 2.13. `transpose_` and the like break."""
    name: str = op._overloadname
    return name


def operator_packet(op: Any) -> Any:
    """`aten.transpose` of `aten.transpose.int`. 2.11, 2.13. `fullshard plan` counts no floating-point operations."""
    return op._overloadpacket


def is_composite(op: Any) -> bool:
    """Whether `op.decompose` works. 2.11, 2.13. Composite operators are replicated."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), implicit))


# Operators whose names begin with an underscore and that are used as attributes of `torch.ops.aten`. (Rules name
# operators by strings and skip those that torch lacks.) 2.11, 2.13. `import fullshard.spmd` fails.
ATEN_OPERATORS = (
    "_amp_foreach_non_finite_check_and_unscale_.default",
    "_foreach_zero_.default",
    "_foreach_mul_.Scalar",
    "_foreach_mul_.Tensor",
    "_foreach_div_.Scalar",
    "_foreach_div_.Tensor",
    "_unsafe_view.default",
    "_scaled_dot_product_attention_math.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
)


# --- autograd ---------------------------------------------------------------------------------------------------------


def engine_run_backward() -> Callable[..., Any]:
    """The function through which every backward pass starts, and its replacement. 2.11, 2.13. FSDPv2 does not see
    gradients that enter a unit through a tensor its forward did not return."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward
    return run


def replace_engine_run_backward(run: Callable[..., Any]) -> None:
    """Sets what `engine_run_backward` returns."""
    torch.autograd._engine_run_backward = run


def at_end_of_backward(call: Callable[[], Any]) -> None:
    """Calls a function when the running backward pass ends. 2.11, 2.13. Gradients are not reduced."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def sequence_nr(node: Any) -> int:
    """The number of a node of autograd, in the order of recording. 2.11, 2.13. As `engine_run_backward`."""
    number: int = node._sequence_nr()
    return number


def saved_tensors_are_packed() -> bool:
    """Whether hooks pack the tensors that are saved now (`saved_tensors_hooks`). 2.11, 2.13. In backward passes torch's
    checkpointing alone does that, while it recomputes: plans would not know what is recomputed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensors_are_mutable() -> bool:
    """Whether `allow_mutation_on_saved_tensors()` is in force. 2.11, 2.13. It corrupts gradients instead of being
    refused."""
    return bool(getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False))


def in_functorch() -> bool:
    """Whether a transform of `torch.func` is running. 2.11, 2.13. It corrupts gradients instead of being refused."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- optimizers -------------------------------------------------------------------------------------------------------


def muon_function() -> Callable[..., Any]:
    """The function with which `torch.optim.Muon` updates a list of matrices, and its replacement. 2.11, 2.13. Muon
    works on the pieces of a matrix, in bf16, and rounds differently from one device."""
    function: Callable[..., Any] = torch.optim._muon.muon
    return function


def replace_muon_function(function: Callable[..., Any]) -> None:
    """Sets what `muon_function` returns."""
    torch.optim._muon.muon = function


def orthogonalized(matrix: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """Muon's orthogonalization of one whole matrix. 2.11, 2.13. The same."""
    result: torch.Tensor = torch.optim._muon._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)
    return result


def muon_learning_rate(lr: float, adjust: str | None, shape: torch.Size) -> float:
    """Muon's learning rate for a matrix of a shape. 2.11, 2.13. The same."""
    return float(torch.optim._muon._adjust_lr(lr, adjust, shape))


# --- modules and data loaders -----------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The dicts behind a module's attributes: `setattr` on the module runs checks that refuse to replace a
    parameter by another tensor. 2.11, 2.13. Parameters cannot be swapped for gathered ones."""
    return module._parameters


def set_parameters(values: Iterable[tuple[nn.Module, str, Any]]) -> None:
    """Assigns parameters by module and name, without the checks of `setattr`. 2.11, 2.13. The same."""
    for module, name, value in values:
        module._parameters[name] = value


def replace_parameters(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Replaces the table that `parameters_of` returns."""
    module._parameters = parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers by name. 2.11, 2.13. The same."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, Any]:
    """A module's direct children by name. 2.11, 2.13. The same."""
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module runs more than its forward. 2.11, 2.13. Hooks inside fused LoRA layers do not run."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wraps a module, or has compiled it in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` has made of the module's call. 2.11, 2.13. Compiled layers break."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def replace_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Sets what `compiled_call` returns."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """The module's call without compilation. 2.11, 2.13. A layer that cannot be compiled does not run."""
    return module._call_impl


def compiler_errors() -> tuple[type[Exception], ...]:
    """What the compiler raises instead of running a function: errors of its own, and a function that was compiled
    too often. 2.11, 2.13. A layer that cannot be compiled ends the run."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


@contextlib.contextmanager
def compiling_flag() -> Iterator[None]:
    """Lets `torch.compiler.is_compiling()` say yes in a block. 2.11, 2.13. `fullshard plan` prices compiled layers
    as if they were not."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def min_cut_partition(joint: torch.fx.Graph, outputs: int) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """The compiler's choice of what forward saves for backward: a joint graph as one of forward and one of
    backward; the outputs of forward come first. 2.11, 2.13. The same."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    module = torch.fx.GraphModule(torch.nn.Module(), joint)
    forward, backward = min_cut_rematerialization_partition(module, (), num_fwd_outputs=outputs)
    return forward.graph, backward.graph


@functools.cache
def fusible_operators() -> frozenset[Any]:
    """The operators that the compiler fuses with others, without the names of overloads. 2.11, 2.13. The same."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def implementation_of(op: Any) -> Callable[..., Any] | None:
    """The function behind an operator of `torch.library.custom_op`; None for other operators. 2.11, 2.13. The same."""
    from torch._library.custom_ops import OPDEFS

    operator = OPDEFS.get(op._schema.name) if hasattr(op, "_schema") else None
    return None if operator is None else operator._init_fn


def recomputed_node_meta() -> dict[str, Any]:
    """How the compiler marks the nodes of a checkpointed module in a graph. 2.11, 2.13. The same."""
    from torch.utils.checkpoint import CheckpointPolicy

    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Buffers that a state dict leaves out. 2.11, 2.13. They are looked for in the model's files."""
    return module._non_persistent_buffers_set


def forget_iterator(loader: Any) -> None:
    """A copied DataLoader shares the iterator of persistent workers. 2.11, 2.13. Two loaders read from one iterator."""
    vars(loader)["_iterator"] = None


# --- torch.distributed ------------------------------------------------------------------------------------------------


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> Any:
    """A mesh without process groups, for a rank that is not in it. 2.11, 2.13. Unsorted meshes of some of the ranks
    break."""
    return dist.device_mesh.DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def device_types(group: Any) -> set[str]:
    """The types of device of a group. 2.11, 2.13. Groups with two backends break."""
    return {device.type for device in group._device_types}


def backend_for(group: Any, device_type: str) -> Any:
    """The backend of a group for one type of device. 2.11, 2.13. Groups with two backends break."""
    return group._get_backend(torch.device(device_type))


def backend_timeout(backend: Any) -> float:
    """The time limit of a backend's operations. 2.11, 2.13. The watchdog uses its own default."""
    return float(backend.options._timeout.total_seconds())


def set_group_timeout(group: Any, limit: timedelta) -> None:
    """Changes the time limit of a group. 2.11, 2.13. torch ends a process before the watchdog has found the lost
    rank."""
    dist.distributed_c10d._set_pg_timeout(limit, group)


def default_store() -> Any:
    """The store of the default group. 2.11, 2.13. No heartbeats."""
    return dist.distributed_c10d._get_default_store()


def sign_objects(pickler: Any) -> None:
    """What object collectives (`all_gather_object` and its like) pickle with. 2.13. They unpickle whatever arrives."""
    dist.distributed_c10d._pickler = dist.distributed_c10d._unpickler = pickler


def group_named(name: str) -> Any:
    """The group with this name. 2.11, 2.13. Operators that take names, as the compiler needs, cannot send."""
    return dist.distributed_c10d._resolve_process_group(name)


def all_groups() -> list[Any]:
    """All groups of this process. 2.11, 2.13. Waits in them are not ended when a rank is lost."""
    return list(dist.distributed_c10d._world.pg_map)


@contextlib.contextmanager
def group_name(name: str) -> Iterator[None]:
    """Names the groups made in the block. 2.11, 2.13. Ranks that made different numbers of groups never meet."""
    torch_names = dist.distributed_c10d._process_group_name
    dist.distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        dist.distributed_c10d._process_group_name = torch_names
