"""Layouts on the torch engine: the names of `fullshard.spmd` that depend on the engine (`engines.Engine.layouts`).

Importing this file completes torch's and our own tensors: `ops` runs the operators of `ShardedTensor`, and
`dtensor_fixes` corrects torch's `DTensor`.
"""

from fullshard.spmd import dtensor_fixes as dtensor_fixes
from fullshard.spmd import ops as ops
from fullshard.spmd.draw import sharding_string as sharding_string
from fullshard.spmd.draw import visualize_tensor_sharding as visualize_tensor_sharding
from fullshard.spmd.loader import ShardedLoader as ShardedLoader
from fullshard.spmd.loader import ShardingSpec as ShardingSpec
from fullshard.spmd.sharding import annotate_custom_sharding as annotate_custom_sharding
from fullshard.spmd.sharding import apply_backward_optimization_barrier as apply_backward_optimization_barrier
from fullshard.spmd.sharding import apply_xla_patch_to_nn_linear as apply_xla_patch_to_nn_linear
from fullshard.spmd.sharding import clear_sharding as clear_sharding
from fullshard.spmd.sharding import disable_manual_sharding as disable_manual_sharding
from fullshard.spmd.sharding import distribute_module as distribute_module
from fullshard.spmd.sharding import enable_manual_sharding as enable_manual_sharding
from fullshard.spmd.sharding import full_tensor as full_tensor
from fullshard.spmd.sharding import mark_sharding as mark_sharding
from fullshard.spmd.sharding import mark_sharding_with_gradients as mark_sharding_with_gradients
from fullshard.spmd.sharding import shard_as as shard_as
from fullshard.spmd.sharding import sharding_of as sharding_of
from fullshard.spmd.sharding import unwrap_sharded_tensor as unwrap_sharded_tensor
from fullshard.spmd.sharding import wrap_if_sharded as wrap_if_sharded
from fullshard.spmd.tensor import LocalShard as LocalShard
from fullshard.spmd.tensor import ShardedTensor as ShardedTensor
from fullshard.spmd.tensor import ShardingType as ShardingType
from fullshard.spmd.tensor import is_sharded as is_sharded

# PyTorch/XLA's names.
XLAShardedTensor, XLAShard = ShardedTensor, LocalShard
