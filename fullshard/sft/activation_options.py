"""Settings of memory: whether it is planned, and what is kept for the backward pass, recomputed in it, or moved to the
host.

Part of `SFTConfig`. Nothing here imports torch.
"""

# ruff: noqa: RUF009 - options are fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fullshard.config.byte_size import parse_size
from fullshard.config.errors import ConfigError
from fullshard.config.options import as_bool, option


def memory_budget(text: str) -> str:
    """A value of `gradient_checkpointing` besides true and false: auto, or a size with its unit."""
    text = text.strip()
    if text.lower() == "auto":
        return "auto"
    parse_size(text)
    return text


@dataclass
class ActivationOptions:
    """Settings of activation memory."""

    skip_plan: bool = False
    """Start without planning the run: one that cannot fit is not stopped, and plan.json is not written."""
    gradient_checkpointing: bool | str = option(
        True, kind=bool, besides=memory_budget, metavar="true, false, auto, or a size such as 40GiB"
    )
    """Recompute activations in the backward pass instead of keeping them: in all layers (true), in none (false), or in
    no more than needed for the free memory of the GPU (auto) or for a peak of allocated memory (a size)."""
    use_reentrant: bool = False
    """Use the reentrant variant of gradient checkpointing."""
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, kind=dict, metavar="use_reentrant=true or false, or JSON"
    )
    """Options of gradient checkpointing, as transformers takes them: `use_reentrant`."""
    activation_offloading: bool = False
    """Keep the inputs of recomputed layers on the host until the backward pass. Needs `gradient_checkpointing`."""

    @property
    def activation_budget(self) -> int | Literal["auto"] | None:
        """The bytes that a rank may allocate on its device, or auto for what is free; None if `gradient_checkpointing`
        is simply on or off."""
        given = self.gradient_checkpointing
        return None if isinstance(given, bool) else "auto" if given == "auto" else parse_size(given)

    def take_checkpointing(self) -> None:
        """Make the nested settings of gradient checkpointing the run's own, and check what excludes another."""
        given: dict[str, Any] = dict(self.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]
        if "use_reentrant" in given:
            self.use_reentrant = as_bool(given.pop("use_reentrant"))
        unknown = [name for name, value in given.items() if name != "selective" or value]
        if unknown:
            raise ConfigError(f"gradient_checkpointing_kwargs has {', '.join(unknown)}; expected use_reentrant alone.")
        if self.activation_offloading and not self.gradient_checkpointing:
            raise ConfigError(
                "activation_offloading keeps the inputs of recomputed layers on the host; it needs "
                "gradient_checkpointing."
            )
