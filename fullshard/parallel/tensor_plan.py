"""Tensor parallelism: which layers of a model are split over the ranks along `tp`, and how.

A plan names a style for modules, by patterns in which `*` stands for a number of a layer. transformers' models carry
one (`model.tp_plan`: the configuration's `base_model_tp_plan` and the class's `_tp_plan`), and `tp_plan` of the
settings changes it. Each style is a row of `STYLES`. `tensor_borders.py` has what happens at the borders of layers, and
`tensor_trial.py` tries the whole plan on a small copy of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.config.options import nearest
from fullshard.fsdp.host_embedding import stays_on_host
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.experts import experts_modules

AXIS = "tp"


class Style(NamedTuple):
    """How a layer is split."""

    dim: int | None = None
    """The dim of its weight that is split: 0 for outputs (or tokens), 1 for inputs (or columns of an embedding)."""
    enters: str = ""
    """The border at its input: a key of `tensor_borders.ENTRIES`."""
    leaves: str = ""
    """The border at its output: a key of `tensor_borders.EXITS`."""
    terms: bool = False
    """Whether each rank has a term of its parameters' gradients."""


STYLES = {
    "colwise": Style(0, "whole"),
    "colwise_gather_output": Style(0, "whole", "slices"),
    "rowwise": Style(1, leaves="terms"),
    "rowwise_split_input": Style(1, "slice", "terms"),
    "embedding_rowwise": Style(0, "tokens", "token terms"),
    "embedding_colwise": Style(1, leaves="slices"),
    "replicated_with_grad_allreduce": Style(terms=True),
    "mla_kv_a_proj": Style(leaves="rope slices"),
    "all_reduce": Style(leaves="terms"),
    "replicate": Style(),
}
"""By transformers' names."""
STYLES |= {"colwise_rep": STYLES["colwise_gather_output"], "rowwise_rep": STYLES["rowwise_split_input"]}
OF_EXPERTS = ("moe_tp_experts", "packed_colwise", "packed_rowwise", "moe_identity_expert", "grouped_gemm")
"""Styles of a mixture's experts, which stay whole along `tp`."""


@dataclass(frozen=True)
class SplitLayer:
    """A layer of the plan."""

    name: str
    layer: nn.Module
    """The module at that name: with an adapter, PEFT's layer around the plain one."""
    parent: nn.Module
    style: Style


class SplitParameter(NamedTuple):
    """A parameter of a split layer."""

    module: nn.Module
    name: str
    dim: int | None
    """The dim that is split; None if every rank has the whole parameter."""
    terms: bool
    """Whether each rank has a term of its gradient."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter


def split_layers(
    model: nn.Module, changes: Mapping[str, str] | None = None, *, tables: bool = True
) -> list[SplitLayer]:
    """The layers that are split, by the model's plan and the user's changes to it. Without `tables`, embedding and
    head stay whole: code of a script may multiply by their weights itself."""
    inner = get_causal_lm(model)
    plan = {**dict(getattr(inner, "tp_plan", None) or {}), **(changes or {})}
    modules = dict(inner.named_modules())
    experts = [name for name, _ in experts_modules(inner)]
    layers = []
    for pattern, style in plan.items():
        matches = _matching(pattern, modules)
        if style in OF_EXPERTS or any(_matching(pattern, _inside(experts, modules))):
            continue
        if style not in STYLES:
            raise ConfigError(
                f"tp_plan: {pattern} has the style {style!r}{nearest(style, STYLES)} Expected one of "
                f"{', '.join(STYLES)}."
            )
        if not matches and pattern in (changes or {}):
            raise ConfigError(
                f"tp_plan: no module of {type(inner).__name__} matches {pattern!r}; expected a name such as "
                f"{', '.join([name for name in modules if name][-3:])}"
            )
        layers += [
            SplitLayer(name, modules[name], modules[name.rpartition(".")[0]], STYLES[style])
            for name in matches
            if STYLES[style] != Style()
        ]
    inside = [one for one in layers if not any(one.layer is table for table in _tables(inner))]
    if not (inside or changes):
        raise ConfigError(
            f"tp_size: {type(inner).__name__} has no tensor-parallel plan; give one with tp_plan, a mapping such as "
            f'{{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}}, or use tp_size 1'
        )
    return _with_tied_tables(inner, layers) if tables else inside


def _tables(model: Any) -> tuple[Any, Any]:
    """Embedding and head of a model."""
    if not hasattr(model, "get_input_embeddings"):
        return None, None
    return model.get_input_embeddings(), model.get_output_embeddings()


def _matching(pattern: str, names: Any) -> list[str]:
    """The names that a pattern describes."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in names if expression.fullmatch(name)]


def _inside(experts: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of experts' modules and of their parameters."""
    return [
        *experts,
        *(f"{name}.{parameter}" for name in experts for parameter, _ in modules[name].named_parameters()),
    ]


def _with_tied_tables(model: Any, layers: list[SplitLayer]) -> list[SplitLayer]:
    """The layers, with embedding and head split alike where they are one parameter, and a table in host memory left
    whole."""
    embedding, head = _tables(model)
    by_layer = {id(one.layer): one for one in layers}
    ours, theirs = by_layer.get(id(embedding)), by_layer.get(id(head))
    weight = getattr(embedding, "weight", None)
    tied = weight is not None and weight is getattr(head, "weight", None)
    if ours is not None and (stays_on_host(ours.layer.weight) or (tied and theirs is None)):
        return [one for one in layers if one is not ours]
    if tied and theirs is not None and ours is None:
        names = {id(module): name for name, module in model.named_modules()}
        parent = model.get_submodule(names[id(embedding)].rpartition(".")[0])
        layers.insert(0, SplitLayer(names[id(embedding)], embedding, parent, STYLES["embedding_rowwise"]))
    return layers


# --- parameters -------------------------------------------------------------------------------------------------------


def split_parameters(one: SplitLayer) -> Iterator[SplitParameter]:
    """The parameters of a layer of the plan, those of its adapter included."""
    style = one.style
    if style.terms:
        for module in one.layer.modules():
            for name, _ in module.named_parameters(recurse=False):
                yield SplitParameter(module, name, None, True)
        return
    if style.dim is None:
        return
    for module, role in _roles(one.name, one.layer):
        for name, parameter in module.named_parameters(recurse=False):
            if role == "own":
                yield SplitParameter(module, name, _dim(one, module, name, parameter, style.dim), False)
            else:  # of an adapter, one matrix is split with the layer; of the other one each rank has a term
                split = role == ("b" if style.dim == 0 else "a")
                yield SplitParameter(module, name, style.dim if split else None, not split)


def _dim(one: SplitLayer, module: nn.Module, name: str, parameter: nn.Parameter, dim: int) -> int | None:
    """The dim of a layer's own parameter that is split: a bias follows the outputs."""
    if name == "bias" and parameter.ndim == 1:
        return 0 if dim == 0 else None
    if name == "weight" and parameter.ndim == 2:
        return dim
    raise ConfigError(
        f"tp_size: {one.name} is a {type(module).__name__} with the parameter {name} of shape "
        f"{tuple(parameter.shape)}, which tensor parallelism does not split yet; use tp_size 1, or leave the layer "
        f'whole with tp_plan {{"{one.name}": "replicate"}}'
    )


def _roles(name: str, layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules with a layer's parameters: its own, and those that an adapter has put beside it."""
    if not hasattr(layer, "base_layer") and not _is_copied(layer):
        if next(layer.children(), None) is not None or not isinstance(layer, nn.Linear | nn.Embedding):
            raise ConfigError(
                f"tp_plan: {name} is a {type(layer).__name__}; expected a linear layer or an embedding. Leave it whole "
                f'with tp_plan {{"{name}": "replicate"}}'
            )
        yield layer, "own"
    elif _is_copied(layer):  # PEFT's modules_to_save
        yield layer.original_module, "own"
        for copy in layer.modules_to_save.values():
            yield copy, "own"
    else:
        from peft.tuners.lora import Linear

        if type(layer) is not Linear or any(layer.use_dora.values()) or any(layer.lora_variant.values()):
            raise ConfigError(
                f"tp_size: the adapter on {name} is a {type(layer).__name__} that tensor parallelism does not split; "
                f"plain LoRA on linear layers is supported. Leave this module out of the adapter, or use tp_size 1"
            )
        yield from _roles(name, layer.base_layer)
        yield from ((matrix, "a") for matrix in layer.lora_A.values())
        for matrix in layer.lora_B.values():
            if matrix.bias is not None:
                raise ConfigError(f"tp_size: the adapter on {name} has a bias (lora_bias); leave it out")
            yield matrix, "b"


def _is_copied(layer: nn.Module) -> bool:
    return hasattr(layer, "original_module") and hasattr(layer, "modules_to_save")


# --- sizes ------------------------------------------------------------------------------------------------------------


def check_sizes(model: nn.Module, layers: list[SplitLayer], size: int) -> None:
    """Refuse a number of ranks that does not divide what is split, with the numbers that do."""
    inner = get_causal_lm(model)
    config = inner.config.get_text_config() if hasattr(inner, "config") else None
    counts: dict[str, int] = {}
    if any(re.search("attn|attention", one.name) and one.style == STYLES["colwise"] for one in layers):
        for field, words in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key/value heads")):
            if isinstance(count := getattr(config, field, None), int):
                counts[words] = count
    for one in layers:
        for split in split_parameters(one):
            if split.dim is not None:
                counts.setdefault(f"{_words(one)} in {one.name}", split.parameter.shape[split.dim])
    wrong = {words: count for words, count in counts.items() if count % size}
    if wrong:
        words, count = next(iter(wrong.items()))
        fitting = [n for n in range(1, min(counts.values()) + 1) if all(count % n == 0 for count in counts.values())]
        raise ConfigError(
            f"tp_size {size}: {type(inner).__name__} has {count} {words}, which {size} ranks cannot share equally; "
            f"expected one of {', '.join(map(str, fitting))}"
        )
    kinds = {str(getattr(one.peft_type, "value", one.peft_type)) for one in getattr(model, "peft_config", {}).values()}
    if "PREFIX_TUNING" in kinds:
        raise ConfigError(
            f"tp_size {size}: prefix tuning gives every rank the keys of all heads; use another adapter, or tp_size 1"
        )
    if (rate := getattr(config, "attention_dropout", 0.0)) and any("attn" in one.name for one in layers):
        raise ConfigError(
            f"tp_size {size}: attention_dropout is {rate} in the model's configuration, and ranks would drop the same "
            f"places in their own heads; set it to 0, or use tp_size 1"
        )


def _words(one: SplitLayer) -> str:
    if isinstance(one.layer, nn.Embedding) or one.style.leaves == "slices":
        return "tokens or outputs"
    return "outputs" if one.style.dim == 0 else "inputs"


# --- what travels -----------------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """What the ranks along `tp` exchange at the borders of one layer: numbers for each token of a batch."""

    forward_sum: int = 0
    backward_sum: int = 0
    forward_gather: int = 0
    """Of the whole value that is put together."""
    backward_gather: int = 0


def exchanges(layers: list[SplitLayer]) -> dict[str, Exchange]:
    """The exchanges of split layers, by name. Layers that share an input exchange its gradient once."""
    by_name: dict[str, Exchange] = {}
    shared: set[tuple[nn.Module, int]] = set()
    for one in layers:
        if not one.style.enters and not one.style.leaves:
            continue  # norms of this rank's heads
        out, into = _widths(one)
        once = one.style.enters == "whole" and (one.parent, into) not in shared
        shared.add((one.parent, into))
        config: Any = one.parent.config if one.style.leaves == "rope slices" else None
        by_name[one.name] = Exchange(
            forward_sum=out if one.style.leaves in ("terms", "token terms") else 0,
            backward_sum=into if once else config.qk_rope_head_dim if config is not None else 0,
            forward_gather=out if one.style.leaves == "slices" else 0,
            backward_gather=into if one.style.enters == "slice" else 0,
        )
    return by_name


def _widths(one: SplitLayer) -> tuple[int, int]:
    """The widths of the output and the input of a layer; of a block of layers, those of its last and its first."""
    tables = [m for m in one.layer.modules() if isinstance(m, nn.Embedding)]
    if tables:
        return int(tables[0].embedding_dim), 0
    own = [one.layer] if hasattr(one.layer, "out_features") else one.layer.modules()
    linear: list[Any] = [m for m in own if hasattr(m, "out_features")]
    return int(linear[-1].out_features), int(linear[0].in_features)
