"""Changes of settings that make a run need less memory, from the smallest to the largest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.capacity.estimate import Estimate
from fullshard.capacity.machines import MACHINES
from fullshard.capacity.verdict import Change
from fullshard.errors import UserError
from fullshard.optimizers.names import SERVED
from fullshard.train.plan_request import PlanRequest

WEIGHTS = frozenset({"shards", "gathered", "gradients", "optimizer", "buffers"})
"""Parts of memory that do not depend on the batch."""
ACTIVATIONS = frozenset({"activations", "logits"})
SMALL_OPTIMIZER = "adamw_8bit"
SMALL_CHUNK = 256
"""Tokens per chunk of the loss, the least that is chosen automatically."""
MOST_DEVICES = 64
"""How many times as many devices are tried at most."""


@dataclass(frozen=True)
class Variant:
    """A run with some settings changed."""

    request: PlanRequest
    words: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was changed, by option."""
    keeps: frozenset[str] = frozenset()
    """The parts of memory that the change leaves as they are."""


Lever = Callable[[PlanRequest], Iterator[Variant]]


def _run(request: PlanRequest, words: str, keeps: frozenset[str], **settings: Any) -> Variant:
    """A variant with other settings of the run."""
    config = dataclasses.replace(request.config, **settings)
    return Variant(dataclasses.replace(request, config=config), words, settings, keeps)


def smaller_batch(request: PlanRequest) -> Iterator[Variant]:
    """Smaller micro-batches, and more of them: the global batch stays."""
    rows, steps = request.config.per_device_train_batch_size, request.config.gradient_accumulation_steps
    while rows > 1 and rows % 2 == 0:
        rows, steps = rows // 2, steps * 2
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
        words = f"per_device_train_batch_size {rows} with gradient_accumulation_steps {steps}"
        yield _run(request, words, WEIGHTS, **settings)


def smaller_evaluation(request: PlanRequest) -> Iterator[Variant]:
    """Evaluations with batches no larger than those that are trained."""
    rows = request.config.per_device_train_batch_size
    if request.config.eval_strategy != "no" and request.config.per_device_eval_batch_size > rows:
        yield _run(request, f"per_device_eval_batch_size {rows}", WEIGHTS, per_device_eval_batch_size=rows)


def checkpointing(request: PlanRequest) -> Iterator[Variant]:
    """Recompute activations: as much as needed, or all."""
    given = request.config.gradient_checkpointing
    if request.engine.activation_checkpointing:
        return
    if given is False:
        yield _run(request, "gradient_checkpointing auto", WEIGHTS, gradient_checkpointing="auto")
    if given is not True:
        yield _run(request, "gradient_checkpointing true", WEIGHTS, gradient_checkpointing=True)


def activation_offload(request: PlanRequest) -> Iterator[Variant]:
    """Recompute, with the inputs of layers in host memory."""
    if not request.config.activation_offloading and not request.engine.activation_checkpointing:
        on = {"activation_offloading": True}
        if request.config.gradient_checkpointing is not True:
            on["gradient_checkpointing"] = True
        yield _run(request, " and ".join(f"{name} true" for name in sorted(on, reverse=True)), WEIGHTS, **on)


def loss_chunks(request: PlanRequest) -> Iterator[Variant]:
    """A loss that never has all logits in memory."""
    config = request.config
    if not config.chunked_loss:
        yield _run(request, "chunked_loss true", WEIGHTS, chunked_loss=True)
    elif config.loss_chunk_tokens == 0 or config.loss_chunk_tokens > SMALL_CHUNK:
        words = f"loss_chunk_tokens {SMALL_CHUNK}"
        yield _run(request, words, WEIGHTS, loss_chunk_tokens=SMALL_CHUNK)


def full_shard(request: PlanRequest) -> Iterator[Variant]:
    """Shards over all devices, gathered layer by layer."""
    if request.engine.strategy == "FULL_SHARD" or request.machine.num_processes == 1:
        return
    changes: dict[str, Any] = {
        "sharding_strategy": "FULL_SHARD", "reshard_after_forward": None, "dp_replicate_size": None,
        "dp_shard_size": None,
    }  # fmt: skip
    changed = dataclasses.replace(request, engine=dataclasses.replace(request.engine, **changes))
    settings = {"fsdp_sharding_strategy": "FULL_SHARD"}
    yield Variant(changed, "fsdp_sharding_strategy FULL_SHARD", settings, ACTIVATIONS)


def more_devices(request: PlanRequest) -> Iterator[Variant]:
    """Twice as many devices, and so on."""
    if request.engine.strategy == "NO_SHARD":
        return
    machine = request.machine
    count, usual = machine.num_processes, MACHINES.get(machine.name, machine).gpus_per_node
    while (count := count * 2) <= machine.num_processes * MOST_DEVICES:
        per_node = machine.gpus_per_node if machine.nodes > 1 else min(count, usual)
        if count % per_node == 0:
            larger = dataclasses.replace(machine, num_processes=count, gpus_per_node=per_node)
            words = f"{count} devices instead of {machine.num_processes}"
            yield Variant(dataclasses.replace(request, machine=larger), words, {"num_processes": count}, ACTIVATIONS)


def small_optimizer(request: PlanRequest) -> Iterator[Variant]:
    """Optimizer state in 8 bits."""
    if SERVED[request.config.optim].bits != 8:
        yield _run(request, f"optim {SMALL_OPTIMIZER}", (WEIGHTS - {"optimizer"}) | ACTIVATIONS, optim=SMALL_OPTIMIZER)


def adapters(request: PlanRequest) -> Iterator[Variant]:
    """Train an adapter instead of all weights; then over weights in 4 bits."""
    config = request.config
    nothing = frozenset[str]()
    if config.adapter_kind is None and request.adapter is None:
        yield _run(request, "use_peft_lora true", nothing, use_peft_lora=True)
        both = {"use_peft_lora": True, "use_4bit_quantization": True}
        yield _run(request, "use_peft_lora and use_4bit_quantization true (QLoRA)", nothing, **both)
    elif not config.use_4bit_quantization and config.base_dtype is None:
        words = "use_4bit_quantization true (QLoRA)"
        yield _run(request, words, nothing, use_4bit_quantization=True)


def offload_weights(request: PlanRequest) -> Iterator[Variant]:
    """Shards, gradients and optimizer state in host memory."""
    if not request.engine.offload_params and not request.machine.shares_host_memory:
        engine = dataclasses.replace(request.engine, offload_params=True)
        changed = dataclasses.replace(request, engine=engine)
        yield Variant(changed, "fsdp_offload_params true", {"fsdp_offload_params": True}, ACTIVATIONS)


def offload_embedding(request: PlanRequest) -> Iterator[Variant]:
    """A frozen embedding in host memory."""
    config = request.config
    trains_adapter = config.adapter_kind is not None or request.adapter is not None
    if trains_adapter and not config.offload_embedding and not request.machine.shares_host_memory:
        yield _run(request, "offload_embedding true", ACTIVATIONS, offload_embedding=True)


FREE: Sequence[Lever] = (smaller_evaluation, smaller_batch, checkpointing, activation_offload, loss_chunks, full_shard)
"""Levers that change nothing about the result, only time and memory."""
COSTLY: Sequence[Lever] = (small_optimizer, adapters, offload_weights, offload_embedding)
"""Levers that train something else, or take much longer. Both lists begin with what matters least."""


# --- the search -----------------------------------------------------------------------------------------------------

Price = Callable[[PlanRequest], Estimate]
FURTHEST = 99
"""The position of what a lever offers last."""


class ChangeSearch:
    """Finds the smallest change that makes a run fit. Each try is priced."""

    def __init__(self, request: PlanRequest, estimate: Estimate, price: Price) -> None:
        self.request, self.estimate, self.price = request, estimate, price
        self.tried = 0

    def find(self) -> list[Change]:
        """The smallest change that fits, if there is one; where that is more devices, also the smallest without."""
        if (free := self._first(FREE)) is not None:
            return [free]
        everything = [(lever, FURTHEST) for lever in FREE]
        devices = self._pull_next([], more_devices) or self._pull_next(everything, more_devices)
        here = self._first(COSTLY, everything)
        if devices is None and here is None:
            all_levers = [*everything, *((lever, FURTHEST) for lever in COSTLY)]
            devices = self._pull_next(all_levers, more_devices)
        return [change for change in (devices, here) if change is not None]

    def _first(self, levers: Sequence[Lever], pulled: Sequence[tuple[Lever, int]] = ()) -> Change | None:
        """Each lever alone, then after those that have been `pulled`; at last one after the other."""
        for lever in levers:
            for before in ([], list(pulled)) if pulled else ([],):
                if (found := self._pull_next(before, lever)) is not None:
                    return found
        at = list(pulled)
        for lever in levers:
            if (found := self._pull_next(at, lever)) is not None:
                return found
            at.append((lever, FURTHEST))
        return None

    def _pull_next(self, pulled: Sequence[tuple[Lever, int]], lever: Lever) -> Change | None:
        """What a lever offers after others have been pulled, if it fits."""
        at = self._pull(pulled)
        for index, variant in enumerate(_variants(lever, at.request)):
            if (found := self._fitting(_after(at, variant))) is not None:
                return self._without_needless([*pulled, (lever, index)]) if pulled else found
        return None

    def _without_needless(self, pulled: list[tuple[Lever, int]]) -> Change:
        """The change with only those levers that it needs; larger ones are let go first."""
        for one in pulled[-2::-1]:
            fewer = [other for other in pulled if other is not one]
            if self._fitting(self._pull(fewer)) is not None:
                pulled = fewer
        found = self._fitting(self._pull(pulled))
        assert found is not None
        return found

    def _pull(self, levers: Sequence[tuple[Lever, int]]) -> Variant:
        at = Variant(self.request, keeps=WEIGHTS | ACTIVATIONS)
        for lever, index in levers:
            if further := list(_variants(lever, at.request)):
                at = _after(at, further[min(index, len(further) - 1)])
        return at

    def _fitting(self, variant: Variant) -> Change | None:
        """The variant as a change, if it fits."""
        moments = self.estimate.memory.moments.values()
        least = max(sum(parts.get(part, 0) for part in variant.keeps) for parts in moments)
        if least > self.estimate.machine.device_memory:
            return None
        self.tried += 1
        try:
            verdict = self.price(variant.request).verdict
        except UserError:  # settings that this model excludes
            return None
        return Change(variant.words, variant.settings, verdict.needs) if verdict.fits else None


def _variants(lever: Lever, request: PlanRequest) -> Iterator[Variant]:
    """What a lever offers, up to what other settings of the run exclude."""
    with contextlib.suppress(UserError):
        yield from lever(request)


def _after(first: Variant, second: Variant) -> Variant:
    """Two changes, one after the other."""
    words = f"{first.words}, {second.words}" if first.words else second.words
    return Variant(second.request, words, {**first.settings, **second.settings}, first.keeps & second.keeps)
