"""Which settings of a run fit a machine, the fastest first: `fullshard plan --search`.

The global batch stays as it is. Tried are strategies, offload, activation checkpointing and every split of the batch
into micro-batches; adapters and quantized weights only where the user allows them, since they train something else.
Each result has the YAML file that runs it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import ConfigError, UserError
from fullshard.config.options import nearest
from fullshard.fsdp.plan import ShardingPlan, item_size
from fullshard.parallel.fsdp_flags import read_section, read_words
from fullshard.parallel.settings import STRATEGIES
from fullshard.planner.changes import splits
from fullshard.planner.estimate import Estimate
from fullshard.planner.request import PlanRequest
from fullshard.sft.sft_config import SFTConfig

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"use_4bit_quantization": False, "use_nested_quant": False, "base_dtype": None},
    "qlora": {"use_4bit_quantization": True, "base_dtype": None},
    "fp8": {"use_4bit_quantization": False, "use_nested_quant": False, "base_dtype": "fp8"},
}
"""What the search may turn a run into, if it is allowed to."""
CHECKPOINTING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no recomputation", {"gradient_checkpointing": False, "activation_offloading": False}),
    ("recomputation as needed", {"gradient_checkpointing": "auto", "activation_offloading": False}),
    ("full recomputation", {"gradient_checkpointing": True, "activation_offloading": False}),
    ("full recomputation, inputs on the host", {"gradient_checkpointing": True, "activation_offloading": True}),
)
"""From the fastest to the one that needs the least memory."""
FSDP_KEYS = ("sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing",
             "activation_checkpointing_offload")  # fmt: skip
"""Sharding settings that a candidate sets itself."""

Price = Callable[[PlanRequest], Estimate]


@dataclass(frozen=True)
class Candidate:
    """Settings, and what the run needs and costs with them."""

    request: PlanRequest
    requested: PlanRequest
    """What the user asked for."""
    words: str
    estimate: Estimate

    @property
    def tokens_per_second(self) -> float:
        """The estimated speed of all devices together."""
        return float(self.estimate.time.tokens_per_second)

    @property
    def fits(self) -> bool:
        """Whether it certainly fits."""
        return bool(self.estimate.verdict.fits)

    @property
    def rank(self) -> tuple[bool, float]:
        """How near it comes to fitting: the memory it needs as a multiple of what there is, on the device or the host,
        whichever is worse. What cannot be told comes before what does not fit."""
        verdict = self.estimate.verdict
        return verdict.fits is False, max(verdict.needs / verdict.has, verdict.needs_host / verdict.has_host)

    def yaml(self) -> str:
        """The file that runs these settings with `fullshard sft`."""
        machine, verdict = self.request.machine, self.estimate.verdict
        lines = [
            f"# {self.words}",
            f"# About {self.tokens_per_second:,.0f} tokens/s on {machine}, {memory_size(verdict.needs)} of "
            f"{memory_size(verdict.has)} on each device.",
            f"# fullshard sft run.yaml{launch_flags(self.request)}",
        ]
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.settings(), sort_keys=False)

    def settings(self) -> dict[str, Any]:
        """The settings of the run as its YAML file has them: those of `fullshard sft` that are not at their defaults,
        and the sharding settings that the search chose, which override the launcher's."""
        config, engine = self.request.config, self.request.engine
        values = {name: value for name, value in config.changed().items() if name not in ("fsdp", "fsdp_config")}
        sharding = {**read_section(config.fsdp_config, []), **read_words(config.fsdp)}
        kept = {name: value for name, value in sharding.items() if name not in FSDP_KEYS}
        chosen: dict[str, Any] = {"sharding_strategy": engine.strategy, "offload_params": engine.offload_params}
        if self.requested.engine.activation_checkpointing:
            chosen |= {"activation_checkpointing": False, "activation_checkpointing_offload": False}
        return {**values, "fsdp_config": {f"fsdp_{name}": value for name, value in {**kept, **chosen}.items()}}

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain data."""
        verdict = self.estimate.verdict
        return {
            "settings": self.settings(), "words": self.words, "fits": verdict.fits,
            "tokens_per_second": self.tokens_per_second, "seconds": self.estimate.time.total,
            "device_memory": verdict.needs, "host_memory": verdict.needs_host, "yaml": self.yaml(),
        }  # fmt: skip


@dataclass(frozen=True)
class SearchResult:
    """What a search has found."""

    fitting: tuple[Candidate, ...]
    """The fastest first."""
    nearest: Candidate | None
    """If nothing fits: what comes nearest."""
    tried: int
    allowed: tuple[str, ...] = ()
    """The methods that the user allowed."""

    @property
    def fits(self) -> bool | None:
        """Whether something fits; None if that cannot be told."""
        return True if self.fitting else self.nearest.estimate.verdict.fits if self.nearest is not None else False

    def to_json(self) -> dict[str, Any]:
        """The result as plain data; docs/planning.md describes it."""
        return {
            "fitting": [one.to_json() for one in self.fitting],
            "nearest": self.nearest.to_json() if self.nearest else None, "tried": self.tried,
        }  # fmt: skip


def launch_flags(request: PlanRequest) -> str:
    """The flags that start as many processes as were planned for, and divide experts among them."""
    machine, size = request.machine, request.engine.ep_size
    nodes = f" --num_machines {machine.nodes}" if machine.nodes > 1 else ""
    experts = f" --ep_size {size}" if size > 1 else ""
    return f" --num_processes {machine.num_processes}{nodes}{experts}" if machine.num_processes > 1 else ""


def check_allowed(allow: Sequence[str]) -> tuple[str, ...]:
    """The methods that a user allows; an error for unknown ones."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in allow))
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"allow names {name!r}{nearest(name, METHODS)}; expected {', '.join(METHODS)}.")
    return names


def search_settings(
    request: PlanRequest, price: Price, allow: Sequence[str] = (), say: Callable[[str], None] = lambda what: None
) -> SearchResult:
    """Find the settings that fit, the fastest first. `say` receives what is tried."""
    search = _Search(request, price, say)
    allowed = check_allowed(allow)
    for method in _methods(request, allowed):
        search.explore(method, [method_name(method)] if allowed else [])
    fitting = sorted(search.fitting, key=lambda one: -one.tokens_per_second)
    return SearchResult(tuple(fitting), None if fitting else search.nearest, search.tried, allowed)


# --- what is tried --------------------------------------------------------------------------------------------------


def _methods(request: PlanRequest, allowed: Sequence[str]) -> Iterator[PlanRequest]:
    """The run as it is, and what the user allows to make of it."""
    yield request
    config = request.config
    for name in allowed:
        adapter = {} if config.adapter_kind or request.adapter else {"use_peft_lora": True}
        changed = _with(request, **METHODS[name], **adapter)
        computes = name != "fp8" or "float8" in request.machine.flops
        if changed is not None and computes and changed.config.values() != config.values():
            yield changed


def method_name(request: PlanRequest) -> str:
    """What a run trains, in words."""
    config = request.config
    adapter = (config.adapter_kind or "lora").replace("lora", "LoRA")
    if config.use_4bit_quantization:
        return f"Q{adapter}" if adapter == "LoRA" else f"{adapter} on 4-bit weights"
    if config.base_dtype:
        return f"{adapter} on {config.base_dtype} weights"
    return adapter if config.adapter_kind or request.adapter else "full fine-tuning"


def _shardings(request: PlanRequest) -> Iterator[tuple[PlanRequest, str]]:
    """Strategies for the machine, without and with offload."""
    machine, engine = request.machine, request.engine
    strategies: Sequence[str] = STRATEGIES if machine.nodes > 1 else STRATEGIES[:3]
    if machine.num_processes == 1:
        strategies = ("FULL_SHARD",)
    if engine.dp_replicate_size or engine.dp_shard_size:  # the mesh was chosen
        strategies = [name for name in STRATEGIES if name.startswith("HYBRID") == engine.hybrid and name != "NO_SHARD"]
    for offload in (False, True) if not machine.shares_host_memory else (False,):
        for strategy in strategies:
            changes: dict[str, Any] = {
                "sharding_strategy": strategy, "reshard_after_forward": None, "offload_params": offload,
                "activation_checkpointing": False, "activation_checkpointing_offload": False,
            }  # fmt: skip
            try:
                changed = dataclasses.replace(request, engine=dataclasses.replace(engine, **changes))
            except ConfigError:
                continue
            named = [strategy] if machine.num_processes > 1 else []
            yield changed, ", ".join([*named, *(["weights on the host"] if offload else [])])


def _expert_sizes(request: PlanRequest, plan: ShardingPlan) -> list[int]:
    """Sizes of `ep` to try for a mixture of experts: all ranks of a node, and all ranks of a replica."""
    machine, engine = request.machine, request.engine
    names = (p.name.split(".") for unit in plan.units for p in unit.parameters)
    if engine.ep_size > 1 or not any("experts" in name for name in names):
        return []
    inside = engine.mesh_shape(machine.num_processes, machine.nodes)["fsdp"]
    return sorted({math.gcd(inside, machine.gpus_per_node), inside} - {1})


def _with(request: PlanRequest, **settings: Any) -> PlanRequest | None:
    """The request with other settings of the run; None if they exclude each other."""
    try:
        config: SFTConfig = dataclasses.replace(request.config, **settings)
    except ConfigError:
        return None
    return dataclasses.replace(request, config=config)


# --- the search -----------------------------------------------------------------------------------------------------


class _Search:
    """Tries what may be faster than what is known to fit. Memory grows with the micro-batch and falls with
    recomputation; time falls with the micro-batch and grows with recomputation."""

    def __init__(self, request: PlanRequest, price: Price, say: Callable[[str], None]) -> None:
        config = request.config
        self.requested, self.price, self.say = request, price, say
        self.splits = splits(config.per_device_train_batch_size, config.gradient_accumulation_steps)
        self.fitting: list[Candidate] = []
        self.nearest: Candidate | None = None
        self.tried = 0
        self._kept: set[Any] = set()
        """What fits of the current method."""
        self._plan: ShardingPlan | None = None
        """The plan of the last candidate."""

    def explore(self, method: PlanRequest, words: list[str]) -> None:
        """Find what fits of one method: with each strategy, without and with offload."""
        self._kept, weights, best = set(), None, set()
        for request, named in self._variants(method):
            impossible = weights is not None and _least_weights(request, weights) > request.machine.device_memory
            if impossible or request.engine.offload_params and request.engine.strategy in best:
                continue  # offload only where something does not fit without
            first = self._explore_sharding(request, [*words, *([named] if named else [])])
            if first is not None:
                weights = weights or weight_bytes(first.estimate.plan)
                best |= {request.engine.strategy} if first.fits and request.engine.ep_size == 1 else set()
                self._plan = first.estimate.plan

    def _variants(self, method: PlanRequest) -> Iterator[tuple[PlanRequest, str]]:
        """Strategies for the machine, then FULL_SHARD with experts that are divided among ranks."""
        yield from _shardings(method)
        for size in _expert_sizes(method, self._plan) if self._plan is not None else ():
            changes: dict[str, Any] = {
                "sharding_strategy": "FULL_SHARD", "reshard_after_forward": None, "ep_size": size,
            }  # fmt: skip
            engine = dataclasses.replace(method.engine, **changes)
            yield dataclasses.replace(method, engine=engine), f"FULL_SHARD, ep_size {size}"

    def _explore_sharding(self, request: PlanRequest, words: list[str]) -> Candidate | None:
        """One strategy: the largest micro-batch that fits with each kind of recomputation. Returns the whole batch at
        once without recomputation, whether it fits or not."""
        none, auto, full, on_host = range(len(CHECKPOINTING))
        first = self._try(request, words, none, 0)
        if first is None or first.fits:
            self._keep(first)
            return first
        least = self._try(request, words, on_host, len(self.splits) - 1)
        if least is None or not least.fits:
            return first
        kept = self._largest(request, words, none, start=1)
        recomputed = self._largest(request, words, full)
        if recomputed > 0:  # not even the whole batch at once
            self._largest(request, words, on_host)
        for index in range(recomputed, min(kept, len(self.splits))):  # below, nothing need be recomputed
            self._keep(self._try(request, words, auto, index))
        return first

    def _largest(self, request: PlanRequest, words: list[str], kind: int, start: int = 0) -> int:
        """Keep the largest micro-batches that fit; returns their index, or the number of splits if none fit."""
        low, high, best = start, len(self.splits), None
        while low < high:
            middle = (low + high) // 2 if low > start else start  # often the first one fits
            candidate = self._try(request, words, kind, middle)
            if candidate is not None and candidate.fits:
                high, best = middle, candidate
            else:
                low = middle + 1
        self._keep(best)
        return high

    def _keep(self, candidate: Candidate | None) -> None:
        if candidate is None or not candidate.fits:
            return
        same = (candidate.request.engine, candidate.estimate.batch, candidate.estimate.levels)
        if same not in self._kept:  # what adapts to the memory that is left may come to the same
            self._kept.add(same)
            self.fitting.append(candidate)

    def _try(self, request: PlanRequest, words: list[str], kind: int, index: int) -> Candidate | None:
        """What a candidate needs and costs; None where its settings exclude each other."""
        rows, accumulation = self.splits[index]
        name, settings = CHECKPOINTING[kind]
        batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        changed = _with(request, **settings, **batch)
        if changed is None:
            return None
        said = ", ".join([*words, f"micro-batches of {rows} × {accumulation}", name])
        self.say(said)
        self.tried += 1
        try:
            candidate = Candidate(changed, self.requested, said, self.price(changed))
        except UserError:  # settings that this model or strategy excludes
            return None
        if self.nearest is None or candidate.rank < self.nearest.rank:
            self.nearest = candidate
        return candidate


def weight_bytes(plan: ShardingPlan) -> int:
    """Bytes of all parameters of a model, not sharded."""
    return sum(math.prod(p.shape) * item_size(p.dtype) for unit in plan.units for p in unit.parameters)


def _least_weights(request: PlanRequest, whole: int) -> float:
    """Bytes of parameters that each device holds at least."""
    machine, engine = request.machine, request.engine
    if engine.offload_params:
        return 0.0
    if engine.strategy == "NO_SHARD":
        return whole
    return whole / engine.mesh_shape(machine.num_processes, machine.nodes)["fsdp"]
