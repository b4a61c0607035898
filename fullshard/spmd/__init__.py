"""Sharding: named meshes, partition specs, sharded tensors, and the operators on them.

`import fullshard.spmd as xs` offers the names of PyTorch/XLA's `torch_xla.distributed.spmd`.
"""

from typing import Any

from fullshard import xla_names
from fullshard.spmd import dtensor_fixes as dtensor_fixes  # patches torch's own class
from fullshard.spmd import ops as ops  # runs the operators of ShardedTensor
from fullshard.spmd.debug_check import check_global_values
from fullshard.spmd.draw import sharding_string, visualize_sharding, visualize_tensor_sharding
from fullshard.spmd.loader import ShardedLoader, ShardingSpec
from fullshard.spmd.mesh import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from fullshard.spmd.module import distribute_module
from fullshard.spmd.sharding import (
    annotate_custom_sharding,
    apply_backward_optimization_barrier,
    apply_xla_patch_to_nn_linear,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
    sharding_of,
    unwrap_sharded_tensor,
    wrap_if_sharded,
)
from fullshard.spmd.spec import Layout, PartitionSpec
from fullshard.spmd.tensor import LocalShard, ShardedTensor, ShardingType

# PyTorch/XLA's names.
XLAShardedTensor, XLAShard = ShardedTensor, LocalShard


def __getattr__(name: str) -> Any:
    xla_names.refuse(__name__, "xs", name)


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
    "get_1d_mesh",
    "get_global_mesh",
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
