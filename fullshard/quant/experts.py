"""`NF4Experts`: a module with fused expert weights in bitsandbytes' 4 bits, quantized expert by expert."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.device.torch_private import parameters_of
from fullshard.distributed import runtime
from fullshard.quant import blocks, sharded_groups
from fullshard.quant.grouped_product import Stack, quantized
from fullshard.quant.packed_experts import PackedExperts, parameter_name
from fullshard.quant.sharded_groups import GroupRun, Scheme
from fullshard.spmd.mesh import Mesh


class NF4Experts(PackedExperts):
    """A module with 4-bit fused experts; `NF4Experts.of` converts a module to a subclass of its own class."""

    PARTS = ("packed", "absmax", "nested")
    scheme: Scheme

    @staticmethod
    def of(
        module: nn.Module, names: Sequence[str], scheme: Scheme, compute_dtype: torch.dtype | None = None
    ) -> NF4Experts:
        """Quantize weights of a module in place; weights on the meta device stay there."""
        dense: dict[str, Any] = {name: parameters_of(module)[name] for name in names}
        experts: NF4Experts = NF4Experts._convert(module, names, compute_dtype)
        experts.scheme = scheme
        for name, weight in dense.items():
            count, numel = weight.shape[0], weight[0].numel()
            parts = {
                part: torch.zeros(shape, dtype=torch.uint8, device=weight.device)
                for part, shape in scheme.shapes(numel, count).items()
            }
            if not weight.is_meta:
                runs = [
                    GroupRun(i, *blocks.quantize(matrix.detach().reshape(-1), scheme.blocksize, scheme.quant_type))
                    for i, matrix in enumerate(weight)
                ]
                parts = sharded_groups.finish_runs(runs, count, numel, scheme)
            experts._set_parts(name, parts)
        return experts

    # --- the weights --------------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        return "4-bit"

    def part_shapes(self, name: str) -> Mapping[str, tuple[int, int]]:
        count, *matrix = self.fused[name]
        return self.scheme.shapes(math.prod(matrix), count)

    def stack_of(self, name: str, parts: Mapping[str, torch.Tensor]) -> Stack:
        matrix = self.fused[name][1:]
        count = len(parts["packed"]) // self.scheme.groups(math.prod(matrix))  # all experts, or those of this rank
        return quantized(self.scheme, (count, *matrix), dict(parts))

    # --- loading: the protocol of `weights/transforms.py` -------------------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The dense weights."""
        return dict(self.fused)

    def read_files(self, readers: Any, pieces: Any) -> dict[str, list[GroupRun]]:
        """Read only this rank's groups of each expert, and quantize them on the device that the module runs on."""
        return {name: self._read(readers[name], name, pieces[name].rows) for name in self.fused}

    def _read(self, reader: Any, name: str, rows: slice) -> list[GroupRun]:
        (count, _, width), scheme, runs = self.fused[name], self.scheme, []
        for i, start, stop in sharded_groups.runs_of(rows, count, math.prod(self.fused[name][1:]), scheme):
            first = start // width
            values = reader[i : i + 1, first : -(-stop // width)].reshape(-1)[start - first * width :][: stop - start]
            values = values.to(device=runtime.device(), dtype=self.dtype)
            runs.append(GroupRun(i, *blocks.quantize(values, scheme.blocksize, scheme.quant_type)))
        empty = torch.empty(0, device=runtime.device())
        return runs or [GroupRun(0, empty.to(torch.uint8), empty)]

    def finish_reading(self, read: dict[str, list[GroupRun]], pieces: Any) -> None:
        """Do the steps that need all ranks, and store this rank's rows."""
        for name, (count, *matrix) in self.fused.items():
            group = sharded_groups.ranks_of_shards(parameters_of(self)[name])
            here = _experts_of_rank(pieces[name].mesh, count)
            runs = [run._replace(matrix=max(run.matrix - here.start, 0)) for run in read[name]]
            parts = sharded_groups.finish_runs(runs, len(here), math.prod(matrix), self.scheme, group)
            for part, value in parts.items():
                pieces[parameter_name(name, part)].local.copy_(value)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Dense weights, because transformers keeps fused experts dense in 4-bit models."""
        parts = {name: {part: values[parameter_name(name, part)] for part in self.parts(name)} for name in self.fused}
        return {name: self.dense(name, own, self.dtype) for name, own in parts.items()}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme.quant_type}, blocks of {self.scheme.blocksize}"


def _experts_of_rank(mesh: Mesh, count: int) -> range:
    """The experts that this rank and those along `fsdp` hold: all, if there is no axis `ep`."""
    axis, place = mesh.get_axis_name_idx("ep"), mesh.coordinate(runtime.rank())
    if axis is None or place is None:
        return range(count)
    each = count // mesh.mesh_shape[axis]
    return range(each * place[axis], each * (place[axis] + 1))
