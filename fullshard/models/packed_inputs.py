"""Passes packed rows, which hold several documents, to a model so that documents do not attend to each other.

For most models it is enough that positions restart with each document: transformers derives block-diagonal attention
from them. Some models need the attention mask itself, and our own attention (`attention.py`) takes one that is made
here once per batch. Layers that carry a state along the row (Mamba, linear attention, convolutions) are run one
document at a time. `packing_check.py` finds out which of these a model needs.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.models.attention import batch_size, is_own
from fullshard.models.attention_masks import block_mask, dense_mask, known_rows, masks_by_layer
from fullshard.models.causal_lm import get_causal_lm

Documents = list[list[int]]
"""For each row, the start of each document, and the end of the last one."""


@dataclass(frozen=True)
class PackingMethod:
    """What a model needs besides positions."""

    masks: bool = False
    """Whether it needs the attention mask, in the layout that the model would build itself."""
    alone: tuple[str, ...] = ()
    """Classes of the modules that are run one document at a time."""

    def __str__(self) -> str:
        parts = ["positions", *(["masks"] if self.masks else [])]
        return " and ".join(parts) + (f"; one document at a time: {', '.join(self.alone)}" if self.alone else "")


class Packed:
    """Changes a model's forward so that it handles packed rows inside `rows`."""

    def __init__(self, model: Any, way: PackingMethod, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.way, self.dtype = get_causal_lm(model), way, dtype
        self.documents: Documents | None = None
        self.is_packed = False
        """Whether rows of the batch hold several documents."""
        self.usual: torch.Size | None = None
        """The size of the first batch, which layers are compiled for."""
        self.changed: list[Any] = []
        if way.masks:
            self._change(self.model, self._with_masks)
        for module in self.model.modules():
            if type(module).__name__ in way.alone:
                self._change(module, self._each_document)

    def _change(self, module: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        module.forward = wrap(module.forward)
        self.changed.append(module)

    def undo(self) -> None:
        """Restore the model's own forward."""
        for module in self.changed:
            del module.forward
        self.changed = []

    @contextlib.contextmanager
    def rows(self, batch: dict[str, torch.Tensor]) -> Iterator[None]:
        """Inside, forward and backward passes are over this batch, which must be on the host."""
        positions = batch.get("position_ids")
        self.is_packed = positions is not None
        size = batch["input_ids"].shape if "input_ids" in batch else None
        self.usual = self.usual or size
        self.documents = documents_of(positions) if self.way.alone and positions is not None else None
        try:
            with known_rows(positions), batch_size(size == self.usual):
                yield
        finally:
            self.documents, self.is_packed = None, False

    def _with_masks(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        takes = takes_positions(self.model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_packed:
                return plain(*args, **kwargs)
            positions = kwargs["position_ids"] if takes else kwargs.pop("position_ids")
            kwargs["attention_mask"] = masks_by_layer(self.model.config, positions, self._in_layout)
            return plain(*args, **kwargs)

        return forward

    def _in_layout(self, starts: torch.Tensor) -> Any:
        """A mask as the model's attention takes it: True where a token may attend; for eager attention, 0 there and the
        lowest value elsewhere."""
        config = self.model.config.get_text_config()
        if is_own(config):
            return block_mask(starts)
        mask = dense_mask(starts)
        if config._attn_implementation != "eager":
            return mask
        zeros = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return zeros.masked_fill_(~mask, torch.finfo(self.dtype).min)

    def _each_document(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            documents = self.documents
            if documents is None:
                return plain(*args, **kwargs)
            self.documents = None  # inner modules get one document
            try:
                rows = []
                for row, bounds in enumerate(documents):
                    cuts = [(row, a, b, bounds[-1]) for a, b in itertools.pairwise(bounds)]
                    parts = [plain(*_cut(args, *cut), **_cut(kwargs, *cut)) for cut in cuts]
                    rows.append(_joined(parts, 1, [end - start for _, start, end, _ in cuts]))
                return _joined(rows, 0, [1] * len(rows))
            finally:
                self.documents = documents

        return forward


def takes_positions(model: Any) -> bool:
    """Whether the model's forward has a `position_ids` argument."""
    return "position_ids" in inspect.signature(type(get_causal_lm(model)).forward).parameters


def documents_of(positions: torch.Tensor) -> Documents:
    """The documents of each row: a document starts where the position is 0."""
    documents: Documents = [[] for _ in positions]
    for row, at in (positions == 0).nonzero().tolist():
        documents[row].append(at)
    return [[*bounds, positions.shape[1]] for bounds in documents]


def _cut(value: Any, row: int, start: int, end: int, size: int) -> Any:
    """The arguments of a module for one document: slices of [rows, size, …] and masks [rows, heads, size, size]."""
    if isinstance(value, dict):
        return {k: _cut(v, row, start, end, size) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cut(v, row, start, end, size) for v in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    mine = value[min(row, value.shape[0] - 1)].unsqueeze(0)
    if value.dim() == 4 and value.shape[-2:] == (size, size):
        return mine[:, :, start:end, start:end]
    return mine[:, start:end] if value.shape[1] == size else value


def _joined(parts: list[Any], dim: int, sizes: list[int]) -> Any:
    """Concatenate a module's outputs for several documents; values that are not per token come from the last one."""
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_joined(list(each), dim, sizes) for each in zip(*parts, strict=True))
    if isinstance(parts[0], torch.Tensor) and [part.shape[dim] for part in parts if part.dim() > dim] == sizes:
        return torch.cat(parts, dim)
    return parts[-1]
