"""`NF4Experts`: a module whose fused expert weights, [experts, rows, columns], are held in 4 bits, expert by expert.

The module keeps its class's own forward, whichever implementation it chooses. In it each weight is a `FusedWeight`: of
the dense shape, unpacked one expert at a time where it is multiplied with, in forward and again in backward. PEFT's
adapters on such a weight (`target_parameters`) are multiplied with beside it, so that no weight is ever dense as a
whole.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard import runtime
from fullshard.errors import QuantizationError
from fullshard.quant import blocks, sharded_groups
from fullshard.quant.expert_weights import Factors, FusedWeight
from fullshard.quant.sharded_groups import Parts, Run, Scheme
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import local_of, parameters_of

PARTS = ("packed", "absmax", "nested")


class NF4Experts(nn.Module):
    """What a module with fused experts becomes; made by `NF4Experts.of`, as a subclass of the module's own class.

    Packed values have the name of the weight they stand for, so that PEFT finds it; scales are beside them
    (`…_absmax`, `…_nested`).
    """

    scheme: Scheme
    compute_dtype: torch.dtype | None
    dtype: torch.dtype
    """Of the weights before they were quantised."""
    fused: dict[str, tuple[int, int, int]]
    """The shapes of the weights, by name."""
    plain: type[nn.Module]
    """The class that the module had."""
    running_dtype: torch.dtype | None
    """Of the products, while the module runs."""
    adapters: dict[str, list[Factors]]
    """Those that are in force, by weight, while the module runs."""

    @staticmethod
    def of(
        module: nn.Module, names: Sequence[str], scheme: Scheme, compute_dtype: torch.dtype | None = None
    ) -> NF4Experts:
        """Quantise weights of a module, in place; on the meta device they are only laid out."""
        _let_adapters_act()
        made: Any = module
        made.scheme, made.compute_dtype, made.plain = scheme, compute_dtype, type(module)
        made.fused = {name: tuple(parameters_of(module)[name].shape) for name in names}
        made.dtype = parameters_of(module)[names[0]].dtype
        made.running_dtype, made.adapters = None, {}
        for name in names:
            weight: Any = parameters_of(module)[name]
            count, numel = weight.shape[0], weight[0].numel()
            parts = {
                part: torch.zeros(shape, dtype=torch.uint8, device=weight.device)
                for part, shape in scheme.shapes(numel, count).items()
            }
            if not weight.is_meta:
                runs = [
                    Run(i, *blocks.quantize(matrix.detach().reshape(-1), scheme.blocksize, scheme.quant_type))
                    for i, matrix in enumerate(weight)
                ]
                parts = sharded_groups.finish_runs(runs, count, numel, scheme)
            for part, value in parts.items():
                parameters_of(module)[parameter_name(name, part)] = nn.Parameter(value, requires_grad=False)
        module.__class__ = _class_of(made.plain, tuple(names))
        return made

    # --- the weights --------------------------------------------------------------------------------------------------

    def parts(self, name: str) -> Parts:
        """The parts of a weight as they are now: gathered while the module's unit runs, shards at rest."""
        held = {part: parameters_of(self).get(parameter_name(name, part)) for part in PARTS}
        return {part: value for part, value in held.items() if value is not None}

    def whole_parts(self, name: str) -> Parts:
        """The parts of a whole weight as plain tensors."""
        found = {part: local_of(p) if is_sharded(p) else p.data for part, p in self.parts(name).items()}
        count, *matrix = self.fused[name]
        for part, shape in self.scheme.shapes(math.prod(matrix), count).items():
            if tuple(found[part].shape) != shape:
                raise QuantizationError(
                    f"this rank holds {tuple(found[part].shape)} of the {shape} {part} bytes of 4-bit experts; the "
                    f"whole weight can be read inside `with model.summon_full_params():`"
                )
        return found

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A dense weight."""
        return unpack_stack(self.whole_parts(name), self.fused[name], self.scheme, dtype or self.dtype)

    def restore(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Make the module what it was, with dense (rounded) weights, in place."""
        dense = {name: self.dequantize(name, dtype) for name in self.fused}
        for name in self.made_parameters():
            del parameters_of(self)[name]
        self.__class__ = self.plain
        for name, weight in dense.items():
            parameters_of(self)[name] = nn.Parameter(weight, requires_grad=False)
        return self

    # --- loading: the protocol of `weights/transforms.py` -------------------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """Files hold dense weights, however they cut them."""
        return dict(self.fused)

    def made_parameters(self) -> tuple[str, ...]:
        return tuple(parameter_name(name, part) for name in self.fused for part in self.parts(name))

    def read_files(self, readers: Any, pieces: Any) -> dict[str, list[Run]]:
        """Read this rank's groups of each expert, no more, and quantise them where the module will run."""
        return {name: self._read(readers[name], name, pieces[name].rows) for name in self.fused}

    def _read(self, reader: Any, name: str, rows: slice) -> list[Run]:
        (count, _, width), scheme, found = self.fused[name], self.scheme, []
        for i, start, stop in sharded_groups.runs_of(rows, count, math.prod(self.fused[name][1:]), scheme):
            first = start // width
            values = reader[i : i + 1, first : -(-stop // width)].reshape(-1)[start - first * width :][: stop - start]
            values = values.to(device=runtime.device(), dtype=self.dtype)
            found.append(Run(i, *blocks.quantize(values, scheme.blocksize, scheme.quant_type)))
        empty = torch.empty(0, device=runtime.device())
        return found or [Run(0, empty.to(torch.uint8), empty)]

    def finish_reading(self, read: dict[str, list[Run]], pieces: Any) -> None:
        """Work out what takes all ranks, and store this rank's rows."""
        for name, (count, *matrix) in self.fused.items():
            mesh = pieces[name].mesh
            split = any(p.is_shard() for p in parameters_of(self)[name].placements)
            group = mesh.get_group(mesh.get_axis_name_idx("fsdp")) if split else None
            parts = sharded_groups.finish_runs(read[name], count, math.prod(matrix), self.scheme, group)
            for part, value in parts.items():
                pieces[parameter_name(name, part)].local.copy_(value)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What files hold: dense weights, since transformers holds experts dense beside 4-bit layers."""
        found = {}
        for name, shape in self.fused.items():
            parts = {part: values[parameter_name(name, part)] for part in self.parts(name)}
            found[name] = unpack_stack(parts, shape, self.scheme, self.dtype)
        return found

    # --- computing ----------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given, kind = hidden_states.dtype, hidden_states.device.type
        around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given
        self.running_dtype = self.compute_dtype or around
        try:
            out = self.plain.forward(self, hidden_states.to(self.running_dtype), *args, **kwargs)
        finally:
            self.running_dtype = None
        return out.to(given)

    def requires_grad_(self, requires_grad: bool = True) -> NF4Experts:
        if requires_grad:
            raise QuantizationError(
                "4-bit experts are frozen: they have no gradient to be trained by. Add adapters (LoRA, "
                "target_parameters) to train, or load the model without quantisation"
            )
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.fused.items())
        return f"{shapes}: {self.scheme.quant_type}, blocks of {self.scheme.blocksize}"


def parameter_name(name: str, part: str) -> str:
    """What a part of a weight is called: packed values as the weight itself."""
    return name if part == "packed" else f"{name}_{part}"


def unpack_stack(parts: Parts, shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """All experts, dense. Of meta parts the form."""
    out = torch.empty(shape, dtype=dtype, device=parts["packed"].device)
    if not out.is_meta:
        for i, place in enumerate(out):
            place.copy_(
                sharded_groups.dense(sharded_groups.matrix_of(parts, i, shape[1:], scheme), shape[1:], scheme, dtype)
            )
    return out


@functools.cache
def _class_of(plain: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """The class of such a module: its own, whose weights are seen as `FusedWeight`s."""
    seen = {name: property(functools.partial(FusedWeight, name=name)) for name in names}
    return type(f"NF4{plain.__name__}", (NF4Experts, plain), seen)


# --- adapters ---------------------------------------------------------------------------------------------------------


@functools.cache
def _let_adapters_act() -> None:
    """Let PEFT's adapters on a parameter act on experts in 4 bits.

    PEFT adds them to the weight while its module runs, which must be dense for that. Here they are multiplied with
    beside the weight. Other modules' adapters act as ever.
    """
    from peft.tuners.lora import layer

    wrapper_class: Any = layer.ParamWrapper
    fold_in = wrapper_class._activate_lora

    @contextlib.contextmanager
    def activate(wrapper: Any, adapters: Sequence[str]) -> Iterator[None]:
        experts, name = wrapper.get_base_layer(), wrapper.parameter_name
        if not isinstance(experts, NF4Experts) or name not in experts.fused:
            with fold_in(wrapper, adapters):
                yield
            return
        experts.adapters[name] = [_factors(wrapper, adapter) for adapter in adapters if adapter in wrapper.lora_A]
        try:
            yield
        finally:
            del experts.adapters[name]

    wrapper_class._activate_lora = activate


def _factors(wrapper: Any, adapter: str) -> Factors:
    """An adapter's factors by expert: the weight, [experts, rows, columns], gets scale × left @ right."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    right = a.reshape(wrapper.num_experts, -1, a.shape[-1])  # [experts, r, in]
    left = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)  # [experts, out, r]
    if not getattr(wrapper, "_did_swap_in_out_features", False):  # the weight is stored as [experts, in, out]
        left, right = right.transpose(1, 2), left.transpose(1, 2)
    return Factors(left, right, wrapper.scaling[adapter])
