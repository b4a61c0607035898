"""Whether an optimizer class can update sharded parameters: it is tried on small ones, beside whole ones.

torch's operators treat a sharded parameter as the whole one, so most classes can. A class that reads memory directly,
has kernels of its own or makes plain tensors from sharded ones fails, or updates each piece as if it were whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.device.torch_private import local_of, spec_of
from fullshard.distributed import runtime
from fullshard.distributed.ranks import run_on_all_ranks
from fullshard.fsdp import FSDPv2
from fullshard.spmd.redistribute import layout_of
from fullshard.spmd.tensor import full_of

STEPS = 3


class _Small(nn.Module):
    """A matrix and a vector that most numbers of ranks split unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(_values((5, 3), 1))
        self.vector = nn.Parameter(_values((7,), 2))

    def forward(self) -> torch.Tensor:
        return self.matrix.sum() + self.vector.sum()


def _values(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Values in (-1, 1) without a random generator, whose state belongs to the run."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, device=runtime.device()) * 2.3 + number).view(shape)


def try_on_shards(kind: type, options: dict[str, Any], model: Any) -> None:
    """Refuse an optimizer class whose steps fail on sharded parameters or give other values there. All ranks must call
    it."""
    whole = _Small()
    options_of_shards = {"strategy": model.plan.strategy, "small_parameter_bytes": 0}
    sharded: Any = FSDPv2(_Small(), model.mesh, **options_of_shards)  # type: ignore[call-arg]
    different = run_on_all_ranks(lambda: _train_both(kind, options, whole, sharded), f"trial of {kind.__name__}")
    if different:
        raise ConfigError(
            f"{kind.__name__} does not treat a sharded parameter as one: a {different} ends with other values than on "
            f"one device. Use an optimizer that works element by element, or one of the names of optim."
        )


def _train_both(kind: Any, options: dict[str, Any], whole: nn.Module, sharded: nn.Module) -> str:
    """The name of a parameter that differs after a few steps; empty if none does."""
    with torch.random.fork_rng():
        for module in (whole, sharded):
            torch.manual_seed(0)
            try:
                _train(kind(list(module.parameters()), **options), module)
            except Exception as error:
                where = "sharded" if module is sharded else "these"
                raise ConfigError(
                    f"{kind.__name__} cannot update {where} parameters ({type(error).__name__}: {error}); use another "
                    f"optimizer, or one of the names of optim."
                ) from error
    pairs = zip(whole.named_parameters(), sharded.parameters(), strict=True)
    return next((name for (name, p), q in pairs if not torch.allclose(p, full_of(q), rtol=1e-4, atol=1e-6)), "")


def _train(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    for step in range(STEPS):
        for number, p in enumerate(module.parameters()):
            grad = _values(tuple(p.shape), step + 10 * number)
            p.grad = torch.zeros_like(p)
            if isinstance(module, FSDPv2):
                local_of(p.grad).copy_(grad[layout_of(spec_of(p)).slices(p.shape, runtime.rank())])
            else:
                p.grad.copy_(grad)
        optimizer.step()
