"""The names of PyTorch/XLA: those with a meaning have it, the others are refused by name, the page lists them all."""

import importlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard.config.errors import LayoutError, NameMissingError, UnsupportedError
from fullshard.distributed import guide_names
from fullshard.distributed.guide_names import REFUSED
from tests.pool import ranks

MODULES = {"xm": xm, "xr": xr, "xs": xs}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from.md"
PUBLIC = {
    "xm": """
        CoalescingBuckets DeviceContext MemoryInfo REDUCE_AND REDUCE_MAX REDUCE_MIN REDUCE_MUL REDUCE_OR REDUCE_SUM
        RateTracker ToXlaTensorArena XLA_LIB add_step_closure all_gather all_gather_bucketized all_reduce
        all_reduce_bucketized_gradients all_to_all broadcast_master_param check_view_sharing collective_broadcast
        collective_permute do_on_ordinals fork_rng get_local_ordinal get_memory_info get_rng_state get_stablehlo
        get_stablehlo_bytecode get_xla_supported_devices is_master_ordinal is_xla_tensor mark_step master_print
        mesh_reduce optimization_barrier_ optimizer_step recv reduce_gradients reduce_scatter
        reduce_scatter_bucketized rendezvous save send send_cpu_data_to_device set_replication set_rng_state unlazy
        wait_device_ops xla_device xla_device_hw xla_device_kind xla_real_devices xla_rendezvous
        xla_replication_devices""",
    "xr": """
        addressable_device_count addressable_runtime_device_count device_type get_master_ip
        get_num_cached_compilation_graph global_device_count global_ordinal global_runtime_device_attributes
        global_runtime_device_count host_index initialize_cache is_bf16_supported is_spmd local_device_count
        local_ordinal local_process_count process_count process_index runtime_device_attributes set_device_type
        use_spmd world_size""",
    "xs": """
        EinsumLinear HybridMesh MarkShardingFunction Mesh PartitionSpec ShardingSpec ShardingType XLAPatchedLinear
        XLAShard XLAShardedTensor annotate_custom_sharding aot_mark_sharding_fake
        apply_backward_optimization_barrier apply_xla_patch_to_nn_linear auto_policy clear_sharding
        construct_v1_sharding_str convert_to_xla_mesh convert_to_xla_partition_spec disable_manual_sharding
        enable_manual_sharding get_1d_mesh get_global_mesh mark_sharding mark_sharding_with_gradients
        set_global_mesh shard_as unwrap_sharded_tensor visualize_sharding visualize_tensor_sharding with_xla
        wrap_as_sharded_tensor wrap_if_sharded xla_distribute_module xla_distribute_tensor
        xla_patched_nn_linear_forward""",
    "xmp": """
        MpModelWrapper MpSerialExecutor create_optimized_replica_groups device_kind_handler_dict spawn""",
    "pl": """
        MpDeviceLoader ParallelLoader PerDeviceLoader PerDeviceQueue""",
    "test_utils": """
        close_summary_writer get_summary_writer mp_test now print_test_update print_training_update write_to_summary""",
    "torch_xla": """
        compile device device_count devices launch manual_seed real_devices set_custom_compile_options step sync""",
    "met": """
        clear_all clear_counters clear_metrics counter_names counter_value executed_fallback_ops metric_data
        metric_names metrics_report short_metrics_report""",
    "xp": """
        StepTrace Trace get_tracer_marked_step set_tracer_marked_step start_server start_trace stop_trace trace
        trace_detached trace_me""",
    "xu": """
        Cleaner DataWrapper FnDataGenerator LazyProperty SampleGenerator TimedScope TmpFolder as_list check_env_flag
        eprint flatten_nested_tuple for_each_instance for_each_instance_rewrite get_free_tcp_ports get_print_fn
        getenv_as list_copy_append null_print parallel_work shape timed""",
}
"""Every public function and class of PyTorch/XLA's modules, in 2.9.0 and in its main branch of April 2026."""
XR_NAMES = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "device_type",
    "get_master_ip",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "use_spmd",
    "world_size",
]


@pytest.mark.parametrize("known_as", REFUSED)
def test_names_without_a_meaning_are_refused_by_name(known_as):
    module = MODULES[known_as]
    for name, instead in REFUSED[known_as].items():
        assert not hasattr(module, name)
        with pytest.raises(
            NameMissingError, match=re.escape(f"{known_as}.{name} is not in {module.__name__}: {instead}")
        ):
            getattr(module, name)
    assert not hasattr(module, "no_such_name")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'") as caught:
        module.no_such_name  # noqa: B018
    assert not isinstance(caught.value, NameMissingError)


@pytest.mark.parametrize("known_as", PUBLIC)
def test_every_public_name_is_served_or_refused_by_name(known_as):
    module = MODULES.get(known_as) or importlib.import_module(f"fullshard.{known_as}")
    for name in PUBLIC[known_as].split():
        if not hasattr(module, name):
            with pytest.raises(NameMissingError, match=rf"PyTorch/XLA's {known_as}\.{name} is not in fullshard"):
                getattr(module, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'") as caught:
        module.no_such_name  # noqa: B018
    assert not isinstance(caught.value, NameMissingError)


def test_modules_without_a_counterpart_are_imported_either_way():
    import fullshard.pl as pl
    from fullshard import xmp

    with pytest.raises(NameMissingError, match=r"pl.MpDeviceLoader is not in fullshard.pl: .*ShardedLoader"):
        pl.MpDeviceLoader([], "xla")
    with pytest.raises(NameMissingError, match=r"xmp.spawn is not in fullshard.xmp: start one process per device"):
        xmp.spawn(print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fullshard.no_such_module")


def test_rates(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(xm.time, "time", lambda: now[0])
    tracker = xm.RateTracker(smooth_factor=0.25)
    assert tracker.rate() == tracker.global_rate() == 0.0
    tracker.add(6)
    now[0] += 2
    assert tracker.rate() == 3.0
    tracker.add(14)
    now[0] += 2
    assert tracker.rate() == 0.25 * 3 + 0.75 * 7 and tracker.global_rate() == 5.0
    monkeypatch.setenv("RATE_TRACKER_SMOOTHING", "0.5")
    assert xm.RateTracker().smooth_factor == 0.5


def test_the_page_lists_every_name():
    text = PAGE.read_text()
    names = {f"xm.{n}" for n in xm.__all__} | {f"xr.{n}" for n in XR_NAMES}
    names |= {f"{known_as}.{n}" for known_as, refused in REFUSED.items() for n in refused}
    names |= {f"{known_as}.{n}" for known_as, (_, refused) in guide_names.MODULES.items() for n in refused}
    names |= {f"xs.{n}" for n in xs.__all__ if n in vars(xs)}
    lacking = sorted(n for n in names if not re.search(rf"\b{re.escape(n)}\b", text))
    assert not lacking, lacking


@ranks(2)
def test_who_and_where():
    me = xr.rank()
    assert (xr.local_ordinal(), xr.global_ordinal(), xm.get_ordinal(), xm.get_local_ordinal()) == (me,) * 4
    assert (xr.local_device_count(), xr.local_process_count(), xm.xrt_world_size(), xr.world_size()) == (2,) * 4
    assert xr.addressable_device_count() == 1 and xr.device_type() == "CPU" and xr.host_index() == 0
    assert xm.is_master_ordinal() == xm.is_master_ordinal(local=False) == (me == 0)
    assert xm.xla_device_hw(xm.xla_device()) == "CPU" and xm.get_xla_supported_devices() == ["cpu"]
    with pytest.raises(UnsupportedError, match=r"xla_device\(1\): a process uses one device"):
        xm.xla_device(1)
    with pytest.raises(UnsupportedError, match=r"get_memory_info.*device is cpu"):
        xm.get_memory_info()
    xr.initialize_cache("somewhere")
    xm.mark_step(wait=True)
    xm.unlazy([torch.ones(2)])


@ranks(2)
def test_between_ranks():
    me = xr.rank()
    assert xm.rendezvous("here", bytes([me])) == [b"\0", b"\1"]
    with pytest.raises(UnsupportedError, match=r"replicas=\[1\]"):
        xm.rendezvous("here", replicas=[1])
    assert torch.equal(xm.mesh_reduce("loss", torch.tensor(me), torch.stack), torch.tensor([0, 1]))
    assert xm.do_on_ordinals(lambda t: t + 1, (torch.tensor(me),), (1,)) == (2 if me else None)
    seen = []
    xm.add_step_closure(seen.append, (me,))
    assert seen == [me]
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(me + 1)
    xm.broadcast_master_param(model)
    assert model.weight.unique().tolist() == [1.0]
    printed = io.StringIO()
    xm.master_print("said", "once", fd=printed)
    assert printed.getvalue() == ("said once\n" if me == 0 else "")


@ranks(2)
def test_a_sharded_model_is_stepped_and_saved_whole(tmp_path):
    paths = [str(tmp_path / "model.pt")]
    torch.distributed.broadcast_object_list(paths)
    torch.manual_seed(3)
    plain, model = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    mesh = xs.get_1d_mesh("model")
    xs.mark_sharding(model.weight, mesh, ("model", None))
    xs.distribute_module(model, mesh)
    x = torch.randn(3, 4)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(x).square().mean().backward()
        xm.optimizer_step(optimizer, barrier=True)
    xm.save({"model": model.state_dict(), "step": 3}, paths[0])
    saved = torch.load(paths[0])
    assert saved["step"] == 3
    for name, value in plain.state_dict().items():
        assert type(saved["model"][name]) is torch.Tensor
        torch.testing.assert_close(saved["model"][name], value)


@ranks(4)
def test_kinds_of_sharding():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    for spec, kind in [
        ((None, None), xs.ShardingType.REPLICATED),
        (("data", None), xs.ShardingType.PARTIAL),
        (("data", "model"), xs.ShardingType.TILED),
        ((("data", "model"), None), xs.ShardingType.TILED),
    ]:
        t = torch.zeros(4, 4)
        assert xs.mark_sharding(t, mesh, spec).sharding_type == kind == t.sharding_type
        assert isinstance(t, xs.XLAShardedTensor) and isinstance(t.local_shards[0], xs.XLAShard)
    assert xs.wrap_if_sharded(t) is t.global_tensor is xs.unwrap_sharded_tensor(t)
    assert xs.annotate_custom_sharding(t, mesh, (None, "model")).sharding_spec == (None, "model")


@ranks(4)
def test_two_trees_are_laid_out_alike():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    value = torch.randn(4, 6)
    sharded = xs.mark_sharding(value.clone().requires_grad_(), mesh, ("data", None))
    plain = value.clone().requires_grad_()
    for a, b in ({"x": sharded}, {"x": plain}), ({"x": plain}, {"x": sharded}):
        one, other = xs.shard_as(a, b)
        assert one["x"].sharding_spec == other["x"].sharding_spec == ("data", None)
        (one["x"] * other["x"]).sum().backward()
    torch.testing.assert_close(plain.grad, 2 * value)
    torch.testing.assert_close(sharded.grad.full_tensor(), 2 * value)
    assert xs.shard_as(value, value)[0] is value
    with pytest.raises(LayoutError, match="different structures"):
        xs.shard_as([sharded], (sharded,))
    with pytest.raises(LayoutError, match=r"\(4, 6\) and \(6, 4\) cannot have the same layout"):
        xs.shard_as(sharded, value.T)
