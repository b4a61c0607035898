"""Side streams, and shards that lie on the host.

On CUDA what prepares a gather or a reduction (casts, packing, copies from and to the host) runs on a stream of its
own beside compute. With offload the shards, their gradients and so the optimizer's state lie in pinned host memory.
On CPUs all of this falls away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Streams:
    """The side streams of an engine."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self._streams = {name: torch.cuda.Stream(device) for name in ("gather", "reduce")} if self.cuda else {}

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Run what follows beside compute, after everything compute was given so far.

        That order also makes memory safe: whatever the side stream allocates was last used before this point.
        """
        if not self.cuda:
            yield
            return
        side = self._streams[name]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def join(self, name: str) -> None:
        """Let compute wait for what was run aside."""
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self._streams[name])


class HostGradients:
    """Gradients on their way to the host: copies run on, additions wait for `settle()`."""

    def __init__(self) -> None:
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies = False

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        host = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
        self._copies = True
        return host.copy_(grad, non_blocking=True)

    def add(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        if self._copies and total.device.type == "cpu":
            self._additions.append((total, grad))
        else:
            total.add_(grad)

    def settle(self) -> None:
        """After this the host may read the gradients."""
        if self._copies:
            torch.cuda.current_stream().synchronize()
        for total, grad in self._additions:
            total.add_(grad)
        self._additions, self._copies = [], False


def host_copy(t: torch.Tensor) -> torch.Tensor:
    """A shard in host memory: pinned where a GPU will read it."""
    return t.to("cpu").pin_memory() if torch.cuda.is_available() else t.to("cpu")
