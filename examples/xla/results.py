"""Prints tensors in a form that is the same on both engines and at any number of devices."""

import torch

import fullshard.runtime as xr
import fullshard.spmd as xs


def show(**tensors: torch.Tensor) -> None:
    """Print shape, sum, norm and the first values of each global tensor, on process 0."""
    xr.sync()  # on XLA: computes all that was recorded, in one program; else reading a tensor compiles its own
    for name, t in tensors.items():
        t = xs.full_tensor(t).detach().cpu().float()
        numbers = [t.sum().item(), t.norm().item(), *t.flatten()[:4].tolist()]
        xr.print0(name, tuple(t.shape), *(f"{number:.7g}" for number in numbers))


def show_model(model: torch.nn.Module) -> None:
    """Print the parameters of a model, by their names without prefixes."""
    show(**dict(model.named_parameters()))
