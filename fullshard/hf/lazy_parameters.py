"""Parameters whose values are still in their files: what `from_pretrained` gives a model under the launcher.

Such a parameter has its shape, its dtype and no memory. When its values are first used, in any way, it becomes an
ordinary parameter that has them. If it is sharded before that, each rank reads its own slices and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.device.torch_private import NoTorchFunction, become_ordinary, hook_attributes, tree_leaves
from fullshard.weights.key_mapping import converted_readers
from fullshard.weights.slice_reader import Cuts, Job, TensorReader, lengths

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "nbytes", "itemsize",
    "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", *hook_attributes(),
)  # fmt: skip
_METHODS = (
    "size", "numel", "nelement", "dim", "ndimension", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "get_device", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__",
    "__len__",
)  # fmt: skip
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""What can be asked of a tensor without its values."""


class LazyTensor(torch.Tensor):
    """A tensor whose values are in files. It becomes an ordinary tensor or parameter when they are used."""

    reader: TensorReader

    @classmethod
    def of(cls, reader: TensorReader, dtype: torch.dtype) -> LazyTensor:
        """The tensor that `reader` reads, converted to `dtype`."""
        memory = torch.empty(reader.shape, dtype=dtype)
        memory.untyped_storage().resize_(0)
        tensor = memory.as_subclass(cls)
        tensor.reader = reader
        return tensor

    @classmethod
    @torch.compiler.disable  # a compiler would trace the reading
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with NoTorchFunction():
                return func(*args, **kwargs)
        if func is torch.Tensor.detach and not isinstance(args[0], nn.Parameter):
            return cls.of(args[0].reader, args[0].dtype)  # on the way to a parameter
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, LazyTensor):
                tensor.read()
        return func(*args, **kwargs)

    def read(self) -> None:
        """Become an ordinary tensor or parameter."""
        value = self.read_slices(tuple(slice(0, size) for size in self.shape))
        with NoTorchFunction():
            self.data = value
        del self.reader
        become_ordinary(self)

    def read_slices(self, cuts: Cuts) -> torch.Tensor:
        """Some of the values; mapped from the file where nothing has to be converted."""
        if isinstance(self.reader, Mapped) and self.reader.dtype == self.dtype:
            return self.reader.tensor[cuts]
        out = torch.empty(lengths(cuts), dtype=self.dtype)
        self.reader.read_into(out, cuts)
        return out

    # What `nn.Parameter` defines itself. Nothing is read for the class that the tensor has by then.

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        self.read()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.read()
        return self.__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        self.read()
        return repr(self)


class Mapped(TensorReader):
    """A tensor that is mapped from a file, or in memory."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """A range of its values, in their order."""
        return self.tensor.reshape(-1)[start:stop]

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """The copy of the slices into `out`."""

        def copy_slices() -> None:
            out.copy_(self.tensor[cuts])

        yield copy_slices


def materialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `transformers.core_model_loading._materialize_copy`, which reads one tensor of a file."""

    def mapped(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        value = tensor[...]
        on_host = value.device.type == "cpu" and torch.device(device or "cpu").type == "cpu"
        if not on_host or not value.is_floating_point():
            return original(value, device, dtype)
        return LazyTensor.of(Mapped(value), dtype or value.dtype)

    return mapped


def convert(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `WeightConverter.convert`: tensors that are made of several in the files are not made yet either."""

    def converted(self: Any, layer_name: str, model: Any = None, hf_quantizer: Any = None, **options: Any) -> Any:
        parts = self.materialize_tensors()
        flat = [tensor for tensors in parts.values() for tensor in tensors]
        if hf_quantizer is None and all(isinstance(tensor, LazyTensor) for tensor in flat):
            try:
                readers = converted_readers(
                    self, layer_name, {key: [one.reader for one in tensors] for key, tensors in parts.items()}, model
                )
                return {name: LazyTensor.of(reader, flat[0].dtype) for name, reader in readers.items()}
            except (ValueError, RuntimeError, IndexError, AttributeError):
                pass  # transformers has its own words for it
        self.collected_tensors.update(parts)
        return original(self, layer_name, model=model, hf_quantizer=hf_quantizer, **options)

    return converted
