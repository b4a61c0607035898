"""Options of a sharded model: the sharding strategy, backward prefetch and mixed precision. No tensors."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import FSDPError
from fullshard.config.options import counting_number


class ShardingStrategy(enum.IntEnum):
    """What is sharded, and how long gathered values are kept: a row for each strategy, which plan and engine read."""

    # fmt: off
    #                    number  shards hybrid keeps
    FULL_SHARD         =      1, True,  False, False
    SHARD_GRAD_OP      =      2, True,  False, True
    NO_SHARD           =      3, False, False, True
    HYBRID_SHARD       =      4, True,  True,  False
    HYBRID_SHARD_ZERO2 =      5, True,  True,  True
    # fmt: on

    shards: bool
    """Whether parameters, gradients and optimizer state are sharded; otherwise every rank holds whole parameters, and
    gradients are averaged."""
    hybrid: bool
    """Whether the model is sharded inside groups of ranks and replicated across them."""
    keeps_after_forward: bool
    """Whether gathered values are kept until their backward is over; otherwise they are freed after forward."""

    def __new__(cls, number: int, shards: bool, hybrid: bool, keeps_after_forward: bool) -> ShardingStrategy:
        strategy = int.__new__(cls, number)
        strategy._value_ = number
        strategy.shards, strategy.hybrid, strategy.keeps_after_forward = shards, hybrid, keeps_after_forward
        return strategy

    @classmethod
    def of(cls, value: ShardingStrategy | str | int) -> ShardingStrategy:
        """The strategy with this name or number (numbers may come as text, as in configuration files)."""
        if isinstance(value, str):
            name = value.strip().upper().removeprefix("SHARDINGSTRATEGY.")
            if name in cls.__members__:
                return cls[name]
            number = counting_number(name)
            value = value if number is None else number
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and (match := [strategy for strategy in cls if strategy == value]):
            return match[0]
        strategies = ", ".join(f"{s.name} ({s.value})" for s in cls)
        raise FSDPError(f"unknown sharding strategy {value!r}; the strategies are {strategies}")


class BackwardPrefetch(enum.Enum):
    """When the next unit of a backward pass is gathered."""

    BACKWARD_PRE = "BACKWARD_PRE"
    """Before the current unit's gradients are computed: the most overlap, but one more unit in memory."""
    BACKWARD_POST = "BACKWARD_POST"
    """After the current unit's gradients are computed, before they are reduced."""
    NONE = "NONE"
    """Only when it is needed."""

    @classmethod
    def of(cls, value: BackwardPrefetch | str | None) -> BackwardPrefetch:
        """The choice from itself or its name; None for no prefetching."""
        if isinstance(value, cls):
            return value
        name = "NONE" if value is None else str(value).upper().removeprefix("BACKWARDPREFETCH.")
        name = {"NO_PREFETCH": "NONE"}.get(name, name)
        if name not in cls.__members__:
            raise FSDPError(f"unknown backward_prefetch {value!r}; choose {', '.join(cls.__members__)} or None")
        return cls[name]


@functools.cache
def dtype_of(value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, given as itself or by name ("bfloat16", "torch.bfloat16", "bf16", "fp16", "fp32")."""
    if value is None or isinstance(value, torch.dtype):
        return value
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    name = str(value).removeprefix("torch.")
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise FSDPError(f"unknown dtype {value!r}; expected torch.bfloat16, 'bfloat16' or 'bf16', for example")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a training step. None means no cast."""

    param_dtype: Any = None
    """Forward and backward run in this dtype; parameters are gathered in it."""
    reduce_dtype: Any = None
    """Gradients are sent in this dtype; None means the dtype they are computed in. On Gloo the sums themselves are
    always computed in fp32 or wider."""
    buffer_dtype: Any = None
    """Floating-point buffers are cast to this dtype once, when the module is wrapped."""
    output_dtype: Any = None
    """Floating-point outputs of the outermost module are cast to this dtype."""
    master_dtype: Any = torch.float32
    """Trainable parameters are stored and updated in at least this dtype; None keeps the stored dtype. Frozen
    parameters always keep theirs."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of every unit to `param_dtype`."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "master_dtype"):
            dtype = dtype_of(getattr(self, name))
            if dtype is not None and not dtype.is_floating_point:
                raise FSDPError(f"MixedPrecision({name}={dtype}): expected a floating-point dtype")
            object.__setattr__(self, name, dtype)

    @classmethod
    def of(cls, value: MixedPrecision | str | torch.dtype | None) -> MixedPrecision:
        """`None` and "no" change nothing; a dtype or its name means: compute in it, reduce in fp32."""
        if isinstance(value, MixedPrecision):
            return value
        if value is None or value in ("no", "none"):
            return cls(master_dtype=None)
        return cls(param_dtype=dtype_of(value), reduce_dtype=torch.float32)

    def stored(self, dtype: torch.dtype, trainable: bool) -> torch.dtype:
        """The dtype of a parameter's shards."""
        if not (trainable and dtype.is_floating_point and self.master_dtype is not None):
            return dtype
        return torch.promote_types(dtype, self.master_dtype)

    def computed(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of a gathered parameter. Packed (integer) values are never cast."""
        return self.param_dtype if self.param_dtype is not None and stored.is_floating_point else stored

    def reduced(self, computed: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient is reduced."""
        return self.reduce_dtype if self.reduce_dtype is not None and computed.is_floating_point else computed

    def __str__(self) -> str:
        if self == MixedPrecision.of(None):
            return "as stored"
        master = "as stored" if self.master_dtype is None else f"{dtype_name(self.master_dtype)} master"
        parts = [f"trainable parameters: {master}, frozen ones as stored"]
        for label, dtype in (
            ("compute", self.param_dtype),
            ("reduce", self.reduce_dtype),
            ("buffers", self.buffer_dtype),
            ("output", self.output_dtype),
        ):
            if dtype is not None:
                parts.append(f"{label} {dtype_name(dtype)}")
        return ", ".join(parts)
