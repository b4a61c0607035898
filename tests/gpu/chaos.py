"""Makes races between streams visible: random delays, and NaN in all memory that nobody holds.

Inside `chaos(seed)`
- side streams sleep before and after what they are given, and before each collective is issued; compute sleeps too;
  for some layers only the one or only the other sleeps, because sleeping compute hides what side streams do too late;
  whole ranks come late. torch's own communication streams cannot be reached, but a collective starts no sooner than the
  stream it was issued from;
- every block of memory that torch's allocator would hand out next is filled with 0xFF, a NaN in every floating-point
  dtype, on the stream that it would be handed out on. So whatever was let go while another stream still needs it is
  overwritten at the first opportunity, not only when the program happens to allocate something of that size.

With deterministic algorithms a program without races gives the same bits inside and outside. The delays are drawn from
the seed and the rank; what the program calls, and in which order, is not changed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fullshard.device import accelerator, streams
from fullshard.distributed import runtime
from fullshard.fsdp import comm, engine, reduction, unit

CYCLES = 8_000_000
"""The longest sleep of a stream: about 4 ms on today's GPUs, which is longer than the host of a loaded machine needs to
issue the work of a layer."""
LATE = 0.01
"""The longest sleep of a whole rank, in seconds."""
SMALL = 2**20
"""Up to this many bytes torch's allocator serves a request from its pool of small blocks."""


class Chaos:
    """What happens at the places where the engine hands work from one stream to another."""

    def __init__(self, seed: int, delays: bool, poison: bool):
        self.random = random.Random(f"{seed}/{runtime.rank()}")
        self.delays, self.poison = delays, poison
        self.slow = (True, False)
        """Which streams sleep: side streams (True), compute (False)."""
        self.slept = self.poisoned = 0

    def sleep(self) -> None:
        """Let the current stream sleep, sometimes."""
        aside = torch.cuda.current_stream() != torch.cuda.default_stream()
        if self.delays and aside in self.slow and self.random.random() < 0.5:
            torch.cuda._sleep(self.random.randrange(CYCLES))
            self.slept += 1

    def come_late(self) -> None:
        """Let the whole rank sleep, now and then, and other streams than before."""
        if self.random.random() < 0.25:
            self.slow = self.random.choice(((True, False), (True,), (False,)))
        if self.delays and self.random.random() < 0.1:
            time.sleep(self.random.random() * LATE)

    def stomp(self) -> None:
        """Overwrite the memory that the current stream would be given next, sometimes."""
        if not self.poison or self.random.random() < 0.5:
            return
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in free_blocks()]
        for block in held:
            block.fill_(0xFF)
        self.poisoned += len(held)


def free_blocks() -> list[int]:
    """The sizes of the blocks that torch's allocator holds ready for the current stream, largest first."""
    stream = torch.cuda.current_stream().cuda_stream
    sizes = []
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream:
            continue
        for block in segment["blocks"]:
            # The rest of a large segment cannot be asked for in the size of a small block.
            if block["state"] == "inactive" and (segment["segment_type"] == "small") == (block["size"] <= SMALL):
                sizes.append(block["size"])
    return sorted(sizes, reverse=True)


@contextlib.contextmanager
def chaos(seed: int, *, delays: bool = True, poison: bool = True) -> Iterator[Chaos]:
    """Run what follows under delays and poison. On the CPU there are no streams, and nothing happens."""
    made = Chaos(seed, delays, poison)
    if not accelerator.is_accelerator(runtime.device()):
        yield made
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.SideStream, "run", _stream_run(made, streams.SideStream.run))
        for owner, name in (
            (streams.AsyncWork, "join"),
            (unit.Unit, "free"),
            (unit.Unit, "finish_gather"),
            (reduction.Reduction, "__init__"),
            (reduction.Reduction, "finish"),
        ):
            patch.setattr(owner, name, _around(made, getattr(owner, name)))
        patch.setattr(comm.Collectives, "_coalesced", _before(made.sleep, comm.Collectives._coalesced))
        patch.setattr(engine.Engine, "_make_ready", _before(made.come_late, engine.Engine._make_ready))
        yield made
        torch.cuda.synchronize()


def _stream_run(made: Chaos, run: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def slowly(stream: streams.SideStream) -> Iterator[streams.StreamWork]:
        with run(stream) as work:
            made.stomp()  # the side stream's memory, at the moment it may be used again
            made.sleep()
            yield work
            made.sleep()

    return slowly


def _around(made: Chaos, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def disturbed(*args: Any, **kwargs: Any) -> Any:
        made.sleep()
        result = method(*args, **kwargs)
        made.stomp()
        return result

    return disturbed


def _before(disturb: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def disturbed(*args: Any, **kwargs: Any) -> Any:
        disturb()
        return method(*args, **kwargs)

    return disturbed
