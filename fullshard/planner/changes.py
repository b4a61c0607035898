"""Changes of settings that make a run need less memory, from the smallest to the largest."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.config.errors import ConfigError, UserError
from fullshard.optim.names import SERVED
from fullshard.planner.estimate import Estimate, Estimator
from fullshard.planner.request import PlanRequest
from fullshard.planner.verdict import Change

WEIGHTS = frozenset({"shards", "gathered", "gradients", "optimizer", "buffers"})
"""Parts of memory that do not depend on the batch."""
ACTIVATIONS = frozenset({"activations", "logits"})
SMALL_OPTIMIZER = "adamw_8bit"
SMALL_CHUNK = 256
"""Tokens per chunk of the loss, the least that is chosen automatically."""
MOST_DEVICES = 64
"""How many times as many devices are tried at most."""
LENGTHS = 64
"""How many lengths of rows are considered at most."""
SHORTEST = 128
"""The fewest tokens that rows are cut to."""


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
"""What can be changed about a run: from the smallest change to the one that needs the least memory."""


def splits(rows: int, accumulation: int) -> list[tuple[int, int]]:
    """Every way to split the same rows into micro-batches, the largest ones first."""
    total = rows * accumulation
    return [(size, total // size) for size in range(total, 0, -1) if total % size == 0]


def _run(request: PlanRequest, words: str, keeps: frozenset[str], **settings: Any) -> Variant:
    """A variant with other settings of the run."""
    config = dataclasses.replace(request.config, **settings)
    return Variant(dataclasses.replace(request, config=config), words, settings, keeps)


def smaller_batch(request: PlanRequest) -> Iterator[Variant]:
    """Smaller micro-batches, and more of them: the global batch stays."""
    most = request.config.per_device_train_batch_size
    for rows, steps in splits(most, request.config.gradient_accumulation_steps):
        if rows < most:
            settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
            words = f"per_device_train_batch_size {rows} with gradient_accumulation_steps {steps}"
            yield _run(request, words, WEIGHTS, **settings)


def smaller_evaluation(request: PlanRequest) -> Iterator[Variant]:
    """Evaluations with smaller batches."""
    rows = request.config.per_device_eval_batch_size
    while request.config.eval_strategy != "no" and rows > 1:
        rows //= 2
        yield _run(request, f"per_device_eval_batch_size {rows}", WEIGHTS, per_device_eval_batch_size=rows)


def checkpointing(request: PlanRequest) -> Iterator[Variant]:
    """Recompute activations: as much as needed, or all."""
    checkpointing = request.config.gradient_checkpointing
    if request.engine.activation_checkpointing:
        return
    if checkpointing is False:
        yield _run(request, "gradient_checkpointing auto", WEIGHTS, gradient_checkpointing="auto")
    if checkpointing is not True:
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
    """More devices of the node, then more nodes."""
    machine = request.machine
    if request.engine.strategy == "NO_SHARD":
        return
    for larger in machine.with_more_devices(machine.num_processes * MOST_DEVICES):
        with contextlib.suppress(ConfigError):  # the settings name the sizes of the mesh
            request.engine.mesh_shape(larger.num_processes, larger.nodes)
            words = f"{larger.num_processes} devices instead of {machine.num_processes}"
            settings = {"num_processes": larger.num_processes}
            yield Variant(dataclasses.replace(request, machine=larger), words, settings, ACTIVATIONS)


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


def shorter_rows(request: PlanRequest) -> Iterator[Variant]:
    """Rows that are cut to fewer tokens."""
    rows, longest = request.config.per_device_train_batch_size, request.config.max_length
    lengths = sorted(request.lengths)[-rows:] if request.lengths is not None else None
    if lengths is not None:
        longest = min(longest or lengths[-1], lengths[-1])
    if longest is None:
        return
    unit = 2 ** max(0, (longest // LENGTHS).bit_length())
    for length in range((longest - 1) // unit * unit, SHORTEST - 1, -unit):
        cut = None if lengths is None else [min(length, tokens) for tokens in lengths]
        yield _run(dataclasses.replace(request, lengths=cut), f"max_length {length}", WEIGHTS, max_length=length)


FREE: Sequence[Lever] = (smaller_evaluation, smaller_batch, checkpointing, activation_offload, loss_chunks, full_shard)
"""Levers that change nothing about the result, only time and memory."""
SLOWER: Sequence[Lever] = (offload_embedding, offload_weights)
"""Levers that take much longer."""
OTHER: Sequence[Lever] = (small_optimizer, adapters, shorter_rows)
"""Levers that train something else. All lists begin with what matters least."""


# --- the search -----------------------------------------------------------------------------------------------------

Price = Callable[[PlanRequest], Estimate]
Pulls = Sequence[tuple[Lever, int]]
"""Levers in order, with how far each is pulled: by which number of its variants, 0 for none."""
FURTHEST = 10**6
"""As far as a lever goes."""


class ChangeSearch:
    """Finds the smallest change that makes a run fit. Each try is priced."""

    def __init__(self, request: PlanRequest, estimate: Estimate, price: Price) -> None:
        self.request, self.estimate, self.price = request, estimate, price
        self._known: dict[str, Change | None] = {}
        """What was priced, by its words, as a change that fits."""
        self._excluded: set[str] = set()
        """What the model excludes."""

    @property
    def tried(self) -> int:
        """How many changes were priced."""
        return len(self._known)

    def find(self) -> list[Change]:
        """The smallest change that fits, if there is one. Where it is more than time and memory: the fewest devices,
        and the smallest changes without more of them, of one that is only slower and of what is trained."""
        if (free := self._first(FREE)) is not None:
            return [free]
        everything = self._together(FREE)
        devices = self._smallest(everything, more_devices)
        here = [self._first(levers, everything) for levers in (SLOWER, OTHER)]
        if not any(here):
            here = [self._first((*SLOWER, *OTHER), everything)]
        if devices is None and not any(here):
            devices = self._smallest(self._together((*FREE, *SLOWER, *OTHER)), more_devices)
        return [change for change in (devices, *here) if change is not None]

    def _first(self, levers: Sequence[Lever], pulled: Pulls = ()) -> Change | None:
        """Each lever after those that have been `pulled`, so that it is pulled the least, then alone; at last one after
        the other."""
        for lever in levers:
            for before in (list(pulled), []) if pulled else ([],):
                if (change := self._smallest(before, lever)) is not None:
                    return change
        at = list(pulled)
        for lever in levers:
            if (change := self._smallest(at, lever)) is not None:
                return change
            at.append((lever, FURTHEST))
        return None

    def _smallest(self, pulled: Pulls, lever: Lever) -> Change | None:
        """The smallest change by a lever that fits after others have been pulled, which are then let go as far as it
        still fits, the largest first."""
        pulls = [*pulled, (lever, FURTHEST)]
        for index in reversed(range(len(pulls))):
            if (far := self._least(pulls, index)) is None:
                return None
            pulls[index] = pulls[index][0], far
        return self._fitting(self._pull(pulls))

    def _least(self, pulls: Pulls, index: int) -> int | None:
        """How far one of the levers must be pulled; None if the change does not fit however far it is."""
        lever, far = pulls[index]
        count = min(far, len(list(_variants(lever, self._pull(pulls[:index]).request))))

        def pulled(far: int) -> Variant:
            return self._pull([*pulls[:index], (lever, far), *pulls[index + 1 :]])

        def fits(far: int) -> bool:
            return self._fitting(pulled(far)) is not None

        while count and not fits(count) and pulled(count).words in self._excluded:
            count //= 2
        if not fits(count):
            return None
        low = 0
        while low < count:
            middle = (low + count) // 2
            low, count = (low, middle) if fits(middle) else (middle + 1, count)
        return count

    def _pull(self, levers: Pulls) -> Variant:
        at = Variant(self.request, keeps=WEIGHTS | ACTIVATIONS)
        for lever, far in levers:
            if far and (variants := list(_variants(lever, at.request))):
                at = after(at, variants[min(far, len(variants)) - 1])
        return at

    def _is_excluded(self, pulls: Pulls) -> bool:
        """Whether the model excludes these settings."""
        variant = self._pull(pulls)
        self._price_once(variant)
        return variant.words in self._excluded

    def _together(self, levers: Sequence[Lever]) -> Pulls:
        """All levers as far as they go, without those that the model excludes."""
        pulls = [(lever, FURTHEST) for lever in levers]
        return [pull for pull in pulls if not self._is_excluded([pull])] if self._is_excluded(pulls) else pulls

    def _fitting(self, variant: Variant) -> Change | None:
        """The variant as a change, if it fits."""
        moments = self.estimate.memory.moments.values()
        least = max(sum(parts.get(part, 0) for part in variant.keeps) for parts in moments)
        if least > self.estimate.machine.device_memory:
            return None
        return self._price_once(variant)

    def _price_once(self, variant: Variant) -> Change | None:
        if variant.words not in self._known:
            self._known[variant.words] = None
            try:
                verdict = self.price(variant.request).verdict
            except UserError:
                self._excluded.add(variant.words)
            else:
                change = Change(variant.words, variant.settings, verdict.needs)
                self._known[variant.words] = change if verdict.fits else None
        return self._known[variant.words]


def _variants(lever: Lever, request: PlanRequest) -> Iterator[Variant]:
    """What a lever offers, up to what other settings of the run exclude."""
    with contextlib.suppress(UserError):
        yield from lever(request)


def after(first: Variant, second: Variant) -> Variant:
    """Two changes, one after the other."""
    words = f"{first.words}, {second.words}" if first.words else second.words
    return Variant(second.request, words, {**first.settings, **second.settings}, first.keeps & second.keeps)


def estimate_with_advice(request: PlanRequest) -> Estimate:
    """What a run needs and costs and, if it does not fit, the smallest change that would make it fit."""
    estimator = Estimator()
    return with_advice(estimator(request), request, estimator)


def with_advice(estimate: Estimate, request: PlanRequest, estimator: Estimator) -> Estimate:
    """An estimate with the smallest change that would make the run fit, if it does not."""
    if estimate.verdict.fits is not False or not estimate.verdict.certain:
        return estimate
    search = ChangeSearch(request, estimate, estimator)
    began = time.perf_counter()
    changes = tuple(search.find())
    verdict = dataclasses.replace(estimate.verdict, changes=changes, tried=search.tried)
    seconds = {**estimate.seconds, "advice": time.perf_counter() - began}
    return dataclasses.replace(estimate, verdict=verdict, seconds=seconds)
