"""Layouts on XLA: the names of `fullshard.spmd` that depend on the engine (`engines.Engine.layouts`)."""

from fullshard.spmd.draw import sharding_string as sharding_string
from fullshard.spmd.draw import visualize_tensor_sharding as visualize_tensor_sharding
from fullshard.spmd.loader import ShardedLoader as ShardedLoader
from fullshard.xla.sharding import ShardingSpec as ShardingSpec
from fullshard.xla.sharding import annotate_custom_sharding as annotate_custom_sharding
from fullshard.xla.sharding import apply_backward_optimization_barrier as apply_backward_optimization_barrier
from fullshard.xla.sharding import apply_xla_patch_to_nn_linear as apply_xla_patch_to_nn_linear
from fullshard.xla.sharding import clear_sharding as clear_sharding
from fullshard.xla.sharding import disable_manual_sharding as disable_manual_sharding
from fullshard.xla.sharding import distribute_module as distribute_module
from fullshard.xla.sharding import enable_manual_sharding as enable_manual_sharding
from fullshard.xla.sharding import mark_sharding as mark_sharding
from fullshard.xla.sharding import mark_sharding_with_gradients as mark_sharding_with_gradients
from fullshard.xla.sharding import shard_as as shard_as
from fullshard.xla.tensor import LocalShard as LocalShard
from fullshard.xla.tensor import ShardedTensor as ShardedTensor
from fullshard.xla.tensor import ShardingType as ShardingType
from fullshard.xla.tensor import XLAShard as XLAShard
from fullshard.xla.tensor import XLAShardedTensor as XLAShardedTensor
from fullshard.xla.tensor import full_tensor as full_tensor
from fullshard.xla.tensor import is_sharded as is_sharded
from fullshard.xla.tensor import sharding_of as sharding_of
from fullshard.xla.tensor import unwrap_sharded_tensor as unwrap_sharded_tensor
from fullshard.xla.tensor import wrap_if_sharded as wrap_if_sharded
