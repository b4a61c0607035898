"""Memory and communication of one training step, measured at the boundaries of units and written to `step.json`.

Nothing waits for the device: the allocator's numbers are those of the host. On CPUs torch does not count what it
allocates, so only what the engine and the optimizer hold is recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fullshard import accelerator, runtime
from fullshard.errors import first_line
from fullshard.fsdp.gradients import held_by_no_sync
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.paths import replace_text
from fullshard.reporting.records import STEP_FILE
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import local_of

MEASURED = 3
"""The step that is measured, counted from the start: by then the optimizer has its state."""
PARTS = ("shards", "gathered", "gradients", "optimizer", "other")


class StepRecord:
    """Measures one step of this rank. A callback of the run, on the first rank only."""

    def __init__(self, folder: Path, model: Any, optimizer: Any) -> None:
        self.folder, self.engine, self.optimizer = folder, model._fullshard_engine, optimizer
        self.device = runtime.device()
        self.counts_all = accelerator.is_accelerator(self.device)
        """Whether torch counts what it allocates."""
        self.parameters: list[ShardedParameter] = [p for unit in self.engine.units for p in unit.parameters]
        self._left = MEASURED
        self._last: int | None = None
        self._timeline: dict[str, list[Any]] = {}
        self._moment = "forward"
        self._sent: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._held = dict.fromkeys(PARTS, 0)

    # --- events of the run ------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._left, self._last = MEASURED, state.max_steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._left -= 1
        if self._left == 0 or (self._left > 0 and state.global_step + 1 == self._last):
            self._left = 0
            self._try(self._begin)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if self.is_measuring:
            self._try(lambda: self._note("optimizer step", ""))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if self.is_measuring:
            self._try(lambda: self._note("optimizer step", ""))

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if self.is_measuring:
            self.engine.means.meter.observer = None
            self._try(lambda: self._write(state.global_step))

    # --- measuring --------------------------------------------------------------------------------------------------

    @property
    def is_measuring(self) -> bool:
        return self.engine.means.meter.observer is not None

    def _try(self, act: Callable[[], None]) -> None:
        """Measure, or stop measuring: a run does not fail, or make other ranks wait, because of its report."""
        try:
            act()
        except Exception as error:
            self.engine.means.meter.observer = None
            runtime.get_logger().warning("%s is not written: %s", STEP_FILE, first_line(error))

    def _begin(self) -> None:
        meter = self.engine.means.meter
        self._moment = "forward"
        self._timeline = {name: [] for name in ("moment", "unit", "operation", *PARTS)}
        self._sent = Counter(meter.gather_sent), Counter(meter.reduce_sent)
        self._held["shards"] = self._bytes(p.local for p in self.parameters)
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

    def _note(self, moment: str, unit: str, operation: str = "") -> None:
        held = self._held
        held["gathered"] = self.engine.means.meter.live
        held["gradients"] = self._bytes(self._gradients())
        held["optimizer"] = self._bytes(self._optimizer_tensors())
        if self.counts_all:
            known = sum(size for name, size in held.items() if name != "other")
            held["other"] = max(0, accelerator.allocated_memory(self.device) - known)
        for name, value in {"moment": moment, "unit": unit, "operation": operation, **held}.items():
            self._timeline[name].append(value)

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of those tensors that are on this rank's device."""
        local = (local_of(t) if is_sharded(t) else t for t in tensors)
        return sum(t.numel() * t.element_size() for t in local if t.device.type == self.device.type)

    def _gradients(self) -> Iterable[torch.Tensor]:
        for p in self.parameters:
            held = held_by_no_sync(p)
            found = (held.term, held.base) if held is not None else (p.shard.grad,)
            leaves = (leaf.grad for leaf in (p.full, p.full_global) if leaf is not None)
            yield from (grad for grad in (*found, *leaves) if grad is not None)

    def _optimizer_tensors(self) -> Iterable[torch.Tensor]:
        states = getattr(self.optimizer, "state", {}).values()
        yield from (t for one in states if isinstance(one, dict) for t in one.values() if torch.is_tensor(t))

    def _write(self, step: int) -> None:
        meter, (gathered, reduced) = self.engine.means.meter, self._sent
        units = {
            unit.name: {
                "gather_sent": meter.gather_sent[unit.name] - gathered[unit.name],
                "reduce_sent": meter.reduce_sent[unit.name] - reduced[unit.name],
            }
            for unit in self.engine.units
        }
        found = {"step": step, "counted": not self.counts_all, "timeline": self._timeline, "units": units}
        replace_text(self.folder / STEP_FILE, json.dumps(found))
