"""The model of a run that need not happen: built and planned like the run's, without weights, devices or processes.

The steps are those of the run (`base_model.py`, `model_steps.py`). Of layers that are alike few are built
(`planner/layer_dedup.py`) unless the settings tell them apart.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.activations.levels import Level, has_slices
from fullshard.config.errors import ConfigError, first_line
from fullshard.config.options import as_list
from fullshard.config.paths import list_contents, looks_local
from fullshard.distributed import ranks
from fullshard.fsdp.plan import ShardingPlan, item_size
from fullshard.fsdp.strategy import MixedPrecision, dtype_name
from fullshard.lora.model_size import count_parameters
from fullshard.lora.peft_model import method_of
from fullshard.models.tiny_model import forked_random
from fullshard.parallel.model import absent_mesh, checkpointed_modules, ignored_modules, plan_sharding
from fullshard.parallel.settings import EngineSettings
from fullshard.parallel.tensor_parallel import exchanges_of
from fullshard.parallel.tensor_plan import Exchange
from fullshard.planner.layer_dedup import CannotExpandError, Condensed, Stack, condense, may_name_a_layer, patterns_in
from fullshard.planner.step_trace import StepTrace, TracedModel
from fullshard.quant.shipped import Shipped, is_shipped
from fullshard.sft import adapter
from fullshard.sft.adapter import set_projection_dtype
from fullshard.sft.base_model import read_model
from fullshard.sft.checked_run import starting_point
from fullshard.sft.model_steps import adapt_model, ready_model
from fullshard.sft.sft_config import SFTConfig
from fullshard.spmd.mesh import Mesh
from fullshard.weights.config_limits import check_config


@dataclass(frozen=True)
class ReplicatedTensor:
    """A tensor that every rank holds whole and that is not in the plan."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True)
class PlannedModel:
    """A run's model on the meta device and its sharding plan.

    The model is condensed: of many layers that are alike it has a few. Everything else here is about the whole model.
    """

    model: Any
    """The condensed model on the meta device, with its adapter and loss head, before sharding."""
    whole: Condensed
    """What is left out of it."""
    head: Any
    """The `ChunkedLossHead` that computes the loss."""
    packed: Any
    """The `Packed` inputs; None where the model needs none."""
    plan: ShardingPlan
    layers: tuple[str, ...]
    """The names of the layers that activation checkpointing can recompute, in order."""
    kinds: dict[str, str]
    """For each of these layers, the layer of the condensed model that stands for it."""
    buffers: dict[str, ReplicatedTensor]
    ignored: dict[str, ReplicatedTensor]
    """Parameters of modules that are not sharded (`fsdp_ignored_modules`)."""
    parameters: int
    """The number of parameters; quantized weights count as the weights they store."""
    engine: EngineSettings
    """The sharding settings, with the compiler that the run would choose."""
    precision: MixedPrecision
    device: torch.device
    """The device that the run would use, which need not exist here."""
    notes: tuple[str, ...]
    """What the plan takes for granted."""
    exchanges: dict[str, Exchange]
    """What the ranks along `tp` exchange at the borders of layers, by name of a layer."""

    def on_ranks(self, engine: EngineSettings, processes: int, nodes: int) -> PlannedModel:
        """The same model with the plan for other ranks or sharding settings."""
        mesh = absent_mesh(engine, processes, nodes)
        plan = plan_sharding(self.model, engine, mesh, self.device, mixed_precision=self.precision)
        engine = replace(engine, backend=self.engine.backend)
        return replace(self, engine=engine, plan=self.whole.expand_plan(plan))

    def traced(self, traces: Mapping[Level, StepTrace]) -> TracedModel:
        """The whole model with traces of its condensed one."""
        return TracedModel(traces, self.layers, self.kinds)


MANY_STEPS = 10**9
"""The length of a run whose data is not known: it is compiled where that can pay."""


def planned_model(
    config: SFTConfig, engine: EngineSettings, place: str | Path, processes: int, nodes: int = 1, *,
    device: str = "cuda", steps: int | None = None, peft_config: Any = None, condensed: bool = True,
    started: bool = False, all_parts: bool = False,
) -> PlannedModel:  # fmt: skip
    """The planned model of a run with these checked settings.

    - `place`: a folder with or without weights, a name on the hub (only its config.json is fetched), or a config.json
    - `processes`, `nodes`: how many there would be
    - `device`: the type of their devices, "cuda" or "cpu"; `EngineSettings.use_cpu` means "cpu"
    - `steps`: optimizer steps, which decide whether layers are compiled; None for a long run
    - `condensed`: whether layers that are alike stand for each other; the plan is the same without, but takes longer
    - `started`: whether a run has found model and adapter apart, and `peft_config` has its new tokens
    - `all_parts`: whether parts that text does not use are there, as in a model that is given in memory
    """
    target = torch.device("cpu" if engine.use_cpu else device)
    earlier = config.adapter_name_or_path
    if not started:
        place, earlier = starting_point(place, earlier)
    requested = adapter.requested_adapter_config(config, peft_config)
    fits = peft_config is not None or earlier is not None
    if earlier is not None:
        requested = adapter.resumed_config(config, Path(earlier), _nothing)
    # How many tokens train beside a new adapter is what counts, not which: they may be given as text.
    has_sizes = started or earlier is not None
    tokens = [] if has_sizes else list(range(len(as_list(config.trainable_token_indices or ""))))
    if place is None:
        raise ConfigError(f"{earlier} names no model here; give the model it was trained on.")
    where = find_config(place, config.revision)
    make = functools.partial(
        _planned, config, engine, where, absent_mesh(engine, processes, nodes), target, steps, requested, tokens,
        fits=fits, all_parts=all_parts,
    )  # fmt: skip
    with ranks.alone(), forked_random(torch.device("cpu")):
        if condensed and can_condense(config, engine, requested):
            with contextlib.suppress(CannotExpandError):  # then the whole model tells
                return make(condensed=True)
        return make(condensed=False)


def _planned(
    config: SFTConfig, engine: EngineSettings, place: Path, mesh: Mesh, device: torch.device, steps: int | None,
    peft_config: Any, tokens: list[int], *, condensed: bool, fits: bool, all_parts: bool,
) -> PlannedModel:  # fmt: skip
    notes = ["The vocabulary is the model's: tokens that a chat template would add are not counted."]
    stacks: list[Stack] = []

    def leave_out(model: Any) -> None:
        if condensed and not _names_layers(getattr(model.config, "quantization_config", None)):
            stacks.extend(condense(model))

    model: Any = read_model(config, place, device, notes.append, present=False, condense=leave_out, all_parts=all_parts)
    if peft_config is not None:
        peft_config = adapter.fit_adapter_config(config, peft_config, model, notes.append, from_settings=not fits)
        peft_config = adapter.train_tokens(peft_config, model, tokens)
    model, packing = adapt_model(config, engine, model, None, peft_config, None, device, _nothing, present=False)
    whole = Condensed(model, stacks)
    size = whole.count(model, lambda part: count_parameters(part)[1])
    length = steps if steps is not None else config.max_steps if config.max_steps > 0 else MANY_STEPS
    ready = ready_model(config, engine, model, packing, length, device, _nothing, size=lambda _: size)
    if ready.head.why_not:
        notes.append(f"chunked_loss: {ready.head.why_not}.")
    if has_slices(model):
        notes.append("Layers that do not keep everything run in slices of the sequence (sequence_slices).")
    plan = plan_sharding(model, ready.engine, mesh, device, mixed_precision=ready.precision)
    set_projection_dtype(model, ready.precision.param_dtype)
    layers = list(whole.expand(_layer_names(model, ready.engine), str))
    return PlannedModel(
        model=model.train(),
        whole=whole,
        head=ready.head,
        packed=ready.packed,
        plan=whole.expand_plan(plan),
        layers=tuple(rename(name) for name, rename in layers),
        kinds={rename(name): name for name, rename in layers},
        buffers=dict(_expanded(whole, dict(model.named_buffers()))),
        ignored=dict(_expanded(whole, _unsharded(model, ready.engine))),
        parameters=size,
        engine=ready.engine,
        precision=ready.precision,
        device=device,
        notes=tuple(notes),
        exchanges=_exchanged(whole, model, ready.head),
    )


def _names_layers(packed: Any) -> bool:
    """Whether a `quantization_config` may treat layers that are alike differently. bitsandbytes' files name them."""
    if not is_shipped(packed):
        return packed is not None
    return any(map(may_name_a_layer, Shipped.of(packed).patterns))


def _exchanged(whole: Condensed, model: Any, head: Any) -> dict[str, Exchange]:
    """The exchanges of the whole model. A chunked loss is computed from slices of the logits."""
    known = exchanges_of(model)
    if head.head is not None:
        tables = {id(head.model.get_output_embeddings())}
        known = {
            name: one._replace(forward_gather=0) if id(head.model.get_submodule(name)) in tables else one
            for name, one in known.items()
        }
    prefix = next((name for name, part in model.named_modules() if part is head.model), "")
    full = {f"{prefix}.{name}" if prefix else name: one for name, one in known.items()}
    return {rename(name): full[name] for name, rename in whole.expand(list(full), str)}


def _nothing(line: str) -> None:
    """Drops a note of the run: some count the layers of a condensed model."""


def _layer_names(model: nn.Module, engine: EngineSettings) -> list[str]:
    """The layers that activation checkpointing would recompute; none where the model has no layers."""
    try:
        layers = set(checkpointed_modules(model, engine))
    except ConfigError:
        return []
    return [name for name, module in model.named_modules() if module in layers]


def _unsharded(model: nn.Module, engine: EngineSettings) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: p for module in ignored_modules(model, engine) for p in module.parameters()}


def _expanded(whole: Condensed, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, ReplicatedTensor]]:
    for name, rename in whole.expand(list(tensors), str):
        t = tensors[name]
        yield rename(name), ReplicatedTensor(tuple(t.shape), dtype_name(t.dtype), t.requires_grad)


# --- whether layers can be told apart -------------------------------------------------------------------------------


def can_condense(config: SFTConfig, engine: EngineSettings, peft_config: Any) -> bool:
    """Whether no setting treats layers that are alike differently."""
    if engine.wrap_policy == "SIZE_BASED_WRAP":
        return False  # the size of all layers together decides
    patterns = [*as_list(config.freeze or ""), *patterns_in(engine.ignored_modules)]
    if peft_config is not None:
        if method_of(peft_config) != "LORA" or peft_config.layers_to_transform is not None:
            return False  # other methods have parameters for all layers together
        if peft_config.layer_replication is not None or peft_config.init_lora_weights == "eva":
            return False
        named = ("target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern",
                 "target_parameters", "trainable_token_indices")  # fmt: skip
        patterns += [pattern for name in named for pattern in patterns_in(getattr(peft_config, name, None))]
    return not any(map(may_name_a_layer, patterns))


# --- where the model is described -----------------------------------------------------------------------------------


def find_config(place: str | Path, revision: str | None = None) -> Path:
    """The folder or file with a model's configuration; for a name on the hub only config.json is fetched."""
    path, option = Path(place).expanduser(), "model_name_or_path"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{option}: {path} has no config.json; it holds {list_contents(path)}.")
        check_config(path)
        return path
    if path.is_file():
        if path.suffix != ".json":
            raise ConfigError(
                f"{option}: {path} is no config.json; expected one, a model's folder or a name on the hub."
            )
        check_config(path)
        return path
    if looks_local(str(place)) or path.suffix == ".json":
        raise ConfigError(f"{option}: {path} does not exist.")
    return _fetched(str(place), revision)


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        place = Path(hf_hub_download(name, "config.json", revision=revision)).parent
    except (OSError, ValueError, HFValidationError) as error:  # the Hub's own errors are OSErrors or ValueErrors
        raise ConfigError(
            f"{name!r} is neither a local folder nor a model on the hub whose config.json can be fetched: "
            f"{first_line(error)[:200]}"
        ) from None
    check_config(place)
    return place
