"""Sharding: named meshes, partition specs, sharded tensors, and the operators on them.

`import fullshard.spmd as xs` offers the names of PyTorch/XLA's `torch_xla.distributed.spmd`.
"""

from typing import TYPE_CHECKING, Any

from fullshard.distributed import engines, guide_names
from fullshard.spmd.debug_check import check_global_values
from fullshard.spmd.draw import visualize_sharding
from fullshard.spmd.mesh import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from fullshard.spmd.spec import Layout, PartitionSpec

if TYPE_CHECKING:
    from fullshard.spmd.torch_layouts import (
        LocalShard,
        ShardedLoader,
        ShardedTensor,
        ShardingSpec,
        ShardingType,
        XLAShard,
        XLAShardedTensor,
        annotate_custom_sharding,
        apply_backward_optimization_barrier,
        apply_xla_patch_to_nn_linear,
        clear_sharding,
        disable_manual_sharding,
        distribute_module,
        enable_manual_sharding,
        full_tensor,
        is_sharded,
        mark_sharding,
        mark_sharding_with_gradients,
        shard_as,
        sharding_of,
        sharding_string,
        unwrap_sharded_tensor,
        visualize_tensor_sharding,
        wrap_if_sharded,
    )
elif engines.can_be_used():
    _ = engines.current().layouts  # importing them completes torch's tensors


def __getattr__(name: str) -> Any:
    if name in __all__:  # the engine's
        return getattr(engines.current().layouts, name)
    return guide_names.find_guide_name(__name__, "xs", name)


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
