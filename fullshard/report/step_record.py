"""Memory and communication of one training step, measured at the boundaries of units and written to `step.json`.

Nothing waits for the device, and torch's peaks are not reset, which scripts read: recorded is what is allocated at the
boundaries. On CPUs torch does not count what it allocates, so only what the engine and the optimizer hold is recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fullshard.config.errors import first_line
from fullshard.config.paths import replace_text
from fullshard.device import accelerator
from fullshard.device.torch_private import local_of
from fullshard.distributed import engines, runtime
from fullshard.fsdp.gradients import unreduced_gradient
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.report.records import STEP_FILE
from fullshard.spmd.tensor import is_sharded

MEASURED = 4
"""The first step that may be measured, counted from the start: the optimizer has its state, layers are compiled."""
WARM_UP = 3
"""Steps in which programs are compiled as a matter of course: the first makes the optimizer's state."""
COUNTERS = ("gathers", "gather_sent", "reduces", "reduce_sent", "tokens_sent")
"""What the engine counts by unit."""
PARTS = ("shards", "gathered", "gradients", "optimizer", "other")


class StepRecord:
    """Measures one step of this rank. A callback of the run, on the first rank only."""

    def __init__(self, folder: Path, model: Any, optimizer: Any, is_settled: Callable[[], bool]) -> None:
        self.folder, self.optimizer, self.is_settled = folder, optimizer, is_settled
        """`is_settled`: whether what layers keep for backward no longer changes."""
        self.engine = model._fullshard_engine
        self.device = runtime.device()
        self.counts_all = accelerator.is_accelerator(self.device)
        """Whether torch counts what it allocates."""
        self.parameters: list[ShardedParameter] = [p for unit in self.engine.units for p in unit.parameters]
        self._steps, self._last, self._done = 0, 0, False
        """The steps begun here, the number of the last one, and whether one was measured."""
        self._timeline: dict[str, list[Any]] = {}
        self._moment = "forward"
        self._before: dict[str, Counter[str]] = {}
        self._sizes = dict.fromkeys(PARTS, 0)

    # --- events of the run ------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Forget what an earlier training has measured."""
        self._steps, self._last, self._done = 0, state.max_steps, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Begin to measure, if it is time."""
        self._steps += 1
        usual = self._steps >= MEASURED and self.is_settled()
        if not self._done and (usual or state.global_step + 1 == self._last):
            self._done = True
            self._try(self._begin)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Measure before the update."""
        if self.is_measuring:
            self._try(lambda: self._note("optimizer step", ""))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Measure after the update."""
        if self.is_measuring:
            self._try(self._updated)

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Write the record."""
        if self.is_measuring:
            self._try(lambda: self._write(state.global_step))
            self.engine.context.meter.observer = None

    # --- measuring --------------------------------------------------------------------------------------------------

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is measured."""
        return self.engine.context.meter.observer is not None

    def _try(self, act: Callable[[], None]) -> None:
        """Measure, or stop measuring: a run does not fail, or make other ranks wait, because of its report."""
        try:
            act()
        except Exception as error:
            self.engine.context.meter.observer = None
            runtime.get_logger().warning("%s is not written: %s", STEP_FILE, first_line(error))

    def _begin(self) -> None:
        meter = self.engine.context.meter
        self._moment = "forward"
        self._timeline = {name: [] for name in ("moment", "unit", "operation", *PARTS)}
        self._before = {name: Counter(getattr(meter, name)) for name in COUNTERS}
        self._sizes["shards"] = self._bytes(p.local for p in self.parameters)
        self._sizes["optimizer"] = self._bytes(self._optimizer_tensors())
        meter.observer = lambda unit, operation: self._try(lambda: self._observe(unit, operation))

    def _observe(self, unit: str, operation: str) -> None:
        """The engine is at this place. Forward runs again in backward, so the moment follows from what came before."""
        if operation == "after forward":
            self._moment = "loss"
        elif self._moment == "loss":
            self._moment = "backward"
        self._note(self._moment, unit, operation)
        if operation == "after backward":
            self._moment = "forward"

    def _updated(self) -> None:
        self._sizes["optimizer"] = self._bytes(self._optimizer_tensors())
        self._note("optimizer step", "")

    def _note(self, moment: str, unit: str, operation: str = "") -> None:
        sizes = self._sizes
        sizes["gathered"] = self.engine.context.meter.live
        sizes["gradients"] = self._bytes(self._gradients())
        if self.counts_all:
            counted = sum(size for name, size in sizes.items() if name != "other")
            sizes["other"] = max(0, accelerator.allocated_memory(self.device) - counted)
        for name, value in {"moment": moment, "unit": unit, "operation": operation, **sizes}.items():
            self._timeline[name].append(value)

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of those tensors that are on this rank's device."""
        local = (local_of(t) if is_sharded(t) else t for t in tensors)
        return sum(t.numel() * t.element_size() for t in local if t.device.type == self.device.type)

    def _gradients(self) -> Iterable[torch.Tensor]:
        for p in self.parameters:
            unsynced = unreduced_gradient(p)
            own = (unsynced.term, unsynced.base) if unsynced is not None else (p.shard.grad,)
            leaves = (leaf.grad for leaf in (p.full, p.full_global) if leaf is not None)
            yield from (grad for grad in (*own, *leaves) if grad is not None)

    def _optimizer_tensors(self) -> Iterable[torch.Tensor]:
        states = getattr(self.optimizer, "state", {}).values()
        yield from (t for one in states if isinstance(one, dict) for t in one.values() if torch.is_tensor(t))

    def _write(self, step: int) -> None:
        meter = self.engine.context.meter
        units = {
            unit.name: {
                name: getattr(meter, name)[unit.name] - before[unit.name] for name, before in self._before.items()
            }
            for unit in self.engine.units
        }
        record = {"step": step, "counted": not self.counts_all, "timeline": self._timeline, "units": units}
        replace_text(self.folder / STEP_FILE, json.dumps(record))


class CompileWatch:
    """Warns where a step after the first ones compiles another program. A callback of the run."""

    def __init__(self) -> None:
        self._steps, self._before = 0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Count the programs compiled before the step."""
        self._before = engines.current().compilations() or 0

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Warn of programs that the step has compiled."""
        self._steps += 1
        new = (engines.current().compilations() or 0) - self._before
        if self._steps > WARM_UP and new > 0:
            runtime.warn_once(
                "recompiled",
                f"step {state.global_step} compiled {new} new program(s), which takes long: batches or code differ "
                f"from those of the steps before",
            )


def step_watchers(folder: Path, model: Any, optimizer: Any, is_settled: Callable[[], bool]) -> list[Any]:
    """The callbacks of a run that watch its steps, on this rank; the arguments are those of `StepRecord`."""
    if engines.current().compiles_steps:
        return [CompileWatch()]
    return [StepRecord(folder, model, optimizer, is_settled)] if runtime.is_main() else []
