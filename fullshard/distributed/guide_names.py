"""Names and modules of PyTorch/XLA that fullshard does not have, and the replacement of each.

Accessing one of them through `xr`, `xm`, `xs` or one of `MODULES` (`import fullshard.pl as pl`) raises an
`AttributeError` that names the replacement, so `hasattr` returns False. Any other unknown name raises Python's usual
error. On the XLA engine some of these names, and all of `MODULES`, are PyTorch/XLA's own (`xla/engine.py`).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from fullshard.distributed import engines

_GLOBAL = "tensors are global here; for per-rank data use torch.distributed"
_COMPILED = "nothing is compiled by XLA here"

REFUSED: dict[str, dict[str, str]] = {
    "xm": {
        **dict.fromkeys(
            ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute", "collective_broadcast",
             "all_reduce_bucketized_gradients", "all_gather_bucketized", "reduce_scatter_bucketized", "send", "recv"),
            _GLOBAL,
        ),
        "reduce_gradients": "gradients are already global; step the optimizer",
        **dict.fromkeys(("REDUCE_SUM", "REDUCE_MUL", "REDUCE_MIN", "REDUCE_MAX", "REDUCE_AND", "REDUCE_OR"), _GLOBAL),
        "send_cpu_data_to_device": "use fullshard.spmd.ShardedLoader, or t.to(xm.xla_device())",
        "is_xla_tensor": "there are no XLA tensors; compare t.device with xm.xla_device()",
        "set_replication": "start one process per device with torchrun or fullshard launch",
        "xla_replication_devices": "fullshard.runtime.world_size() counts the devices",
        "xla_real_devices": "xm.xla_device() is this process's only device",
        **dict.fromkeys(("get_stablehlo", "get_stablehlo_bytecode", "dynamic_expand", "dynamic_view_as"), _COMPILED),
        "CoalescingBuckets": _GLOBAL,
        "DeviceContext": "a process has one device, xm.xla_device()",
        "MemoryInfo": "xm.get_memory_info() returns a dict",
        "ToXlaTensorArena": "use fullshard.spmd.ShardedLoader, or t.to(xm.xla_device())",
        "XLA_LIB": "torch.library.Library registers operators",
        "check_view_sharing": "views share memory as in torch",
        "fork_rng": "use torch.random.fork_rng()",
        "xla_device_kind": "use torch.cuda.get_device_name()",
        "xla_rendezvous": "use xm.rendezvous(tag, payload)",
    },
    "xr": {
        "set_device_type": "use use_spmd(device=...), or set FULLSHARD_DEVICE",
        "using_pjrt": "devices are torch devices",
        **dict.fromkeys(
            ("runtime_device_attributes", "global_runtime_device_attributes", "local_runtime_devices"),
            "use torch.cuda.get_device_properties",
        ),
        **dict.fromkeys(("set_cache_path", "get_num_cached_compilation_graph"), _COMPILED),
        "is_bf16_supported": "use torch.cuda.is_bf16_supported(); CPUs compute in bf16 too",
    },
    "xs": {
        "xla_distribute_tensor": "use mark_sharding(t, mesh, partition_spec)",
        "xla_distribute_module": "use mark_sharding on parameters, then distribute_module(module, mesh)",
        "auto_policy": "layouts are not chosen automatically; use mark_sharding on parameters",
        "MarkShardingFunction": "use mark_sharding_with_gradients(t, mesh, partition_spec)",
        **dict.fromkeys(
            ("XLAPatchedLinear", "xla_patched_nn_linear_forward", "EinsumLinear"),
            "nn.Linear already keeps the layout of batch dims",
        ),
        "aot_mark_sharding_fake": _COMPILED,
        "construct_v1_sharding_str": "use sharding_string(t)",
        **dict.fromkeys(
            ("convert_to_xla_mesh", "convert_to_xla_partition_spec", "with_xla"),
            "mark_sharding takes a fullshard.spmd.Mesh and a partition spec",
        ),
        **dict.fromkeys(
            ("convert_to_dtensor_spec", "convert_array_mapping_to_partition_spec", "wrap_as_sharded_tensor"),
            "a sharded tensor has placements, device_mesh and sharding_spec",
        ),
    },
}  # fmt: skip


_LAUNCH = "start one process per device with torchrun or fullshard launch, and call the function"
_LOADER = "use fullshard.spmd.ShardedLoader(loader, input_sharding=…)"
_PROFILER = "use torch.profiler"
_METRICS = f"{_COMPILED}; model.meter counts what FSDPv2 sends"
_SUMMARY = "use torch.utils.tensorboard.SummaryWriter"
_STANDARD = "use Python's standard library"

MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "torch_xla": (
        "torch_xla",
        {
            "device": "use xm.xla_device()",
            **dict.fromkeys(("devices", "real_devices"), "xm.xla_device() is this process's only device"),
            "device_count": "use xr.global_runtime_device_count()",
            "sync": "not needed: operators run at once; xr.sync(wait=True) waits for the device",
            "step": "not needed: operators run at once",
            "compile": "use torch.compile, or model.compile_units() of FSDPv2",
            "manual_seed": "use xr.seed(n)",
            "launch": _LAUNCH,
            "set_custom_compile_options": _COMPILED,
        },
    ),
    "xmp": (
        "torch_xla.distributed.xla_multiprocessing",
        {
            "spawn": _LAUNCH,
            "MpModelWrapper": "each process makes the model; FSDPv2 or mark_sharding leave it a shard",
            "MpSerialExecutor": "use xm.do_on_ordinals",
            **dict.fromkeys(
                ("create_optimized_replica_groups", "device_kind_handler_dict"), "groups follow from the axes of a mesh"
            ),
        },
    ),
    "pl": (
        "torch_xla.distributed.parallel_loader",
        dict.fromkeys(("MpDeviceLoader", "ParallelLoader", "PerDeviceLoader", "PerDeviceQueue"), _LOADER),
    ),
    "met": (
        "torch_xla.debug.metrics",
        dict.fromkeys(
            ("metrics_report", "short_metrics_report", "metric_names", "metric_data", "counter_names", "counter_value",
             "clear_all", "clear_counters", "clear_metrics", "executed_fallback_ops"),
            _METRICS,
        ),
    ),
    "xp": (
        "torch_xla.debug.profiler",
        dict.fromkeys(
            ("Trace", "StepTrace", "trace", "trace_detached", "trace_me", "start_trace", "stop_trace", "start_server",
             "set_tracer_marked_step", "get_tracer_marked_step"),
            _PROFILER,
        ),
    ),
    "test_utils": (
        "torch_xla.test.test_utils",
        {
            **dict.fromkeys(("get_summary_writer", "write_to_summary", "close_summary_writer"), _SUMMARY),
            **dict.fromkeys(("print_training_update", "print_test_update"), "use xr.print0"),
            "now": "use time.strftime",
            "mp_test": "use multiprocessing.Process",
        },
    ),
    "xu": (
        "torch_xla.utils.utils",
        {
            **dict.fromkeys(
                ("SampleGenerator", "FnDataGenerator"), "any iterable of batches is a loader, such as [batch] * steps"
            ),
            "DataWrapper": "xs.ShardedLoader takes batches of any nesting",
            **dict.fromkeys(
                ("Cleaner", "LazyProperty", "TimedScope", "TmpFolder", "as_list", "check_env_flag", "eprint",
                 "flatten_nested_tuple", "for_each_instance", "for_each_instance_rewrite", "get_free_tcp_ports",
                 "get_print_fn", "getenv_as", "list_copy_append", "null_print", "parallel_work", "shape", "timed"),
                _STANDARD,
            ),
        },
    ),
}  # fmt: skip
"""Modules of PyTorch/XLA's guides and examples without a counterpart, under the names that those import them by: what
each is there, and the replacements of its names."""


def find_guide_name(module: str, known_as: str, name: str) -> Any:
    """The `__getattr__` of a module: PyTorch/XLA's own object on its engine, else an error."""
    instead = (MODULES[known_as][1] if known_as in MODULES else REFUSED[known_as]).get(name)
    if instead is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return engines.current().guide_name(module, known_as, name, instead)


class ModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `MODULES`, whose names are all refused, as submodules of fullshard."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of `MODULES`; None for any other."""
        package, _, name = fullname.partition(".")
        return importlib.machinery.ModuleSpec(fullname, self) if package == "fullshard" and name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Let the module refuse its names by name."""
        known_as = module.__name__.rpartition(".")[2]
        vars(module)["__getattr__"] = functools.partial(find_guide_name, module.__name__, known_as)


def install() -> None:
    """Let `MODULES` be imported; safe to call more than once."""
    if not any(isinstance(finder, ModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(ModuleFinder())
