"""Methods of torch's FSDP 1 (`FullyShardedDataParallel`) and FSDP 2 (`fully_shard`), on wrapped modules.

Those with the same name and meaning here are `FSDPv2`'s own. This file has the others: what can be served is served,
what only directs torch's engine has no effect and says so, and the rest is refused with what to use.
`tests/fsdp/test_torch_methods.py` walks through all that torch has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fullshard.config.errors import FSDPError
from fullshard.distributed import runtime
from fullshard.fsdp.engine import Engine
from fullshard.fsdp.unit import Unit
from fullshard.fsdp.wrapped_module import WrappedModule

_OPTIMIZER_STATE = (
    "use torch.distributed.checkpoint.state_dict.get_optimizer_state_dict and set_optimizer_state_dict, or "
    "fullshard.save_state and load_state"
)
_COLLECTIVES = "the engine has its own collectives, chosen by device; measure them with model.meter"
REFUSED = {
    **dict.fromkeys(
        ("optim_state_dict", "optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict",
         "scatter_full_optim_state_dict", "shard_full_optim_state_dict", "flatten_sharded_optim_state_dict",
         "rekey_optim_state_dict"),
        _OPTIMIZER_STATE,
    ),
    "register_comm_hook": "use p.register_hook(…), which gets each gradient summed over the ranks",
    "set_all_reduce_hook": "use p.register_post_accumulate_grad_hook(…), which runs when a gradient is summed",
    **dict.fromkeys(("set_custom_all_gather", "set_custom_reduce_scatter"), _COLLECTIVES),
    **dict.fromkeys(
        ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"),
        "gradients are averaged over the ranks; scale the loss instead",
    ),
}  # fmt: skip
"""Methods that raise an error, and what to use."""
WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
        "the engine gathers ahead by itself, in the order of the last pass (forward_prefetch, backward_prefetch, "
        "gathers_in_flight)",
    ),
    "set_is_last_backward": "every backward ends with its gradients reduced, unless no_sync() holds them back",
    "set_unshard_in_backward": "units are gathered for their backward where the strategy does so",
    "set_post_optim_event": "the next pass waits for the optimizer by itself",
    "set_reduce_scatter_unused_params": "parameters without a gradient on this rank always take part",
    "set_reduce_scatter_max_input_buffers": "one unit's gradients are reduced while the next one's are computed",
    "set_separate_reduce_scatter_group": "gathers and reductions have communicators of their own",
    **dict.fromkeys(
        ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm",
         "set_force_sum_reduction_for_comms"),
        _COLLECTIVES,
    ),
}  # fmt: skip
"""Methods that change nothing here, and why."""


class UnshardHandle:
    """The gather of a unit that `unshard(async_op=True)` has started."""

    def __init__(self, wait: Callable[[], None]):
        self.wait = wait


class TorchMethods(WrappedModule):
    """What a wrapped module has of torch's methods, on the torch engine. Those of FSDP 1 that are static there may be
    called on the class, with any module around wrapped ones: `FSDPv2.state_dict_type(model, …)`."""

    _fullshard_engine: Engine
    _fullshard_unit: Unit

    # --- FSDP 2 -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit before its forward; until then its parameters are whole, to be read. With
        `async_op`, only start: the returned handle waits. Units inside are not gathered."""
        engine, unit = self._fullshard_engine, self._fullshard_unit
        engine.start_unshard(unit)
        handle = UnshardHandle(lambda: engine.unshard(unit))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's own unit."""
        self._fullshard_engine.reshard([self._fullshard_unit])

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes from now on reduce gradients, as with `no_sync()`. For the whole model only."""
        if not recurse or not self.check_is_root():
            raise FSDPError(
                "set_requires_gradient_sync: gradients of a model are held back together; call it on the outermost "
                "wrapped module, with recurse=True"
            )
        self._fullshard_engine.sync = bool(requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after forward, or kept until backward."""
        inside = set(self.modules()) if recurse else {self}  # type: ignore[attr-defined]
        for unit in self._fullshard_engine.units:
            if unit.module in inside:
                unit.keeps_after_forward = not reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Nothing: gathered parameters are always freed after backward, so False is refused."""
        if not reshard_after_backward:
            raise FSDPError(
                "set_reshard_after_backward(False): gathered parameters are freed after every backward; "
                "strategy='SHARD_GRAD_OP' gathers once per micro-batch"
            )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Nothing: gradients are always summed over the replicas, so False is refused."""
        if not requires_all_reduce:
            raise FSDPError(
                "set_requires_all_reduce(False): gradients are summed over shards and replicas together; use no_sync() "
                "for all micro-batches but the last"
            )

    def reset_iter_state(self) -> None:
        """Recover from an exception inside a pass. The next forward does so too."""
        self._fullshard_engine.reset()

    # --- FSDP 1 -----------------------------------------------------------------------------------------------------

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapped module."""
        return self._fullshard_engine.units[0].module is self

    def fsdp_modules(self, root_only: bool = False) -> list[Any]:
        """The wrapped modules in this one, itself included; with `root_only` the outermost ones."""
        return wrapped_modules(self, root_only)

    def set_state_dict_type(
        self, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Any:
        """What `state_dict()` returns from now on: sharded values, or whole ones. Returns the settings before."""
        from torch.distributed.fsdp import StateDictSettings, StateDictType, api

        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise FSDPError(
                "StateDictType.LOCAL_STATE_DICT: shards have no flat parameters; use SHARDED_STATE_DICT, the default"
            )
        whole = state_dict_type is StateDictType.FULL_STATE_DICT
        config = state_dict_config or (api.FullStateDictConfig if whole else api.ShardedStateDictConfig)()
        optimizer = (
            optim_state_dict_config or (api.FullOptimStateDictConfig if whole else api.ShardedOptimStateDictConfig)()
        )
        before = TorchMethods.get_state_dict_type(self)
        for root in wrapped_roots(self):
            root._fullshard_engine.state_dict_settings = StateDictSettings(state_dict_type, config, optimizer)
        return before

    def get_state_dict_type(self) -> Any:
        """The settings of `set_state_dict_type`."""
        from torch.distributed.fsdp import StateDictSettings, StateDictType, api

        return wrapped_roots(self)[0]._fullshard_engine.state_dict_settings or StateDictSettings(
            StateDictType.SHARDED_STATE_DICT, api.ShardedStateDictConfig(), api.ShardedOptimStateDictConfig()
        )

    @contextlib.contextmanager
    def state_dict_type(
        self, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Iterator[None]:
        """`set_state_dict_type` inside; the settings before are restored."""
        before = TorchMethods.set_state_dict_type(self, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for root in wrapped_roots(self):
                root._fullshard_engine.state_dict_settings = before


SERVED = tuple(name for name in vars(TorchMethods) if not name.startswith("_"))
"""Methods that are served on the torch engine."""


def wrapped_modules(module: Any, root_only: bool) -> list[Any]:
    """The modules inside that are wrapped, `module` included; with `root_only` those that are in no other one."""
    wrapped = [m for m in module.modules() if isinstance(m, TorchMethods)]
    inside = {below for m in wrapped for below in m.modules() if below is not m} if root_only else set()  # type: ignore[attr-defined]
    return [m for m in wrapped if m not in inside]


def wrapped_roots(module: Any) -> list[Any]:
    """The outermost wrapped modules inside, `module` included; an error without any."""
    if not (roots := wrapped_modules(module, root_only=True)):
        raise FSDPError(f"no module in this {type(module).__name__} is wrapped by FSDPv2; wrap it first")
    return roots


def refuse_methods(cls: type[WrappedModule], instead: Mapping[str, str]) -> None:
    """Give a class methods of torch's FSDP that raise an error with what to use."""

    def refused(name: str, text: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise FSDPError(f"{name}() of torch's FSDP is not served by FSDPv2: {text}")

        return refuse

    for name, text in instead.items():
        setattr(cls, name, refused(name, text))


def _without_effect(name: str, why: str) -> Callable[..., Any]:
    def nothing(*_: Any, **__: Any) -> None:
        runtime.warn_once(f"fsdp-{name}", f"{name}() of torch's FSDP has no effect on FSDPv2: {why}")

    return nothing


refuse_methods(WrappedModule, REFUSED)
for _name, _why in WITHOUT_EFFECT.items():
    setattr(WrappedModule, _name, _without_effect(_name, _why))
