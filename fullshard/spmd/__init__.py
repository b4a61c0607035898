"""Sharding: named meshes, partition specs, sharded tensors, and the operators on them.

`import fullshard.spmd as xs` offers the names of PyTorch/XLA's `torch_xla.distributed.spmd`.
"""

from typing import TYPE_CHECKING, Any

from fullshard import engines, xla_names
from fullshard.spmd.debug_check import check_global_values
from fullshard.spmd.draw import visualize_sharding
from fullshard.spmd.mesh import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from fullshard.spmd.spec import Layout, PartitionSpec

if TYPE_CHECKING or not engines.is_xla():
    from fullshard.spmd import dtensor_fixes as dtensor_fixes  # patches torch's own class
    from fullshard.spmd import ops as ops  # runs the operators of ShardedTensor
    from fullshard.spmd.draw import sharding_string, visualize_tensor_sharding
    from fullshard.spmd.loader import ShardedLoader, ShardingSpec
    from fullshard.spmd.module import distribute_module
    from fullshard.spmd.sharding import (
        annotate_custom_sharding,
        apply_backward_optimization_barrier,
        apply_xla_patch_to_nn_linear,
        clear_sharding,
        disable_manual_sharding,
        enable_manual_sharding,
        full_tensor,
        mark_sharding,
        mark_sharding_with_gradients,
        shard_as,
        sharding_of,
        unwrap_sharded_tensor,
        wrap_if_sharded,
    )
    from fullshard.spmd.tensor import LocalShard, ShardedTensor, ShardingType, is_sharded

    # PyTorch/XLA's names.
    XLAShardedTensor, XLAShard = ShardedTensor, LocalShard


def __getattr__(name: str) -> Any:
    found = engines.xla_name(name, _ON_XLA)
    return found if found is not None else xla_names.find(__name__, "xs", name)


_ON_XLA = {
    "compiler_hints": ("apply_backward_optimization_barrier", "apply_xla_patch_to_nn_linear"),
    "loader": ("ShardedLoader", "ShardingSpec"),
    "sharding": (
        "annotate_custom_sharding",
        "clear_sharding",
        "disable_manual_sharding",
        "distribute_module",
        "enable_manual_sharding",
        "mark_sharding",
        "mark_sharding_with_gradients",
        "shard_as",
        "sharding_string",
        "visualize_tensor_sharding",
    ),
    "tensor": (
        "LocalShard",
        "ShardedTensor",
        "ShardingType",
        "XLAShard",
        "XLAShardedTensor",
        "full_tensor",
        "is_sharded",
        "sharding_of",
        "unwrap_sharded_tensor",
        "wrap_if_sharded",
    ),
}
"""The names that are different on XLA, by the module of `fullshard.xla` that defines them."""

__all__ = [
    "HybridMesh",
    "Layout",
    "LocalShard",
    "Mesh",
    "PartitionSpec",
    "ShardedLoader",
    "ShardedTensor",
    "ShardingSpec",
    "ShardingType",
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "check_global_values",
    "clear_sharding",
    "disable_manual_sharding",
    "distribute_module",
    "enable_manual_sharding",
    "full_tensor",
    "get_1d_mesh",
    "get_global_mesh",
    "is_sharded",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "sharding_of",
    "sharding_string",
    "unwrap_sharded_tensor",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "wrap_if_sharded",
]
