"""The borders of split layers: what their inputs and outputs are exchanged for along `tp`.

Borders are hooks on the modules of the plan, so modules keep their classes, and a fused adapter computes as without
them. Between borders a module sees this rank's slice of its parameters and does what it always does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.distributed import autograd_collectives as between
from fullshard.distributed.autograd_collectives import RankGroup
from fullshard.lora.fused_dropout import OF_SLICE
from fullshard.models.deferred_logits import DeferredLogits
from fullshard.models.vocabulary_slice import set_slice
from fullshard.parallel.tensor_plan import STYLES, SplitLayer, split_parameters


def install_borders(layers: list[SplitLayer], group: RankGroup) -> None:
    """Put the borders of all layers in place."""
    shared: dict[nn.Module, _SharedInput] = {}
    mlps = _fused_mlps(layers)
    for mlp in mlps:
        mlp.register_forward_pre_hook(_on_input(lambda x: between.sum_gradients(x, group)))
        mlp.register_forward_hook(lambda _, args, output: between.sum_terms(output, group))
    for one in layers:
        if one.style == STYLES["rowwise"]:
            _drop_slices(one.layer, group)
        if one.parent in mlps:
            continue
        if one.style.enters == "whole":
            if one.parent not in shared:
                shared[one.parent] = _SharedInput(group)
                one.parent.register_forward_hook(shared[one.parent].forget)
            one.layer.register_forward_pre_hook(_on_input(shared[one.parent].enter))
        elif one.style.enters:
            ENTRIES[one.style.enters](one, group)
        if one.style.leaves:
            EXITS[one.style.leaves](one, group)


def _fused_mlps(layers: list[SplitLayer]) -> set[nn.Module]:
    """The gated MLPs that run as one operator: their borders are those of the whole."""
    styles = {(one.parent, one.name.rpartition(".")[2]): one.style for one in layers}
    biased = {one.parent for one in layers for split in split_parameters(one) if split.name == "bias"}
    wanted = (STYLES["colwise"], STYLES["colwise"], STYLES["rowwise"])
    return {
        parent
        for parent in dict.fromkeys(one.parent for one in layers)
        if (parts := parent.__dict__.get("_fullshard_mlp")) is not None
        and tuple(styles.get((parent, name)) for name in parts[:3]) == wanted
        and parent not in biased
    }


def _drop_slices(layer: Any, group: RankGroup) -> None:
    """The dropout of an adapter whose input is this rank's slice: its part of the mask for the whole input. Fused
    adapters draw a mask for each slice."""
    for dropout in getattr(layer, "lora_dropout", {}).values():
        setattr(layer, OF_SLICE, group.place)
        if isinstance(dropout, nn.Dropout):
            dropout.forward = functools.partial(_dropped, dropout, group)


def _dropped(dropout: nn.Dropout, group: RankGroup, x: torch.Tensor) -> torch.Tensor:
    if not dropout.training:
        return x
    ones = x.new_ones(*x.shape[:-1], x.shape[-1] * group.size)
    return x * between.own_slice(nn.functional.dropout(ones, dropout.p), -1, group)


def _on_input(border: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda _, args: (border(args[0]), *args[1:])


class _SharedInput:
    """The input of the column-parallel layers of one module: they often share it, and then its gradient is summed once.
    They get the same tensor, as a fused adapter expects."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input as layers get it."""
        if self.last is None or self.last[0] is not x:
            self.last = x, between.sum_gradients(x, self.group)
        return self.last[1]

    def forget(self, *_: Any) -> None:
        """At the end of the module's forward."""
        self.last = None


# --- inputs -----------------------------------------------------------------------------------------------------------


def _enter_slice(one: SplitLayer, group: RankGroup) -> None:
    one.layer.register_forward_pre_hook(_on_input(lambda x: between.own_slice(x, -1, group)))


class _TokenSlice:
    """An embedding of which each rank has the rows of some tokens: it looks up those, the others are zero."""

    def __init__(self, group: RankGroup, tokens: int) -> None:
        self.group, self.count = group, tokens // group.size
        self.first = group.place * self.count
        self.others: torch.Tensor | None = None

    def enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The places of tokens among this rank's."""
        places = args[0] - self.first
        self.others = (places < 0) | (places >= self.count)
        return places.masked_fill(self.others, 0), *args[1:]

    def leave(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The vectors of all tokens."""
        others, self.others = self.others, None
        assert others is not None
        return between.sum_terms(output.masked_fill(others.unsqueeze(-1), 0), self.group)


def _enter_tokens(one: SplitLayer, group: RankGroup) -> None:
    tables = [split.module for split in split_parameters(one)]
    rows = _TokenSlice(group, next(split_parameters(one)).parameter.shape[0])
    for table in tables:
        padding = getattr(table, "padding_idx", None)  # its vector gets no gradient
        if padding is not None:
            inside = rows.first <= padding < rows.first + rows.count
            table.padding_idx = padding - rows.first if inside else None
    one.layer.register_forward_pre_hook(rows.enter)
    one.layer.register_forward_hook(rows.leave, prepend=True)  # noise is added to whole vectors


ENTRIES: dict[str, Callable[[SplitLayer, RankGroup], None]] = {"slice": _enter_slice, "tokens": _enter_tokens}


# --- outputs ----------------------------------------------------------------------------------------------------------


def _leave_terms(one: SplitLayer, group: RankGroup) -> None:
    """The sum of the ranks' terms. Every rank's has the whole bias, which counts once."""
    biased = [split.module for split in split_parameters(one) if split.name == "bias"]

    def leave(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not biased:
            return between.sum_terms(output, group)
        bias: Any = biased[0].bias
        return between.sum_terms(output - bias, group) + bias

    one.layer.register_forward_hook(leave)


def _leave_slices(one: SplitLayer, group: RankGroup) -> None:
    """The ranks' outputs side by side. Logits that are not computed yet stay so: the loss is computed from slices."""
    for split in split_parameters(one):
        set_slice(split.module, group)

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        return output if type(output) is DeferredLogits else between.gather_slices(output, -1, group)

    one.layer.register_forward_hook(leave)


def _leave_rope_slices(one: SplitLayer, group: RankGroup) -> None:
    """Multi-head latent attention: the last features go to each rank's heads without another layer between."""
    width = int(one.parent.config.qk_rope_head_dim)

    def leave(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, rope = output.split([output.shape[-1] - width, width], -1)
        return torch.cat([latent, between.sum_gradients(rope, group)], -1)

    one.layer.register_forward_hook(leave)


EXITS: dict[str, Callable[[SplitLayer, RankGroup], None]] = {
    "terms": _leave_terms,
    "token terms": lambda one, group: None,  # part of the entry
    "slices": _leave_slices,
    "rope slices": _leave_rope_slices,
}
