"""Whether a run fits on a machine, because of what, and what would have to change: values, and the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import ConfigError
from fullshard.planner.machines import Machine
from fullshard.planner.memory import MemoryEstimate, StateMemory

ERROR_BOUND = 0.05
"""How far an estimate of allocated memory may be from the truth. A run is stopped only beyond it."""
MOMENTS = {
    "load": "while weights are loaded", "forward": "in the forward pass", "loss": "while the loss is computed",
    "backward": "in the backward pass", "optimizer step": "in the optimizer step", "evaluation": "in evaluations",
    "save": "while a checkpoint is saved",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A change of settings, priced like the run itself."""

    words: str
    """The change in words."""
    settings: dict[str, Any]
    """The options that change, by name, with their new values: of the run, the launcher or the machine."""
    needs: int
    """Device memory that the run then needs, in bytes."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits, and why. All sizes are bytes."""

    fits: bool | None
    """None where it is unknown: the model's activations cannot be traced, and the rest fits."""
    needs: int
    """Device memory that the run needs: the peak of torch's allocations, and what is reserved beside it."""
    has: int
    """Device memory of the machine."""
    needs_host: int
    """Host memory that the ranks of a node need."""
    has_host: int
    moment: str
    """The moment of the peak."""
    parts: dict[str, int] = field(default_factory=dict)
    """Memory at that moment by part, the largest first."""
    untraced: str = ""
    """Why the model's activations cannot be traced; then sizes and parts leave them out."""
    changes: tuple[Change, ...] = ()
    """The smallest changes that would make it fit: one that costs time alone; or the fewest more devices, what is much
    slower, and what trains something else, as far as there are any."""
    tried: int = 0
    """How many changes were tried."""

    @property
    def certain(self) -> bool:
        """Whether everything that a step needs is counted."""
        return not self.untraced

    @property
    def device_fits(self) -> bool:
        """Whether device memory is enough."""
        return self.needs <= self.has

    @property
    def host_fits(self) -> bool:
        """Whether host memory is enough."""
        return self.needs_host <= self.has_host

    @property
    def when(self) -> str:
        """The moment of the peak, in words."""
        return MOMENTS.get(self.moment, self.moment)

    @property
    def largest_parts(self) -> str:
        """The three largest parts of the peak, in words."""
        return ", ".join(f"{part} {memory_size(count)}" for part, count in list(self.parts.items())[:3] if count)

    @property
    def what_is_short(self) -> str:
        """Which memory is not enough, and what fills it."""
        return f"device memory {self.when}: {self.largest_parts}" if not self.device_fits else "host memory"

    def sentences(self) -> list[str]:
        """The verdict in plain words: fits or not and by how much, because of what, and what would help."""
        if self.fits is None:
            unknown = "Unknown: the activations of this model cannot be traced, so what a step needs is not known."
            return [unknown, self.untraced, *self._known_parts()]
        if self.untraced:
            least = self._outcome().replace(" needs ", " needs, activations aside, ")
            return [least, self.untraced, *self._known_parts()]
        return [self._outcome(), *self._reason(), *self._advice()]

    def _known_parts(self) -> list[str]:
        parts = ", ".join(f"{part} {memory_size(size)}" for part, size in self.parts.items() if size)
        return [f"Known for each device: {parts}."] if parts else []

    def _outcome(self) -> str:
        needs, has, apart = (memory_size(n) for n in (self.needs, self.has, abs(self.has - self.needs)))
        if not self.device_fits:
            return f"Does not fit: each device needs {needs} and has {has}, {apart} too little."
        if not self.host_fits:
            lacks = memory_size(self.needs_host - self.has_host)
            return (
                f"Does not fit: each node needs {memory_size(self.needs_host)} of host memory and has "
                f"{memory_size(self.has_host)}, {lacks} too little. Device memory fits: {needs} of {has}."
            )
        return f"Fits: each device needs {needs} of {has}, {apart} to spare ({1 - self.needs / self.has:.0%})."

    def _reason(self) -> list[str]:
        return [f"The peak is {self.when}: {largest}."] if (largest := self.largest_parts) else []

    def _advice(self) -> list[str]:
        if self.fits:
            return []
        if not self.changes:
            return [f"None of {self.tried} changes that were tried is enough."] if self.tried else []
        more = [change for change in self.changes if "num_processes" in change.settings]
        here = [change for change in self.changes if change not in more]
        return [
            *_sentence("Smallest change that fits", more or here),
            *_sentence("Without more devices", more and here),
        ]


def _sentence(start: str, changes: Sequence[Change]) -> list[str]:
    """Changes, one of which is enough."""
    words = [f"{change.words} ({memory_size(change.needs)} per device)" for change in changes]
    return [f"{start}: {', or '.join(words)}."] if words else []


def judge(memory: MemoryEstimate, machine: Machine, untraced: str = "") -> Verdict:
    """Whether memory that a run needs is there. `untraced` says why activations are not counted, where they are not."""
    moment = memory.peak_moment
    parts: Sequence[tuple[str, int]] = sorted(memory.moments.get(moment, {}).items(), key=lambda item: -item[1])
    if untraced:
        parts = list(asdict(memory.state).items())
    needs, host = memory.device, memory.host_total
    enough = needs <= machine.device_memory and host <= machine.host_memory
    fits = False if not enough else None if untraced else True
    return Verdict(fits, needs, machine.device_memory, host, machine.host_memory, moment, dict(parts), untraced)


def cannot_fit(memory: MemoryEstimate, machine: Machine) -> bool:
    """Whether a run certainly does not fit: torch's allocations alone, less the error of their estimate, are more than
    the device has. What is reserved beside them does not count: a run may do with less."""
    return memory.peak * (1 - ERROR_BOUND) > machine.device_memory


def check_state(state: StateMemory, has: int, where: str) -> None:
    """Refuse a run that cannot fit whatever its batches are: `has` are the bytes that a rank can use, `where` names the
    kind of memory."""
    if state.total > has:
        raise ConfigError(
            f"the model does not fit: each rank needs at least {memory_size(state.total)} of {where} (shards "
            f"{memory_size(state.shards)}, gradients {memory_size(state.gradients)}, optimizer "
            f"{memory_size(state.optimizer)}), but has {memory_size(has)}. "
            f"Use more ranks, use_peft_lora, a sharded strategy, optim adamw_8bit, or fsdp_offload_params."
        )
